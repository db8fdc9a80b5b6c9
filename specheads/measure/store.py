"""Results in files."""

from pathlib import Path
from typing import TypeVar

from specheads.core.records import OWN_FILE, dumps, from_json, to_json
from specheads.heads.untrusted import read_json

__all__ = ["OWN_FILE", "dumps", "from_json", "read", "to_json"]

T = TypeVar("T")


def read(kind: type[T], file: str | Path) -> T | None:
    """Return what a file holds; None where there is no file."""
    file = Path(file)
    return from_json(kind, read_json(file), str(file)) if file.is_file() else None

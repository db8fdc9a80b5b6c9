"""JSON lines, of corpora and of prompts alike: what is no row is named by file and line."""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from specheads.core.errors import InputError

Row = dict[str, Any]

GZIP = b"\x1f\x8b"
"""How a compressed file begins, whatever it is called."""


def read_jsonl(file: Path) -> Iterator[tuple[str, Row]]:
    """Yield where each row stands, for errors, and the row.

    A file has one JSON object a line, or one list of objects in all; gzip is read too, and blank
    lines are passed over.

    Raises:
        ValueError: The file cannot be read, or something in it is no JSON object.
    """
    try:
        with file.open("rb") as stream:
            is_packed = stream.read(2) == GZIP
        reading: Any = gzip.open if is_packed else open
        with reading(file, mode="rt", encoding="utf-8-sig") as lines:
            yield from parse(lines, str(file))
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise InputError(
            f"rows must stand in a readable UTF-8 file, and {file} is none: {error}; make it "
            "readable, or write it anew"
        ) from error


def parse(lines: Iterable[str], name: str) -> Iterator[tuple[str, Row]]:
    """Yield the rows of a text; errors call it by this name."""
    lines = iter(lines)
    first = next(lines, "")
    if first.lstrip().startswith("["):
        rows = _value(first + "".join(lines), f"the list in {name}")
        pairs = ((f"row {place} of {name}", row) for place, row in enumerate(rows, start=1))
    else:
        pairs = (
            (where, _value(line, where))
            for number, line in enumerate(chain([first], lines), start=1)
            if line.strip()
            for where in [f"line {number} of {name}"]
        )
    for where, row in pairs:
        if not isinstance(row, dict):
            raise InputError(f"{_rule(where)}; it is a {type(row).__name__}, {row!r:.40}")
        yield where, row


def names(keys: Iterable[str]) -> str:
    """Return the keys of a row in one line of some length, whatever they are."""
    return f"{' '.join(', '.join(keys).split()) or 'no key':.100}"


def _value(text: str, where: str) -> Any:
    try:
        value = json.loads(text)
        if "\\u" in text:
            # half a surrogate pair is legal JSON and no text: no tokenizer reads it
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        reason = f"it is no JSON from character {error.pos + 1} on"
    except RecursionError:
        reason = "it is nested too deep"
    except UnicodeEncodeError as error:
        reason = f"it has half of a surrogate pair, {error.object[error.start]!r}"
    except ValueError as error:
        reason = str(error)
    else:
        return value
    raise InputError(f"{_rule(where)}: {reason}; mend or remove it, {text.strip()!r:.40}")


def _rule(where: str) -> str:
    return f"a .jsonl file has one JSON object a line; {where} is none"

"""Lines that are appended one by one: a torn last one is as if it had never been written."""

import json
import zlib
from pathlib import Path
from typing import IO, Any

from specheads.core.errors import InputError
from specheads.core.files import naming_full_disk


class Journal:
    """Rows of JSON in a file, one a line, each with its checksum.

    What is appended has left the process when `append` returns, so that killing it then loses
    nothing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] | None = None

    def read(self) -> list[dict[str, Any]]:
        """Return all whole rows; none where there is no file.

        Raises:
            ValueError: A line but a torn last one is not as it was written.
        """
        return [_row(self.path, line) for line in self._lines()]

    def append(self, row: dict[str, Any]) -> None:
        """Add a row."""
        with naming_full_disk(self.path):
            if self._file is None:
                whole = sum(len(line) + 1 for line in self._lines())
                self._file = self.path.open("ab", buffering=0)
                self._file.truncate(whole)
            body = json.dumps(row, separators=(",", ":"))
            self._file.write(f'{{"crc":{zlib.crc32(body.encode())},"row":{body}}}\n'.encode())

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def remove(self) -> None:
        """Remove the file, should there be one."""
        self.close()
        self.path.unlink(missing_ok=True)

    def _lines(self) -> list[bytes]:
        return self.path.read_bytes().split(b"\n")[:-1] if self.path.is_file() else []


def _row(path: Path, line: bytes) -> dict[str, Any]:
    try:
        kept = json.loads(line)
        body = json.dumps(kept["row"], separators=(",", ":"))
        holds = zlib.crc32(body.encode()) == kept["crc"]
    except (ValueError, RecursionError, KeyError, TypeError):
        holds, kept = False, {}
    if not holds:
        raise damaged(path)
    return kept["row"]


def damaged(file: Path) -> InputError:
    """Return what is said of a file that is not as it was written."""
    # every answer is drawn from a seed of its own, so what is written anew is the same
    return InputError(
        f"self-distilled text must be as it was written, and {file} is damaged or missing; remove "
        f"{file.parent} to have the same text written again"
    )

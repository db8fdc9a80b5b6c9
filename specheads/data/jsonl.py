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

MAX_LINE = 2**25
"""Most characters of a line: a row is a document, and no file of rows is one."""

MAX_LIST = 2**28
"""Most characters of a list, which is in memory as a whole."""

GZIP = b"\x1f\x8b"
"""How a compressed file begins, whatever it is called."""


def read_jsonl(file: Path) -> Iterator[tuple[str, Row]]:
    """Yield where each row stands, for errors, and the row.

    A file has one JSON object a line, or one list of objects in all; gzip is read too, and blank
    lines are passed over. One line at a time is in memory, and of one too long no more than its
    beginning.

    Raises:
        ValueError: The file cannot be read, it holds no row, or something in it is no JSON object
            or too long.
    """
    try:
        with file.open("rb") as stream:
            is_packed = stream.read(2) == GZIP
        reading: Any = gzip.open if is_packed else open
        with reading(file, mode="rt", encoding="utf-8-sig") as lines:
            has_rows = False
            for where, row in parse(_lines(lines, file), str(file)):
                has_rows = True
                yield where, row
            if not has_rows:
                raise InputError(f"{file} holds no row; give documents, one JSON object a line")
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise InputError(
            f"rows must stand in a readable UTF-8 file, and {file} is none: {error}; make it "
            "readable, or write it anew"
        ) from error


def _lines(stream: Any, file: Path) -> Iterator[str]:
    """Yield the lines of a file; one that is too long is refused before it is read to its end."""
    number = 0
    while line := stream.readline(MAX_LINE):
        number += 1
        if len(line) == MAX_LINE:
            raise InputError(
                f"a line holds at most {MAX_LINE:,} characters, line {number} of {file} has more; "
                "write one JSON object a line, or cut the text"
            )
        yield line


def parse(lines: Iterable[str], name: str) -> Iterator[tuple[str, Row]]:
    """Yield the rows of a text; errors call it by this name."""
    numbered = ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
    first = next(numbered, (0, ""))
    numbered = chain([first], numbered)
    if first[1].lstrip().startswith("["):
        rows = _value(_joined((line for _, line in numbered), name), f"the list in {name}")
        pairs = ((f"row {place} of {name}", row) for place, row in enumerate(rows, start=1))
    else:
        pairs = (
            (where, _value(line, where))
            for number, line in numbered
            if line
            for where in [f"line {number} of {name}"]
        )
    for where, row in pairs:
        if not isinstance(row, dict):
            raise InputError(f"{_rule(where)}; it is a {type(row).__name__}, {row!r:.40}")
        yield where, row


def _joined(lines: Iterable[str], name: str) -> str:
    held, size = [], 0
    for line in lines:
        held.append(line)
        size += len(line)
        if size > MAX_LIST:
            raise InputError(
                f"a list of rows holds at most {MAX_LIST:,} characters, {name} has more; write one "
                "JSON object a line"
            )
    return "".join(held)


def names(keys: Iterable[str]) -> str:
    """Return the keys of a row in one line of some length, whatever they are."""
    return f"{' '.join(', '.join(keys).split()) or 'no key':.100}"


def text_row(row: Row, column: str, where: str) -> Row:
    """Return the text of a column as a row of its own; it is None where the row lacks it."""
    text = row.get(column)
    if not isinstance(text, str | None):
        raise InputError(
            f"column {column!r} of {where} must hold text, it holds {type(text).__name__}"
        )
    return {"text": text}


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

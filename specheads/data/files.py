"""Local files of text or rows: find them by a path, and read them row by row."""

import gzip
import json
import os
import sysconfig
import warnings
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from specheads.core.errors import InputError, first_line
from specheads.core.files import local_path

Row = dict[str, Any]
Rows = Iterator[tuple[str, Row]]
"""Each row with its location ("line 3 of a.jsonl"), which error messages name."""
JSONL, PARQUET = (".jsonl", ".jsonl.gz", ".json", ".json.gz"), (".parquet",)
STDLIB_LEFT_OUT = {
    *("site-packages", "dist-packages", "test", "tests"),
    *("idlelib", "idle_test", "__pycache__"),
}
"""Folders below the standard library that hold other packages, or tests."""
STDLIB_MIN_CHARACTERS = 400
"""Shorter files are little more than an import or a licence line."""
MAX_LINE = 2**25
"""Most characters in a line of JSON."""
PASSAGE_CHARACTERS = 8000
"""A long text is cut at the first blank line after this many characters."""
TABLE_ROWS = 256
"""Rows of a table in memory at a time."""
SHOWN = 5
"""Rows shown for each reason, and reasons shown, if rows cannot be used."""


# rows that cannot be used


@contextmanager
def located(where: str) -> Iterator[None]:
    """Name the row in the errors of a block."""
    try:
        yield
    except InputError as error:
        error.where = where
        raise


class BadRows:
    """Collects rows that cannot be used, to report them together."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._first: defaultdict[str, list[InputError]] = defaultdict(list)

    def add(self, error: InputError) -> None:
        """Count a row, and keep the first ones of each reason; raise any other error."""
        if not error.fault:
            raise error
        self._counts[error.rule] += 1
        if self._counts[error.rule] <= SHOWN:
            self._first[error.rule].append(error)

    def report(self, name: str, choice: str) -> None:
        """Raise with all bad rows of a source if the choice is "stop", or warn if it is "drop"."""
        if not self._counts:
            return
        common = self._counts.most_common(SHOWN)
        reasons = [f"{rule} ({count:,}: {_places(self._first[rule])})" for rule, count in common]
        if more := len(self._counts) - len(common):
            reasons.append(f"and {more} more reasons")
        total = self._counts.total()
        rows = "1 row" if total == 1 else f"{total:,} rows"
        line = f"{rows} of {name} cannot be used: {'; '.join(reasons)}"
        if choice == "drop":
            warnings.warn(f"{line}; they are left out", stacklevel=2)
            return
        raise InputError(
            f"{line}; fix or remove them, or leave them out with data.bad_rows=drop",
            self._first[common[0][0]][0].details,
        )


def _places(errors: list[InputError]) -> str:
    """Return the locations of rows, the first with its fault; name a file once."""
    out, last = [], ""
    for error in errors:
        place, _, file = error.where.partition(" of ")
        shown = place if file == last else error.where
        out.append(shown if out else f"{shown} {error.fault}")
        last = file
    return ", ".join(out)


# finding files


def stdlib_files() -> list[Path]:
    """Return the Python files of the running interpreter's standard library."""
    found: list[Path] = []
    for folder, inner, files in os.walk(sysconfig.get_paths()["stdlib"]):
        # skip these before they are listed: site-packages can hold 100 times as many files
        inner[:] = {*inner} - STDLIB_LEFT_OUT
        found += [Path(folder, file) for file in files if file.endswith(".py")]
    return sorted(found)


def find(path: str, suffixes: tuple[str, ...], patterns: Sequence[str] = ()) -> list[Path]:
    """Return the files that a path stands for: a file, a folder or a glob.

    A folder stands for its files that match a pattern and a suffix and are not hidden.
    """
    place = local_path(path)
    found, fault = list[Path](), "has none" if place.exists() else "is not there"
    try:
        if place.is_file():
            found = [place]
        elif place.is_dir():
            for file in chain.from_iterable(map(place.glob, patterns or ["**/*"])):
                is_hidden = any(part.startswith(".") for part in file.relative_to(place).parts)
                if file.name.endswith(suffixes) and not is_hidden:
                    found.append(file)
        else:
            root = Path(place.anchor or ".")
            found = list(root.glob(str(place.relative_to(place.anchor))))
    # pathlib reports bad patterns by many exception types
    except (IndexError, NotImplementedError, OSError, ValueError) as error:
        fault = f"is no such glob ({first_line(error):.120})"
    if not (files := sorted({file for file in found if file.is_file()})):
        wanted = " or ".join(patterns or filter(None, suffixes)) or "some"
        raise InputError(
            f"a source needs a file, a folder or a glob that holds {wanted:.200} files, and "
            f"{path!r:.200} {fault}; change the path, or data.patterns"
        )
    return files


# text


def whole_files(files: Iterable[Path], min_characters: int = 0) -> Rows:
    """Yield every UTF-8 file as one document; skip files that are shorter or not UTF-8."""
    for file in files:
        with _readable(file), file.open(encoding="utf-8-sig") as stream:
            try:
                # a binary file fails in the first part, before all of it is in memory
                text = stream.read(2**16) + stream.read()
            except UnicodeDecodeError:
                continue
        if len(text) >= min_characters:
            yield str(file), {"text": text}


def passages(files: Iterable[Path]) -> Rows:
    """Yield text files in pieces that end at blank lines, so that one file has every split."""
    for file in files:
        with _readable(file), file.open(encoding="utf-8-sig") as stream:
            for number, text in enumerate(_cut(stream), start=1):
                yield f"passage {number} of {file}", {"text": text}


def _cut(stream: Any) -> Iterator[str]:
    parts, size = [], 0
    # readline with a limit also splits a file without line breaks
    while piece := stream.readline(PASSAGE_CHARACTERS):
        parts.append(piece)
        size += len(piece)
        if size >= 8 * PASSAGE_CHARACTERS or (size >= PASSAGE_CHARACTERS and piece.isspace()):
            yield "".join(parts)
            parts, size = [], 0
    if parts:
        yield "".join(parts)


# rows


def rows_of(files: Iterable[Path], bad: BadRows | None = None, column: str = "") -> Rows:
    """Yield the rows of JSON lines and parquet files; `column` is the only one of a table to read.

    Lines that are no JSON object are added to `bad`.
    """
    for file in files:
        if file.name.endswith(PARQUET):
            yield from _table_rows(file, column)
        else:
            yield from read_jsonl(file, bad)


def _table_rows(file: Path, column: str) -> Rows:
    with _readable(file, "parquet"), pq.ParquetFile(file) as table:
        columns = [column] if column in table.schema_arrow.names else None
        batches = table.iter_batches(TABLE_ROWS, columns=columns)
        rows = (row for batch in batches for row in batch.to_pylist())
        for number, row in enumerate(rows, start=1):
            yield f"row {number} of {file}", without_nulls(row)


def without_nulls(row: Row) -> Row:
    """Remove null from the objects in a row: tables give every object the keys of all others."""
    return {column: _without_nulls(value) for column, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def read_jsonl(file: Path, bad: BadRows | None = None) -> Rows:
    """Yield the rows of a JSON lines file, or of a file with one JSON list of objects.

    `datasets` cannot replace this parser: it names no line, converts text such as dates, and adds
    null to objects in lists.
    """
    with _readable(file):
        with file.open("rb") as binary:
            is_packed = binary.read(2) == b"\x1f\x8b"
        reading: Any = gzip.open if is_packed else open
        with reading(file, mode="rt", encoding="utf-8-sig") as stream:
            lines = _lines(stream, file)
            first = next(lines, None)
            if first is None:
                raise InputError(f"{file} holds no row; give one JSON object a line")
            lines = chain([first], lines)
            if first[1].lstrip().startswith("["):
                with located(f"the list in {file}"):
                    values = _value("".join(line for _, line in lines))
                lines = ((f"row {n}", json.dumps(one)) for n, one in enumerate(values, start=1))
            for place, line in lines:
                try:
                    with located(f"{place} of {file}"):
                        row = _value(line)
                        if not isinstance(row, dict):
                            kind = type(row).__name__
                            raise InputError(ROW_RULE, fault=f"is a {kind}, {row!r:.40}")
                except InputError as error:
                    if bad is None:
                        raise
                    bad.add(error)
                else:
                    yield f"{place} of {file}", row


@contextmanager
def _readable(file: Path, kind: str = "UTF-8") -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, UnicodeDecodeError, zlib.error, pa.ArrowException) as error:
        raise InputError(
            f"text and rows must be in a readable {kind} file, and {file} is not: "
            f"{first_line(error)}; make it readable, or write it again"
        ) from error


def _lines(stream: Any, file: Path) -> Iterator[tuple[str, str]]:
    """Yield the number and the text of each line that is not blank."""
    number = 0
    while line := stream.readline(MAX_LINE):
        number += 1
        if len(line) == MAX_LINE:
            raise InputError(
                f"a line holds at most {MAX_LINE:,} characters, line {number} of {file} has more; "
                "write one JSON object a line, or cut the text"
            )
        if line.strip():
            yield f"line {number}", line


ROW_RULE = "a .jsonl file has one JSON object a line"


def _value(text: str) -> Any:
    try:
        value = json.loads(text)
        if "\\u" in text:
            # json accepts half of a surrogate pair, tokenizers do not
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise InputError(ROW_RULE, fault=f"is none, {text.strip()!r:.40}: {error}") from error
    return value


# for messages


def names(keys: Iterable[str]) -> str:
    """Return the keys of a row in one line of at most 100 characters."""
    return f"{' '.join(', '.join(keys).split()) or 'no key':.100}"

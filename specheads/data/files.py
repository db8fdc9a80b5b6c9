"""Local files of text or rows: find them by a path, and read them piece by piece."""

import codecs
import gzip
import json
import os
import sysconfig
import warnings
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from glob import has_magic
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq

from specheads.core.errors import InputError
from specheads.core.files import local_path

Row = dict[str, Any]
Rows = Iterator[tuple[str, Row]]
"""Each row with its location ("line 3 of a.jsonl"), which error messages name."""

JSONL, PARQUET, TXT = (".jsonl", ".jsonl.gz", ".json", ".json.gz"), (".parquet",), (".txt",)

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

SNIFFED_BYTES = 2**16
"""Bytes that decide whether a file is UTF-8."""

TABLE_ROWS = 256
"""Rows of a table in memory at a time."""

GZIP = b"\x1f\x8b"
"""First bytes of a gzip file, whatever its name."""

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


def fail(error: InputError) -> NoReturn:
    """Raise the error of a row at once."""
    raise error


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

    def __bool__(self) -> bool:
        return bool(self._counts)

    def report(self, name: str, choice: str) -> None:
        """Raise with all bad rows of a source if the choice is "stop", or warn if it is "drop"."""
        if not self:
            return
        common = self._counts.most_common()
        reasons = [
            f"{rule} ({count:,}: {_places(self._first[rule])})" for rule, count in common[:SHOWN]
        ]
        reasons += [f"and {len(common) - SHOWN} more reasons"] * (len(common) > SHOWN)
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


def folder_files(path: str, patterns: Iterable[str]) -> list[Path]:
    """Return the files below a folder that match one of the globs, without hidden files."""
    root = local_path(path)
    if not path or not root.is_dir():
        raise InputError(f"source 'files' needs a folder of text files, got path {path!r}")
    patterns = tuple(patterns) or ("**/*",)
    if not (found := {file for pattern in patterns for file in _glob(root, pattern)}):
        named = " or ".join(map(repr, patterns))
        raise InputError(f"no file below {path} matches {named}; change patterns")
    return [
        file
        for file in sorted(found)
        if not any(part.startswith(".") for part in file.relative_to(root).parts)
    ]


def find(source: str, path: str, suffixes: tuple[str, ...]) -> list[Path]:
    """Return the files that a path stands for: a file, a folder or a glob."""
    place, found = local_path(path), list[Path]()
    if path and place.is_dir():
        found = [file for file in place.rglob("*") if file.name.endswith(suffixes)]
    elif path and place.is_file():
        found = [place]
    elif has_magic(path):
        found = _glob(Path(place.anchor or "."), str(place.relative_to(place.anchor)))
    if not (files := sorted(file for file in found if file.is_file())):
        fault = "has none" if place.exists() else "is not there"
        raise InputError(
            f"source {source!r} needs a file, a folder or a glob that holds "
            f"{' or '.join(suffixes)} files, and {path!r} {fault}; name another path"
        )
    return files


def _glob(root: Path, pattern: str) -> list[Path]:
    try:
        return [file for file in root.glob(pattern) if file.is_file()]
    # pathlib reports bad patterns by many exception types
    except (IndexError, NotImplementedError, OSError, ValueError) as error:
        raise InputError(
            f"a pattern must be a glob below {root}, as **/*.txt, got {pattern!r:.80}: "
            f"{first_and_last_line(error):.120}"
        ) from error


# text


def stdlib_texts(files: Iterable[Path]) -> Rows:
    """Yield the standard library's files that have enough text."""
    for where, row in whole_files(files):
        if len(row["text"]) >= STDLIB_MIN_CHARACTERS:
            yield where, row


def whole_files(files: Iterable[Path]) -> Rows:
    """Yield every UTF-8 file as one document; skip files that are not UTF-8."""
    for file in files:
        try:
            with file.open("rb") as stream:
                # incremental: the last character may be cut
                codecs.getincrementaldecoder("utf-8")().decode(stream.read(SNIFFED_BYTES))
            text = file.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError:
            continue
        except OSError as error:
            raise InputError(f"cannot read {file}: {error.strerror}; change patterns") from error
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


def rows_of(
    files: Iterable[Path], refuse: Callable[[InputError], object] = fail, column: str = ""
) -> Rows:
    """Yield the rows of JSON lines and parquet files.

    Args:
        files: What to read.
        refuse: Called for each line that is no JSON object.
        column: The only column to read of a table; empty reads all.
    """
    for file in files:
        if file.name.endswith(PARQUET):
            yield from _table_rows(file, column)
        else:
            yield from read_jsonl(file, refuse)


def _table_rows(file: Path, column: str) -> Rows:
    try:
        with pq.ParquetFile(file) as table:
            columns = [column] if column in table.schema_arrow.names else None
            number = 0
            for batch in table.iter_batches(TABLE_ROWS, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number} of {file}", without_nulls(row)
    except UnicodeDecodeError as error:
        # parquet readers do not check text before it is decoded here
        raise InputError(
            f"a corpus must be UTF-8 text, parquet {file} is not: {error}; convert it"
        ) from error
    except (OSError, pa.ArrowException) as error:
        raise InputError(
            f"cannot read {str(file)!r} as parquet: {first_and_last_line(error)}; write or "
            "download it again"
        ) from error


def without_nulls(row: Row) -> Row:
    """Remove null from the objects in a row: tables give every object the keys of all others."""
    return {column: _without_nulls(value) for column, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def read_jsonl(file: Path, refuse: Callable[[InputError], object] = fail) -> Rows:
    """Yield the rows of a JSON lines file, or of a file with one JSON list of objects.

    Gzip files are read too, and blank lines are skipped. Only one line is in memory at a time, and
    of a line that is too long only its first `MAX_LINE` characters. `datasets` cannot replace this
    parser: it names no line, converts text such as dates, and adds null to objects in lists.
    """
    with _readable(file):
        with file.open("rb") as stream:
            is_packed = stream.read(2) == GZIP
        reading: Any = gzip.open if is_packed else open
        with reading(file, mode="rt", encoding="utf-8-sig") as stream:
            yield from parse(_lines(stream, file), str(file), refuse)


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise InputError(
            f"text and rows must be in a readable UTF-8 file, and {file} is not: {error}; make it "
            "readable, or write it again"
        ) from error


def _lines(stream: Any, file: Path) -> Iterator[str]:
    number = 0
    while line := stream.readline(MAX_LINE):
        number += 1
        if len(line) == MAX_LINE:
            raise InputError(
                f"a line holds at most {MAX_LINE:,} characters, line {number} of {file} has more; "
                "write one JSON object a line, or cut the text"
            )
        yield line


def parse(lines: Iterable[str], name: str, refuse: Callable[[InputError], object] = fail) -> Rows:
    """Yield the rows of JSON lines; error messages call the text by `name`."""
    numbered = ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
    first = next(numbered, None)
    if first is None:
        raise InputError(f"{name} holds no row; give one JSON object a line")
    numbered = chain([first], numbered)
    is_list = first[1].lstrip().startswith("[")
    if is_list:
        with located(f"the list in {name}"):
            values = _value("".join(line for _, line in numbered))
        rows = ((f"row {place} of {name}", value) for place, value in enumerate(values, start=1))
    else:
        rows = ((f"line {number} of {name}", line) for number, line in numbered)
    for where, value in rows:
        try:
            with located(where):
                row = value if is_list else _value(value)
                if not isinstance(row, dict):
                    raise InputError(ROW_RULE, fault=f"is a {type(row).__name__}, {row!r:.40}")
        except InputError as error:
            refuse(error)
        else:
            yield where, row


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


def first_and_last_line(error: BaseException) -> str:
    """Return the first and the last line of an error, in one line."""
    lines = str(error.__cause__ or error).split("\n")
    return " ".join(dict.fromkeys([lines[0], lines[-1]])).strip() or type(error).__name__

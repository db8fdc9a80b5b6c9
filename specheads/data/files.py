"""Local files of text or rows: find them by a path, and read them row by row."""

import gzip
import json
import os
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from specheads.core.errors import InputError, first_line
from specheads.core.files import local_path
from specheads.data.bad_rows import BadRows, locate_errors

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
JSONL_RULE = "a .jsonl file has one JSON object a line"


def stdlib_files() -> list[Path]:
    """Return the Python files of the running interpreter's standard library."""
    paths: list[Path] = []
    for folder, inner_folders, names in os.walk(sysconfig.get_paths()["stdlib"]):
        # skip these before they are listed: site-packages can hold 100 times as many files
        inner_folders[:] = {*inner_folders} - STDLIB_LEFT_OUT
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(paths)


def find_files(path: str, suffixes: tuple[str, ...], patterns: Sequence[str] = ()) -> list[Path]:
    """Return the files that a path stands for: a file, a folder or a glob.

    A folder stands for its files that match a pattern and a suffix and are not hidden.
    """
    root = local_path(path)
    matches, fault = list[Path](), "has none" if root.exists() else "is not there"
    try:
        if root.is_file():
            matches = [root]
        elif root.is_dir():
            for file in chain.from_iterable(map(root.glob, patterns or ["**/*"])):
                is_hidden = any(name.startswith(".") for name in file.relative_to(root).parts)
                if file.name.endswith(suffixes) and not is_hidden:
                    matches.append(file)
        else:
            folder = Path(root.anchor or ".")
            matches = list(folder.glob(str(root.relative_to(root.anchor))))
    # pathlib reports bad patterns by many exception types
    except (IndexError, NotImplementedError, OSError, ValueError) as error:
        fault = f"is no such glob ({first_line(error):.120})"
    if not (files := sorted({file for file in matches if file.is_file()})):
        kinds = " or ".join(patterns or filter(None, suffixes)) or "some"
        raise InputError(
            f"a source needs a file, a folder or a glob that holds {kinds:.200} files, and "
            f"{path!r:.200} {fault}; change the path, or data.patterns"
        )
    return files


# text


def read_text_files(files: Iterable[Path], min_characters: int = 0) -> Rows:
    """Yield every UTF-8 file as one document; skip files that are shorter or not UTF-8."""
    for file in files:
        with _name_unreadable(file), file.open(encoding="utf-8-sig") as stream:
            try:
                # a binary file fails in the first characters, before all of it is in memory
                text = stream.read(2**16) + stream.read()
            except UnicodeDecodeError:
                continue
        if len(text) >= min_characters:
            yield str(file), {"text": text}


def read_passages(files: Iterable[Path]) -> Rows:
    """Yield text files in passages that end at blank lines, so that one file has every split."""
    for file in files:
        with _name_unreadable(file), file.open(encoding="utf-8-sig") as stream:
            for number, text in enumerate(_cut_passages(stream), start=1):
                yield f"passage {number} of {file}", {"text": text}


def _cut_passages(stream: Any) -> Iterator[str]:
    lines, size = [], 0
    # readline with a limit also splits a file without line breaks
    while line := stream.readline(PASSAGE_CHARACTERS):
        lines.append(line)
        size += len(line)
        if size >= 8 * PASSAGE_CHARACTERS or (size >= PASSAGE_CHARACTERS and line.isspace()):
            yield "".join(lines)
            lines, size = [], 0
    if lines:
        yield "".join(lines)


# rows


def read_rows(files: Iterable[Path], bad: BadRows | None = None, column: str = "") -> Rows:
    """Yield the rows of JSON lines and parquet files; `column` is the only one of a table to read.

    Lines that are no JSON object are added to `bad`.
    """
    for file in files:
        if file.name.endswith(PARQUET):
            yield from _read_parquet(file, column)
        else:
            yield from read_jsonl(file, bad)


def _read_parquet(file: Path, column: str) -> Rows:
    with _name_unreadable(file, "parquet"), pq.ParquetFile(file) as table:
        columns = [column] if column in table.schema_arrow.names else None
        batches = table.iter_batches(TABLE_ROWS, columns=columns)
        rows = (row for batch in batches for row in batch.to_pylist())
        for number, row in enumerate(rows, start=1):
            yield f"row {number} of {file}", without_nulls(row)


def without_nulls(row: Row) -> Row:
    """Remove null from the objects in a row: tables give every object the keys of all others."""
    return {column: _remove_nulls(value) for column, value in row.items()}


def _remove_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _remove_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_remove_nulls(inner) for inner in value] if isinstance(value, list) else value


def read_jsonl(file: Path, bad: BadRows | None = None) -> Rows:
    """Yield the rows of a JSON lines file, or of a file with one JSON list of objects.

    `datasets` cannot replace this parser: it names no line, converts text such as dates, and adds
    null to objects in lists.
    """
    with _name_unreadable(file):
        with file.open("rb") as binary:
            is_compressed = binary.read(2) == b"\x1f\x8b"
        open_text: Any = gzip.open if is_compressed else open
        with open_text(file, mode="rt", encoding="utf-8-sig") as stream:
            lines = _read_lines(stream, file)
            first = next(lines, None)
            if first is None:
                raise InputError(f"{file} holds no row; give one JSON object a line")
            lines = chain([first], lines)
            if first[1].lstrip().startswith("["):
                with locate_errors(f"the list in {file}"):
                    values = _parse_json("".join(line for _, line in lines))
                lines = (
                    (f"row {number}", json.dumps(value))
                    for number, value in enumerate(values, start=1)
                )
            for position, line in lines:
                try:
                    with locate_errors(f"{position} of {file}"):
                        row = _parse_json(line)
                        if not isinstance(row, dict):
                            kind = type(row).__name__
                            raise InputError(JSONL_RULE, fault=f"is a {kind}, {row!r:.40}")
                except InputError as error:
                    if bad is None:
                        raise
                    bad.add(error)
                else:
                    yield f"{position} of {file}", row


@contextmanager
def _name_unreadable(file: Path, kind: str = "UTF-8") -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, UnicodeDecodeError, zlib.error, pa.ArrowException) as error:
        raise InputError(
            f"text and rows must be in a readable {kind} file, and {file} is not: "
            f"{first_line(error)}; make it readable, or write it again"
        ) from error


def _read_lines(stream: Any, file: Path) -> Iterator[tuple[str, str]]:
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


def _parse_json(text: str) -> Any:
    try:
        value = json.loads(text)
        if "\\u" in text:
            # json accepts half of a surrogate pair, tokenizers do not
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise InputError(JSONL_RULE, fault=f"is none, {text.strip()!r:.40}: {error}") from error
    return value

"""Local files of text or rows: find them by a path, and read them piece by piece."""

import codecs
import gzip
import json
import os
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from glob import has_magic
from itertools import chain
from pathlib import Path
from typing import Any

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

MAX_FILE_BYTES = 2**26
"""Largest file that is read as one document."""

MAX_LINE = 2**25
"""Most characters in a line of JSON."""

MAX_LIST = 2**28
"""Most characters in a JSON list, which is read into memory as a whole."""

PASSAGE_CHARACTERS = 8000
"""A long text is cut at the first blank line after this many characters."""

SNIFFED_BYTES = 2**16
"""Bytes that decide whether a file is UTF-8."""

TABLE_ROWS = 256
"""Rows of a table in memory at a time."""

GZIP = b"\x1f\x8b"
"""First bytes of a gzip file, whatever its name."""


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
    place = local_path(path)
    if not path:
        found = []
    elif place.is_dir():
        found = [file for file in place.rglob("*") if file.name.endswith(suffixes)]
    elif place.is_file():
        found = [place]
    elif not has_magic(path):
        found = []
    else:
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
        if ".." not in Path(pattern).parts:
            return [file for file in root.glob(pattern) if file.is_file()]
        reason = "it leads out of there"
    # pathlib reports bad patterns by many exception types
    except (IndexError, NotImplementedError, OSError, ValueError) as error:
        reason = first_and_last_line(error)
    raise InputError(
        f"a pattern must be a glob below {root}, as **/*.txt, got {pattern!r:.80}: {reason:.120}"
    )


# text


def stdlib_texts(files: Iterable[Path]) -> Rows:
    """Yield the standard library's files that have enough text."""
    for where, row in whole_files(files):
        if len(row["text"]) >= STDLIB_MIN_CHARACTERS:
            yield where, row


def whole_files(files: Iterable[Path]) -> Rows:
    """Yield every UTF-8 file as one document; skip files that are not UTF-8."""
    for file in files:
        if (text := _utf8(file)) is not None:
            yield str(file), {"text": text}


def _utf8(file: Path) -> str | None:
    try:
        with file.open("rb") as stream:
            # incremental: the last character may be cut
            codecs.getincrementaldecoder("utf-8")().decode(stream.read(SNIFFED_BYTES))
        if (size := file.stat().st_size) > MAX_FILE_BYTES:
            raise InputError(
                f"a file that is one document has at most {MAX_FILE_BYTES:,} bytes, {file} has "
                f"{size:,}; cut it, or read it with source 'text'"
            )
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        return None
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}; change patterns") from error


def passages(files: Iterable[Path]) -> Rows:
    """Yield text files in pieces that end at blank lines, so that one file has every split."""
    for file in files:
        try:
            with file.open(encoding="utf-8-sig") as stream:
                for number, text in enumerate(_cut(stream), start=1):
                    yield f"passage {number} of {file}", {"text": text}
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(
                f"text must be in a readable UTF-8 file, and {file} is not: {error}; make it "
                "readable, or convert it"
            ) from error


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


def rows_of(files: Iterable[Path]) -> Rows:
    """Yield the rows of JSON lines and parquet files."""
    for file in files:
        yield from (table_rows if file.name.endswith(PARQUET) else read_jsonl)(file)


def jsonl_texts(files: Iterable[Path], column: str) -> Rows:
    """Yield the text column of JSON lines; single rows may lack it, but not all of a file."""
    for file in files:
        known: dict[str, None] = {}
        for where, row in read_jsonl(file):
            known |= dict.fromkeys(row)
            yield where, text_row(row, column, where)
        if known and column not in known:
            raise InputError(f"{file} has no column {column!r}; it has {names(known)}")


def table_texts(files: Iterable[Path], column: str) -> Rows:
    """Yield the text column of parquet files."""
    for file in files:
        for where, row in table_rows(file, column):
            yield where, {"text": row[column]}


def table_rows(file: Path, column: str = "") -> Rows:
    """Yield the rows of a parquet file, with one text column or with all columns."""
    try:
        with pq.ParquetFile(file) as table:
            if column:
                _check_text_column(table.schema_arrow, column, f"parquet {file}")
            number = 0
            for batch in table.iter_batches(TABLE_ROWS, columns=[column] if column else None):
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number} of {file}", row
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


def _check_text_column(schema: pa.Schema, column: str, where: str) -> None:
    if column not in schema.names:
        raise InputError(f"{where} has no column {column!r}; it has {names(schema.names)}")
    kind = schema.field(column).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise InputError(f"column {column!r} of {where} must hold text, it holds {kind}")


def text_row(row: Row, column: str, where: str) -> Row:
    """Return a row with the text of a column, or None if the row lacks it."""
    text = row.get(column)
    if not isinstance(text, str | None):
        raise InputError(
            f"column {column!r} of {where} must hold text, it holds {type(text).__name__}"
        )
    return {"text": text}


def read_jsonl(file: Path) -> Rows:
    """Yield the rows of a JSON lines file, or of a file with one JSON list of objects.

    Gzip files are read too, and blank lines are skipped. Only one line is in memory at a time, and
    of a line that is too long only its first `MAX_LINE` characters. `datasets` cannot replace this
    parser: it names no line, converts text such as dates, and adds null to objects in lists.

    Raises:
        InputError: The file cannot be read or has no row, or a row is not a JSON object.
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
            f"rows must be in a readable UTF-8 file, and {file} is not: {error}; make it "
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


def parse(lines: Iterable[str], name: str) -> Rows:
    """Yield the rows of JSON lines; error messages call the text by `name`."""
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
    parts, size = [], 0
    for line in lines:
        parts.append(line)
        size += len(line)
        if size > MAX_LIST:
            raise InputError(
                f"a list of rows holds at most {MAX_LIST:,} characters, {name} has more; write one "
                "JSON object a line"
            )
    return "".join(parts)


def _value(text: str, where: str) -> Any:
    try:
        value = json.loads(text)
        if "\\u" in text:
            # json accepts half of a surrogate pair, tokenizers do not
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
    raise InputError(f"{_rule(where)}: {reason}; fix or remove it, {text.strip()!r:.40}")


def _rule(where: str) -> str:
    return f"a .jsonl file has one JSON object a line; {where} is none"


# for messages


def names(keys: Iterable[str]) -> str:
    """Return the keys of a row in one line of at most 100 characters."""
    return f"{' '.join(', '.join(keys).split()) or 'no key':.100}"


def first_and_last_line(error: BaseException) -> str:
    """Return the first and the last line of an error, in one line."""
    lines = str(error.__cause__ or error).split("\n")
    return " ".join(dict.fromkeys([lines[0], lines[-1]])).strip() or type(error).__name__

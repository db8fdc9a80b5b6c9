"""Files on this machine that hold text or rows: found by a path, read a piece at a time."""

import codecs
import os
import sysconfig
from collections.abc import Iterable, Iterator
from glob import has_magic
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from specheads.core.errors import InputError
from specheads.core.paths import local_path
from specheads.data.jsonl import Row, names, read_jsonl, text_row

JSONL, PARQUET, TXT = (".jsonl", ".jsonl.gz", ".json", ".json.gz"), (".parquet",), (".txt",)

STDLIB_LEFT_OUT = {
    *("site-packages", "dist-packages", "test", "tests"),
    *("idlelib", "idle_test", "__pycache__"),
}
"""Folders below the standard library that are other people's code, or tests of it."""

STDLIB_MIN_CHARACTERS = 400
"""Shorter files are little more than an import or a licence line."""

MAX_FILE_BYTES = 2**26
"""Most of a file that is one document."""

PASSAGE_CHARACTERS = 8000
"""A long text is cut at the first blank line behind so many characters."""

SNIFFED_BYTES = 2**16
"""Read of a file to tell whether it is text."""

ROWS = 256
"""Rows of a table held at a time."""


def stdlib_files() -> list[Path]:
    """Return the Python files of the running interpreter's standard library."""
    found: list[Path] = []
    for folder, inner, files in os.walk(sysconfig.get_paths()["stdlib"]):
        # site-packages may hold a hundred times as many files: none of them is looked at
        inner[:] = {*inner} - STDLIB_LEFT_OUT
        found += [Path(folder, file) for file in files if file.endswith(".py")]
    return sorted(found)


def stdlib_texts(files: Iterable[Path]) -> Iterator[tuple[str, Row]]:
    """Yield the files of the standard library that are more than an import or a licence."""
    for where, row in whole_files(files):
        if len(row["text"]) >= STDLIB_MIN_CHARACTERS:
            yield where, row


def folder_files(path: str, patterns: Iterable[str]) -> list[Path]:
    """Return the files below a folder that match one of some globs, but for hidden ones."""
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
    """Return the files of some suffixes that a file, a folder or a glob stands for."""
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
        raise InputError(
            f"source {source!r} needs a file, a folder or a glob that holds "
            f"{' or '.join(suffixes)} files, and {path!r} "
            f"{'has none' if place.exists() else 'is not there'}; name another path"
        )
    return files


def _glob(root: Path, pattern: str) -> list[Path]:
    """Return the files below a folder that match."""
    try:
        if ".." not in Path(pattern).parts:
            return [file for file in root.glob(pattern) if file.is_file()]
        reason = "it leads out of there"
    # what is wrong with a pattern tells itself in many ways
    except (IndexError, NotImplementedError, OSError, ValueError) as error:
        reason = told(error)
    raise InputError(
        f"a pattern must be a glob below {root}, as **/*.txt, got {pattern!r:.80}: {reason:.120}"
    )


def whole_files(files: Iterable[Path]) -> Iterator[tuple[str, Row]]:
    """Yield every file that is UTF-8 as one document."""
    for file in files:
        if (text := _utf8(file)) is not None:
            yield str(file), {"text": text}


def _utf8(file: Path) -> str | None:
    try:
        with file.open("rb") as stream:
            # one that is no text may have any size
            if not _is_utf8(stream.read(SNIFFED_BYTES)):
                return None
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


def _is_utf8(beginning: bytes) -> bool:
    try:
        # the last letter may be cut
        codecs.getincrementaldecoder("utf-8")().decode(beginning)
    except UnicodeDecodeError:
        return False
    return True


def passages(files: Iterable[Path]) -> Iterator[tuple[str, Row]]:
    """Yield text files in pieces that end at blank lines: one long file has held-out parts too."""
    for file in files:
        try:
            with file.open(encoding="utf-8-sig") as stream:
                for number, text in enumerate(_cut(stream), start=1):
                    yield f"passage {number} of {file}", {"text": text}
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(
                f"text must stand in a readable UTF-8 file, and {file} is none: {error}; make it "
                "readable, or convert it"
            ) from error


def _cut(stream: Any) -> Iterator[str]:
    held, size = [], 0
    # a file without a line break is read in pieces all the same
    while piece := stream.readline(PASSAGE_CHARACTERS):
        held.append(piece)
        size += len(piece)
        if size >= 8 * PASSAGE_CHARACTERS or (size >= PASSAGE_CHARACTERS and piece.isspace()):
            yield "".join(held)
            held, size = [], 0
    if held:
        yield "".join(held)


def rows_of(files: Iterable[Path]) -> Iterator[tuple[str, Row]]:
    """Yield the rows of JSON lines and tables, told apart by their names."""
    for file in files:
        if file.name.endswith(PARQUET):
            yield from table_rows(file)
        else:
            yield from read_jsonl(file)


def jsonl_texts(files: Iterable[Path], column: str) -> Iterator[tuple[str, Row]]:
    """Yield the texts of a column of JSON lines; a row may lack it, a whole file may not."""
    for file in files:
        known: dict[str, None] = {}
        for where, row in read_jsonl(file):
            known |= dict.fromkeys(row)
            yield where, text_row(row, column, where)
        if known and column not in known:
            raise InputError(f"{file} has no column {column!r}; it has {names(known)}")


def table_texts(files: Iterable[Path], column: str) -> Iterator[tuple[str, Row]]:
    """Yield the texts of a column of parquet files, a few rows at a time."""
    for file in files:
        for where, row in table_rows(file, column):
            yield where, {"text": row[column]}


def table_rows(file: Path, column: str = "") -> Iterator[tuple[str, Row]]:
    """Yield the rows of a parquet file, with one column of text or with all there are."""
    try:
        with pq.ParquetFile(file) as table:
            if column:
                _refuse_other(table.schema_arrow, column, f"parquet {file}")
            number = 0
            for batch in table.iter_batches(ROWS, columns=[column] if column else None):
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number} of {file}", row
    except UnicodeDecodeError as error:
        # nobody looked at the text before
        raise InputError(
            f"a corpus must be UTF-8 text, parquet {file} is not: {error}; convert it"
        ) from error
    except (OSError, pa.ArrowException) as error:
        raise InputError(
            f"cannot read {str(file)!r} as parquet: {told(error)}; write or download it anew"
        ) from error


def num_bytes(file: Path) -> int:
    """Return about how much is in a file: of a table what it has unpacked."""
    if file.name.endswith(PARQUET):
        try:
            known = pq.read_metadata(file)
            return sum(known.row_group(at).total_byte_size for at in range(known.num_row_groups))
        # who reads its rows will say what is wrong
        except (OSError, pa.ArrowException):
            return 0
    return file.stat().st_size


def _refuse_other(schema: pa.Schema, column: str, where: str) -> None:
    if column not in schema.names:
        raise InputError(f"{where} has no column {column!r}; it has {names(schema.names)}")
    kind = schema.field(column).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise InputError(f"column {column!r} of {where} must hold text, it holds {kind}")


def told(error: BaseException) -> str:
    """Return an error in one line: the first, and the last where that is another."""
    lines = str(error.__cause__ or error).split("\n")
    return " ".join(dict.fromkeys([lines[0], lines[-1]])).strip() or type(error).__name__

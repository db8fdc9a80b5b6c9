"""Local files of text or rows: find them by a path, and read them row by row."""

import bz2
import gzip
import io
import json
import lzma
import os
import re
import sysconfig
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from specheads.core.errors import InputError, first_line
from specheads.core.files import local_path
from specheads.data.bad_rows import BadRows, locate_errors, name_files

Row = dict[str, Any]
Rows = Iterator[tuple[str, Row]]
"""Each row with its location ("line 3 of a.jsonl"), which error messages name."""
COMPRESSED = ("", ".gz", ".bz2", ".xz", ".zst", ".lz4")
JSONL = tuple(f"{suffix}{inner}" for suffix in (".jsonl", ".json") for inner in COMPRESSED)
TABLES = (".parquet", ".arrow")
OPENERS: dict[bytes, Callable[..., Any]] = {
    **{b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open},
    b"\x28\xb5\x2f\xfd": lambda file: pa.input_stream(str(file), compression="zstd"),
    b"\x04\x22\x4d\x18": lambda file: pa.input_stream(str(file), compression="lz4"),
}
"""Functions that open a compressed file, by its first bytes."""
PARQUET_MAGIC, ARROW_MAGICS = b"PAR1", (b"ARROW1", b"\xff\xff\xff\xff")
FOREIGN_FORMATS = {
    **{b"PK\x03\x04": "a zip archive", b"SQLite format 3": "an SQLite database"},
    **{b"\xff\xfe": "text in UTF-16", b"\xfe\xff": "text in UTF-16", b"\x89HDF": "an HDF5 file"},
}
"""Formats that are not read, by their first bytes."""
METADATA_FILES = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json",
                  "cache-*.arrow")  # fmt: skip
"""Files that `datasets` writes next to the rows of a data set."""
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
SNIFFED_LINES = 200
"""Lines that are read to name the format of a file that has no JSON lines."""
UNREADABLE = (
    *(OSError, EOFError, UnicodeDecodeError, zlib.error, lzma.LZMAError),
    pa.ArrowException,
)
BLANKS: Any = re.compile(r"\s*")
"""Matches anywhere."""
JSONL_RULE = "a .jsonl file has one JSON object a line"
KEYS_RULE = "an object has each key once"


def stdlib_files() -> list[Path]:
    """Return the Python files of the running interpreter's standard library."""
    paths: list[Path] = []
    for folder, inner_folders, names in os.walk(sysconfig.get_paths()["stdlib"]):
        # skip these before they are listed: site-packages can hold 100 times as many files
        inner_folders[:] = {*inner_folders} - STDLIB_LEFT_OUT
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(paths)


@dataclass(frozen=True, slots=True)
class FileList:
    """The files of a source, and the files and folders that are left out, by reason."""

    files: list[Path]
    unreadable: dict[str, list[Path]]
    """Files and folders that cannot be opened, and links that cannot be followed."""
    skipped: dict[str, list[Path]]


def find_files(path: str, suffixes: tuple[str, ...], patterns: Sequence[str] = ()) -> FileList:
    """Return the files that a path stands for: a file, a folder or a glob.

    A folder stands for its files that match a pattern and a suffix and are not hidden. Links are
    followed, and a folder is read once.
    """
    root, globs = local_path(path), [pattern.split("/") for pattern in patterns or ["**/*"]]
    if root.is_file():
        return FileList([root], {}, {})
    fault = "has none" if root.is_dir() else "is no file" if root.exists() else "is not there"
    if not root.is_dir():
        # a glob: its folder is before the first segment with a wildcard
        names = root.parts
        first = next((n for n, name in enumerate(names) if {*name} & {*"*?["}), len(names))
        root, globs, suffixes = Path(*names[:first]), [list(names[first:])], ("",)
    if wrong := [name for names in globs for name in names if "**" in name and name != "**"]:
        fault, globs = f"is no such glob (** must be a whole segment, not {wrong[0]!r:.80})", []
    by_reason = defaultdict[str, list[Path]](list)
    for file, reason in _walk(root, globs) if globs and globs[0] and root.is_dir() else ():
        by_reason[reason or _reason(file, root, globs, suffixes)].append(file)
    by_target = dict[str, Path]()
    for file in sorted(by_reason.pop("", []), key=lambda file: (file.is_symlink(), file)):
        if by_target.setdefault(os.path.realpath(file), file) != file:
            by_reason["read by another name"].append(file)
    skipped = {reason: by_reason.pop(reason) for reason in SKIPPED if reason in by_reason}
    if not by_target and not by_reason:
        kinds = " or ".join(patterns or filter(None, suffixes)) or "some"
        left_out = "".join(f"; left out: {phrase}" for phrase in name_files(skipped))
        raise InputError(
            f"a source needs a file, a folder or a glob that holds {kinds:.200} files, and "
            f"{path!r:.200} {fault}; change the path, or data.patterns{left_out:.500}"
        )
    return FileList(sorted(by_target.values()), by_reason, skipped)


SKIPPED = ("hidden", "metadata of datasets", "of other names", "read by another name")
"""Reasons to leave out a file that could be read."""


def _reason(file: Path, root: Path, globs: list[list[str]], suffixes: tuple[str, ...]) -> str:
    """Return why a file is left out, or ""."""
    if any(fnmatchcase(file.name, name) for name in METADATA_FILES) and "" not in suffixes:
        return "metadata of datasets"
    names = file.relative_to(root).parts
    if not file.name.endswith(suffixes) or not any(_matches(names, glob) for glob in globs):
        return "of other names"
    return "" if os.access(file, os.R_OK) else "without access (Permission denied)"


def _walk(root: Path, globs: list[list[str]]) -> Iterator[tuple[Path, str]]:
    """Yield the files below a folder, each with the reason why it is left out, or "".

    Folders that no glob reaches are not opened. Links come last, so that a folder that is also
    linked keeps its own path.
    """
    folders, links, opened = [root], list[Path](), set[str]()
    while folders or links:
        folder = folders.pop() if folders else links.pop()
        if (real_path := os.path.realpath(folder)) in opened:
            continue
        opened.add(real_path)
        try:
            with os.scandir(folder) as entries:
                paths = [(folder / entry.name, entry.is_symlink()) for entry in entries]
            for path, is_link in paths:
                names = path.relative_to(root).parts
                if path.name.startswith("."):
                    yield path, "hidden"
                elif path.is_dir():
                    if any(_matches(names, segments, is_folder=True) for segments in globs):
                        (links if is_link else folders).append(path)
                elif path.is_file():
                    yield path, ""
                elif any(_matches(names, segments) for segments in globs):
                    yield path, "without a target" if is_link else "no regular file"
        except OSError as error:
            yield folder, f"without access ({error.strerror})"


def _matches(names: Sequence[str], segments: Sequence[str], *, is_folder: bool = False) -> bool:
    """Return whether a relative path matches a glob, or is a folder in which a path may match."""
    if not names:
        return is_folder or not segments
    if not segments:
        return False
    if segments[0] == "**":
        return _matches(names, segments[1:], is_folder=is_folder) or _matches(
            names[1:], segments, is_folder=is_folder
        )
    return fnmatchcase(names[0], segments[0]) and _matches(
        names[1:], segments[1:], is_folder=is_folder
    )


# text


def _open_text(file: Path, errors: str = "strict") -> io.TextIOWrapper:
    """Open a text, compressed or not, with its own line ends."""
    with file.open("rb") as binary:
        magic = binary.read(16)
    for start, name in FOREIGN_FORMATS.items():
        if magic.startswith(start):
            raise InputError(
                f"text and rows must be UTF-8, JSON lines, Parquet or Arrow, and {file} is {name}; "
                "write it in one of these formats"
            )
    openers = (opener for start, opener in OPENERS.items() if magic.startswith(start))
    binary = next(openers, lambda file: file.open("rb"))(file)
    return io.TextIOWrapper(binary, encoding="utf-8-sig", errors=errors, newline="")


def read_text_files(files: Iterable[Path], bad: BadRows, min_characters: int = 0) -> Rows:
    """Yield every UTF-8 file as one document; skip shorter ones, and count those not in UTF-8."""
    for file in files:
        with _name_unreadable(file), file.open(encoding="utf-8-sig", newline="") as stream:
            try:
                # a binary file fails in the first characters, before all of it is in memory
                text = stream.read(2**16) + stream.read()
            except UnicodeDecodeError:
                bad.skipped_files["not in UTF-8"].append(file)
                continue
        if len(text) >= min_characters:
            yield str(file), {"text": text}


def read_passages(files: Iterable[Path]) -> Rows:
    """Yield text files in passages that end at blank lines, so that one file has every split."""
    for file in files:
        with _name_unreadable(file), _open_text(file) as stream:
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


def rows_of(files: Iterable[Path], bad: BadRows | None = None, column: str = "") -> Rows:
    """Yield the rows of JSON lines and tables; `column` is the only one of a table to read.

    The first bytes of a file decide its format. Lines that are no JSON object are added to `bad`.
    """
    files = list(files)
    for file in files:
        with _name_unreadable(file), file.open("rb") as binary:
            magic = binary.read(8)
        if file.name.endswith(".parquet") or magic.startswith(PARQUET_MAGIC):
            yield from _read_parquet(file, column, bad)
        elif file.name.endswith(".arrow") or magic.startswith(ARROW_MAGICS):
            yield from _read_arrow(file, magic, bad)
        else:
            yield from read_jsonl(file, bad, may_be_empty=len(files) > 1)


def _read_parquet(file: Path, column: str, bad: BadRows | None) -> Rows:
    with _name_unreadable(file, "parquet"), pq.ParquetFile(file) as table:
        columns = [column] if column in table.schema_arrow.names else None
        yield from _table_rows(table.iter_batches(TABLE_ROWS, columns=columns), file, bad)


def _read_arrow(file: Path, magic: bytes, bad: BadRows | None) -> Rows:
    with _name_unreadable(file, "Arrow"), pa.memory_map(str(file)) as table:
        if magic.startswith(ARROW_MAGICS[0]):
            reader = pa.ipc.open_file(table)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        else:
            batches = pa.ipc.open_stream(table)
        yield from _table_rows(batches, file, bad)


def _table_rows(batches: Iterable[Any], file: Path, bad: BadRows | None) -> Rows:
    number = 0
    for batch in batches:
        for start in range(0, batch.num_rows, TABLE_ROWS):
            rows = batch.slice(start, TABLE_ROWS)
            try:
                if len({*batch.schema.names}) < batch.num_columns:
                    raise ValueError("it has a column twice")
                values = rows.to_pylist(maps_as_pydicts="strict")
            except KeyError:
                values = [_row_with_maps(rows.slice(index, 1)) for index in range(rows.num_rows)]
            except UNREADABLE:
                raise
            except ValueError as error:
                raise InputError(
                    f"rows of a table must be objects with each key once, and {file} has others: "
                    f"{first_line(error)}; rename its columns"
                ) from error
            for row in values:
                number += 1
                location = f"row {number} of {file}"
                if row is not None:
                    yield location, without_nulls(row)
                    continue
                error = InputError(KEYS_RULE, fault="has a map with a key twice")
                error.where = location
                if bad is None:
                    raise error
                bad.add(error)


def _row_with_maps(row: Any) -> Row | None:
    """Return the only row of a table, or None if a map in it has a key twice."""
    try:
        return row.to_pylist(maps_as_pydicts="strict")[0]
    except KeyError:
        return None


def without_nulls(row: Row) -> Row:
    """Remove null from the objects in a row: tables give every object the keys of all others."""
    return {column: _remove_nulls(value) for column, value in row.items()}


def _remove_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _remove_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, bytes):
        # some writers store text without its type
        with suppress(UnicodeDecodeError):
            return value.decode()
    return [_remove_nulls(inner) for inner in value] if isinstance(value, list) else value


def read_jsonl(file: Path, bad: BadRows | None = None, *, may_be_empty: bool = False) -> Rows:
    """Yield the rows of a JSON lines file, or of a file with one JSON list of objects.

    `datasets` cannot replace this parser: it names no line, converts text such as dates, and adds
    null to objects in lists.
    """
    # a byte that is not UTF-8 is a fault of its row
    with _name_unreadable(file), _open_text(file, "surrogateescape") as stream:
        lines = _read_lines(stream, file)
        first = next(lines, None)
        if first is None:
            if bad is None or not may_be_empty:
                raise InputError(f"{file} holds no row; give one JSON object a line")
            bad.skipped_files["without a row"].append(file)
            return
        lines = chain([first], lines)
        if first[1].lstrip().startswith("["):
            lines = _read_list("".join(line for _, line in lines), file)
        elif not _is_json(first[1]):
            sniffed = list(islice(lines, SNIFFED_LINES))
            _refuse_other_text([line for _, line in sniffed], file)
            lines = chain(sniffed, lines)
        for position, line in lines:
            try:
                with locate_errors(f"{position} of {file}"):
                    row = parse_json(line)
                    if not isinstance(row, dict):
                        kind = type(row).__name__
                        raise InputError(JSONL_RULE, fault=f"is a {kind}, {row!r:.40}")
            except InputError as error:
                if bad is None:
                    raise
                bad.add(error)
            else:
                yield f"{position} of {file}", row


def _read_list(text: str, file: Path) -> Iterator[tuple[str, str]]:
    """Yield the number and the text of each value in a JSON list."""
    decoder, position, number = json.JSONDecoder(), text.index("[") + 1, 0

    try:
        while not text.startswith("]", position := BLANKS.match(text, position).end()):
            if number:
                if text[position : position + 1] != ",":
                    raise ValueError("a comma or ] must follow")
                position = BLANKS.match(text, position + 1).end()
            _, end = decoder.raw_decode(text, position)
            number += 1
            yield f"row {number}", text[position:end]
            position = end
        if text[position + 1 :].strip():
            raise ValueError("text follows its end")
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"a file that begins with [ must be one JSON list, and {file} is none after row "
            f"{number}: {first_line(error)}; write it again, or one JSON object a line"
        ) from error


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse_other_text(lines: list[str], file: Path) -> None:
    """Name CSV and pretty-printed JSON; a file with any line of JSON has bad rows instead."""
    has_rows, remedy = any(map(_is_json, lines)), ""
    if "\0" in lines[0] or lines[0].encode(errors="replace") != lines[0].encode(errors="ignore"):
        remedy = "is no text; unpack an archive, or write text as UTF-8"
    elif lines[0].lstrip().startswith("{"):
        is_one_object = lines[0].strip() == "{" and not has_rows
        with suppress(ValueError, RecursionError):
            _, end = json.JSONDecoder().raw_decode(text := "".join(lines).lstrip())
            is_one_object = bool({*"\r\n"} & {*text[:end]})
        if is_one_object:
            remedy = "is pretty-printed JSON; write one object a line, as `jq -c .` does"
    elif not has_rows:
        counts = [{mark: line.count(mark) for mark in ",;\t"} for line in lines[:2]]
        is_table = len(lines) > 1 and any(0 < counts[0][mark] <= counts[1][mark] for mark in ",;\t")
        if is_table or file.suffix in (".csv", ".tsv"):
            remedy = (
                "is CSV or another table of text; write it as Parquet or JSON lines, as pandas' "
                "to_parquet does"
            )
    if remedy:
        raise InputError(f"{JSONL_RULE}, and {file} {remedy}")


@contextmanager
def _name_unreadable(file: Path, kind: str = "UTF-8") -> Iterator[None]:
    try:
        yield
    except UNREADABLE as error:
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


def parse_json(text: str) -> Any:
    """Parse JSON; refuse a key that an object has twice, and half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            "rows must be UTF-8", fault=f"has another byte after {text[: error.start][-20:]!r}"
        ) from error
    try:
        value = json.loads(text, object_pairs_hook=unique_keys)
        if "\\u" in text:
            # json accepts half of a surrogate pair, tokenizers do not
            json.dumps(value, ensure_ascii=False).encode()
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(JSONL_RULE, fault=f"is none, {text.strip()!r:.40}: {error}") from error
    return value


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the keys and values of a JSON object; refuse a key that it has twice."""
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(KEYS_RULE, fault=f"has {twice!r:.40} twice")
    return row

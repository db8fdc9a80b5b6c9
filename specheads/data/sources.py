"""Corpus sources: where rows come from, and the split of each row. See docs/data.md.

To add a source, write a class like those here, and enter it in `SOURCE_CLASSES`.
"""

import hashlib
import json
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from specheads.config.data import SOURCES, DataSettings, SourceSettings
from specheads.core.errors import InputError, one_line
from specheads.core.files import HUB_ID, local_path
from specheads.data import files as local
from specheads.data.bad_rows import BadRows, join_keys, locate_errors, name_files
from specheads.data.conversations import conversation, first_answer
from specheads.data.files import COMPRESSED, JSONL, TABLES, FileList, Row, Rows
from specheads.data.remote import local_copy
from specheads.data.traces import trace

SPLITS = ("train", "validation", "prompts")
SPLIT_COLUMN = "specheads_split"
"""Column of a conversation that names its split."""
TEXT_SOURCES = ("python_stdlib", "files", "text")
"""Sources whose rows are text and have no columns."""
TEXT = tuple(f".txt{compressed}" for compressed in COMPRESSED)
SUFFIXES = {"files": ("",), "text": TEXT, "jsonl": JSONL, "parquet": TABLES}
ROW_SUFFIXES = (*JSONL, *TABLES)
SHUFFLE_BUFFER = 1000
"""Rows of a Hub stream that are shuffled at a time."""


class CorpusSource(ABC):
    """Rows of one source, as they are published."""

    is_limited = False
    """Whether `rows` yields at most `max_documents` itself. Reading the first row may take long
    then. Otherwise rows are drawn from all rows of the source."""

    def __init__(self, settings: SourceSettings) -> None:
        self.settings = settings

    @abstractmethod
    def rows(self, seed: int, bad: BadRows) -> Rows:
        """Yield the rows with their locations; add rows that cannot be read to `bad`."""

    def identity(self, seed: int) -> dict[str, Any]:
        """Return what decides the rows: settings, seed, and `files` with their sizes and dates."""
        names = [field.name for field in fields(SourceSettings)]
        return {name: getattr(self.settings, name) for name in names} | {
            "seed": seed if self.settings.max_documents else 0,
            "files": [],
        }

    def parse(self, row: Row, location: str) -> Row:
        """Return a row as a document: `text`, or a conversation, or a trace."""
        settings = self.settings
        if settings.kind.rows == "conversations":
            document = conversation(row, location, settings.ignore)
            names = {"category", SPLIT_COLUMN}.difference(settings.ignore)
            return document | {name: row[name] for name in names if row.get(name)}
        if settings.kind.rows == "traces":
            return trace(row, location, settings.ignore)
        if settings.source in TEXT_SOURCES:
            return row
        text = row.get(settings.column, ...)
        if not isinstance(text, str | None):
            # tables leave out nulls
            content = type(text).__name__ if settings.column in row else join_keys(row)
            with locate_errors(location):
                rule = f"a row must hold text in {settings.column!r}"
                raise InputError(rule, fault=f"has {content}")
        return {"text": text}


class LocalFiles(CorpusSource):
    """Local files of text, or of rows in JSON lines and Parquet."""

    @cached_property
    def file_list(self) -> FileList:
        """The files of the source, and those that are left out."""
        settings = self.settings
        for name in ("split", "config", "revision"):
            if (value := getattr(settings, name)) != getattr(SourceSettings, name):
                raise InputError(
                    f"local files have no {name}, got data.{name}={value!r:.80} for "
                    f"{settings.path!r:.80}; choose files by data.path= or data.patterns=, or name "
                    "a Hub id"
                )
        suffixes = SUFFIXES.get(settings.source, ROW_SUFFIXES)
        path = local_copy(settings.path, settings.patterns or [f"**/*{end}" for end in suffixes])
        file_list = local.find_files(str(path), suffixes, settings.patterns)
        if phrases := "; ".join(name_files(file_list.unreadable)):
            line = f"every file and folder of {settings.path} must be readable, and has {phrases}"
            if settings.bad_rows == "stop":
                remedy = "fix or remove them, or leave them out with data.bad_rows=drop"
                raise InputError(f"{line}; {remedy}")
            warnings.warn(f"{line}; they are left out", stacklevel=2)
        return file_list

    @property
    def files(self) -> list[Path]:
        """The files of the source."""
        return self.file_list.files

    def rows(self, seed: int, bad: BadRows) -> Rows:
        """Yield whole files, passages of files, or the rows in them."""
        if self.settings.source == "files":
            return local.read_text_files(self.files, bad)
        if self.settings.source == "text":
            return local.read_passages(self.files)
        column = self.settings.column if self.settings.kind.rows == "text" else ""
        return local.rows_of(self.files, bad, column)

    def identity(self, seed: int) -> dict[str, Any]:
        """Return what decides the rows."""
        stats = [(file.absolute(), file.stat()) for file in self.files]
        files = [[str(file), stat.st_size, stat.st_mtime_ns] for file, stat in stats]
        return super().identity(seed) | {"files": files}


class StandardLibrary(LocalFiles):
    """The Python files of the running interpreter's standard library, except very short ones."""

    @cached_property
    def file_list(self) -> FileList:
        """The files of the source."""
        return FileList(local.stdlib_files(), {}, {})

    def rows(self, seed: int, bad: BadRows) -> Rows:
        """Yield every file as one document."""
        return local.read_text_files(self.files, BadRows(), local.STDLIB_MIN_CHARACTERS)


class HubDataset(CorpusSource):
    """A split of a data set of the Hub; streamed and shuffled if `max_documents` is set."""

    is_limited = True

    def rows(self, seed: int, bad: BadRows) -> Rows:
        """Yield the rows of the split."""
        # slow to import, and few commands need it
        import datasets

        settings, limit = self.settings, self.settings.max_documents
        # "json" is how datasets reads an address
        name = settings.patterns[0] if settings.path == "json" else settings.path
        try:
            rows: Any = datasets.load_dataset(
                settings.path,
                name=settings.config or None,
                revision=settings.revision,
                split=settings.split,
                data_files=list(settings.patterns) or None,
                streaming=limit > 0,
            )
            if limit:
                rows = rows.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER).take(limit)
            for number, row in enumerate(rows, start=1):
                yield f"row {number} of dataset {name}", local.without_nulls(row)
        except Exception as error:
            # the network, the Hub and the readers of each format have their own exceptions
            reason = one_line(error.__cause__ or error)
            raise InputError(
                f"cannot load {name!r:.80} from the Hub: {reason:.200}; check the id, "
                "data.config=, data.split=, data.patterns= and the network, or pass a local file "
                "instead"
            ) from error


SOURCE_CLASSES: dict[str, type[CorpusSource]] = {
    "python_stdlib": StandardLibrary,
    "hub": HubDataset,
    **dict.fromkeys(("files", "text", "jsonl", "parquet", "chat", "traces"), LocalFiles),
}


def is_on_hub(source: str, path: str) -> bool:
    """Return whether a source's data set is on the Hub: conversations and traces may be, too."""
    if SOURCES[source].rows == "text":
        return source == "hub"
    is_id = bool(HUB_ID.fullmatch(path)) and not path.endswith(ROW_SUFFIXES)
    return is_id and not local_path(path).exists()


def open_source(settings: SourceSettings) -> CorpusSource:
    """Return the source of these settings."""
    if is_on_hub(settings.source, settings.path):
        return HubDataset(settings)
    return SOURCE_CLASSES[settings.source](settings)


def read_split(data: DataSettings, split: str, seed: int = 0) -> Rows:
    """Yield the documents of one split, source by source and in the order of each."""
    assert split in SPLITS
    for source in data.active_sources:
        for document_split, location, document in read_source(source, seed):
            if document_split == split:
                yield location, document


def read_source(
    settings: SourceSettings, seed: int = 0, bad: BadRows | None = None
) -> Iterator[tuple[str, str, Row]]:
    """Yield (split, location, document) of a source that is not a mixture; skip blank rows.

    A document has `text`, `messages` and `tools`, or `input_ids` and `loss_mask`. Rows that cannot
    be used are reported together at the end, or added to `bad`.
    """
    source, bad_rows = open_source(settings), BadRows() if bad is None else bad
    for location, row in _draw_rows(source, seed, bad_rows):
        try:
            document = source.parse(row, location)
            split = document.pop(SPLIT_COLUMN, None) or split_of(_split_key(document))
            if split not in SPLITS:
                with locate_errors(location):
                    rule = f"{SPLIT_COLUMN} must be one of {', '.join(SPLITS)}"
                    raise InputError(rule, fault=f"has {split!r:.40}")
        except InputError as error:
            bad_rows.add(error)
            continue
        text = document.get("text", "no text")
        if text and not text.isspace():
            yield split, location, document
        else:
            bad_rows.num_blank += 1
    if bad is None:
        bad_rows.report(settings.path or settings.source, settings.bad_rows)


def split_of(text: str) -> str:
    """Return the split of a text: prompts 5 %, validation 2 %, train the rest."""
    percentile = int(hashlib.sha256(text.encode()).hexdigest(), 16) % 100
    return "prompts" if percentile < 5 else "validation" if percentile < 7 else "train"


def _split_key(document: Row) -> str:
    """Return the text that decides a split: in conversations and traces, the first question.

    A held-out prompt is a first question, so no conversation that begins with it may be learned.
    """
    if "text" in document:
        return document["text"] or ""
    if "input_ids" in document:
        # the same question may have several traces
        ids = document["input_ids"]
        return json.dumps(ids[: document["loss_mask"].index(1)] or ids)
    messages = document["messages"]
    questions = messages[: first_answer(messages)]
    turns = [message["content"] for message in questions if message["role"] == "user"]
    return json.dumps(turns, ensure_ascii=False, sort_keys=True)


MAX_REPORTED_BYTES = 10**8
"""Larger sources are not read for a report alone."""


def report_source(settings: SourceSettings, seed: int = 0) -> list[str]:
    """Return lines on the files, rows and bytes that a source reads and leaves out, and why."""
    source, name = open_source(settings), settings.path or settings.source
    if not isinstance(source, LocalFiles):
        return [f"reads {name}; its rows are counted when it is read"]
    num_bytes = sum(file.stat().st_size for file in source.files)
    reads = f"reads {len(source.files):,} files, {num_bytes:,} bytes"
    bad, left_out = BadRows(), {**source.file_list.unreadable, **source.file_list.skipped}
    if num_bytes <= MAX_REPORTED_BYTES:
        reads += f", {sum(1 for _ in read_source(settings, seed, bad)):,} rows"
    files = name_files(left_out) + name_files(bad.skipped_files)
    lines = [f"leaves out files: {phrase}" for phrase in files]
    counts = bad.counts | ({"without text": bad.num_blank} if bad.num_blank else {})
    lines += [f"leaves out rows: {count:,}, {rule}" for rule, count in counts.items()]
    return [f"{reads} of {name}", *lines]


def refuse_unreadable(data: DataSettings) -> None:
    """Refuse local files that do not exist, cannot be read, or have no row that can be used."""
    for settings in data.active_sources:
        if not open_source(settings).is_limited:
            next(read_source(replace(settings, max_documents=0)), None)


def _draw_rows(source: CorpusSource, seed: int, bad: BadRows) -> Rows:
    """Return all rows, or `max_documents` of them in their order."""
    limit, rows = source.settings.max_documents, source.rows(seed, bad)
    if not limit or source.is_limited:
        return rows
    # read the files twice, because the chosen rows may not fit into memory
    num_rows = sum(1 for _ in source.rows(seed, BadRows()))
    chosen = {*np.random.default_rng(seed).permutation(num_rows)[:limit].tolist()}
    return (row for index, row in enumerate(rows) if index in chosen)

"""Sources of documents, and the split of each document. See docs/data.md."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from specheads.config.data import PATHLESS_SOURCES, DataSettings, SourceSettings
from specheads.core.errors import InputError, one_line
from specheads.core.files import HUB_ID, local_path
from specheads.data import files as local
from specheads.data.conversations import conversation, first_answer
from specheads.data.files import BadRows, Row, Rows, located, names, without_nulls
from specheads.data.instructions import instructions
from specheads.data.traces import trace

SPLITS = ("train", "validation", "prompts")
ROWS = ("chat", "traces")
"""Sources that read every column of a row."""
SUFFIXES = {
    **{"files": ("",), "text": (".txt",), "jsonl": local.JSONL, "parquet": local.PARQUET},
    **dict.fromkeys(ROWS, (*local.JSONL, *local.PARQUET)),
}
SHUFFLE_BUFFER = 1000
"""Rows of a Hub stream that are shuffled at a time."""


def split_of(text: str) -> str:
    """Return the split of a text: prompts 5 %, validation 2 %, train the rest."""
    place = int(hashlib.sha256(text.encode()).hexdigest(), 16) % 100
    return "prompts" if place < 5 else "validation" if place < 7 else "train"


def read_split(data: DataSettings, split: str, seed: int = 0) -> Rows:
    """Yield the rows of one split, source by source and in the order of each."""
    assert split in SPLITS
    for source in data.active_sources:
        for found, where, row in read_source(source, seed):
            if found == split:
                yield where, row


def read_source(
    source: SourceSettings, seed: int = 0, bad: BadRows | None = None
) -> Iterator[tuple[str, str, Row]]:
    """Yield (split, location, row) of a source that is not a mixture; skip blank rows.

    A row has `text`, `messages` and `tools`, or `input_ids` and `loss_mask`. Rows that cannot be
    used are reported together at the end, or added to `bad`.
    """
    found = BadRows() if bad is None else bad
    for where, row in _sample(source, seed, found):
        try:
            used = _document(source, row, where)
        except InputError as error:
            found.add(error)
            continue
        text = used.get("text", "no text")
        if text and not text.isspace():
            yield used.get("split") or split_of(_split_key(used)), where, used
    if bad is None:
        found.report(source.path or source.source, source.bad_rows)


def _document(source: SourceSettings, row: Row, where: str) -> Row:
    if source.source == "chat":
        return conversation(row, where, source.ignore)
    if source.source == "traces":
        return trace(row, where, source.ignore)
    if source.source not in ("jsonl", "parquet", "hub"):
        return row
    with located(where):
        if not isinstance(text := row.get(source.column, ...), str | None):
            # tables leave out nulls
            found = type(text).__name__ if source.column in row else names(row)
            raise InputError(f"a row must hold text in {source.column!r}", fault=f"has {found}")
    return {"text": text}


def _split_key(row: Row) -> str:
    """Return the text that decides a row's split: in conversations and traces, the first question.

    A held-out prompt is a first question, so no conversation that begins with it may be learned.
    """
    if "text" in row:
        return row["text"]
    if "input_ids" in row:
        # the same question may have several traces
        return json.dumps(row["input_ids"][: row["loss_mask"].index(1)] or row["input_ids"])
    asked = row["messages"][: first_answer(row["messages"])]
    turns = [message["content"] for message in asked if message["role"] == "user"]
    return json.dumps(turns, ensure_ascii=False, sort_keys=True)


def refuse_unreadable(data: DataSettings) -> None:
    """Refuse local files that do not exist, cannot be read, or have no row that can be used."""
    for source in data.active_sources:
        if source.path and _files(source):
            next(read_source(replace(source, max_documents=0)), None)


def identity(source: SourceSettings, seed: int) -> dict[str, Any]:
    """Return what decides a source's rows: settings, files, and their sizes and dates."""
    chosen = {item.name: getattr(source, item.name) for item in fields(SourceSettings)}
    stats = [(file, file.stat()) for file in _files(source)]
    return chosen | {
        "seed": seed if source.max_documents else 0,
        "files": [[str(file.absolute()), one.st_size, one.st_mtime_ns] for file, one in stats],
    }


def _files(source: SourceSettings) -> list[Path]:
    """Find the local files of a source; the list is empty for a Hub data set."""
    kind, path = source.source, source.path
    if kind in PATHLESS_SOURCES:
        return local.stdlib_files()
    is_id = HUB_ID.fullmatch(path) and not path.endswith(SUFFIXES["chat"])
    if kind == "hub" or (kind in ROWS and is_id and not local_path(path).exists()):
        return []
    for name in ("split", "config", "revision"):
        if (value := getattr(source, name)) != getattr(SourceSettings, name):
            raise InputError(
                f"local files have no {name}, got data.{name}={value!r:.80} for {path!r:.80}; "
                "choose files by data.path= or data.patterns=, or name a Hub id"
            )
    return local.find(path, SUFFIXES[kind], source.patterns)


def _rows(source: SourceSettings, seed: int, bad: BadRows) -> Rows:
    """Read rows as they are published; lines that are no JSON are added to `bad`."""
    files = _files(source)
    match source.source:
        case "python_stdlib":
            return local.whole_files(files, local.STDLIB_MIN_CHARACTERS)
        case "stdlib_instructions":
            return instructions(local.whole_files(files, local.STDLIB_MIN_CHARACTERS), split_of)
        case "files":
            return local.whole_files(files)
        case "text":
            return local.passages(files)
    if not files:
        return hub_rows(source, seed)
    return local.rows_of(files, bad, "" if source.source in ROWS else source.column)


def _sample(source: SourceSettings, seed: int, bad: BadRows) -> Rows:
    """Return all rows, or `max_documents` of them in their order."""
    most, rows = source.max_documents, _rows(source, seed, bad)
    # the Hub's are limited already
    if not most or not _files(source):
        return rows
    # read the files twice, because the chosen rows may not fit into memory
    number = sum(1 for _ in _rows(source, seed, BadRows()))
    chosen = {*np.random.default_rng(seed).permutation(number)[:most].tolist()}
    return (row for place, row in enumerate(rows) if place in chosen)


# data sets of the Hub


def hub_rows(source: SourceSettings, seed: int) -> Rows:
    """Yield the rows of a data set's split; stream and shuffle it if `max_documents` is set."""
    # slow to import, and few commands need it
    import datasets

    most = source.max_documents
    # "json" is how datasets reads an address
    name = source.patterns[0] if source.path == "json" else source.path
    try:
        rows: Any = datasets.load_dataset(
            source.path,
            name=source.config or None,
            revision=source.revision,
            split=source.split,
            data_files=list(source.patterns) or None,
            streaming=most > 0,
        )
        if most:
            rows = rows.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER).take(most)
        for number, row in enumerate(rows, start=1):
            yield f"row {number} of dataset {name}", without_nulls(row)
    except Exception as error:
        # the network, the Hub and the readers of each format have their own exceptions
        reason = one_line(error.__cause__ or error)
        raise InputError(
            f"cannot load {name!r:.80} from the Hub: {reason:.200}; check the id, data.config=, "
            "data.split=, data.patterns= and the network, or pass a local file instead"
        ) from error

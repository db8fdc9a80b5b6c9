"""Sources of documents, and the split of each document. See docs/data.md."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from specheads.config import Data
from specheads.config.parts import SOURCES, Source
from specheads.core.errors import InputError
from specheads.core.files import HUB_ID, local_path
from specheads.data import files as local
from specheads.data.conversations import conversation
from specheads.data.files import Row, Rows, first_and_last_line, names, text_row
from specheads.data.instructions import instructions

SPLITS = ("train", "validation", "prompts")

SUFFIXES = {"text": local.TXT, "jsonl": local.JSONL, "parquet": local.PARQUET}

CONVERSATIONS = ("stdlib_instructions", "chat")
"""Sources of conversations; all other sources have text."""

SHUFFLE_BUFFER = 1000
"""Rows of a Hub stream that are shuffled at a time."""


def split_of(text: str) -> str:
    """Return the split of a document: prompts 5 %, validation 2 %, train the rest.

    It depends on the text alone. The same text is in one split of every source, and text in
    prompts is never trained on.
    """
    place = int(hashlib.sha256(text.encode()).hexdigest(), 16) % 100
    return "prompts" if place < 5 else "validation" if place < 7 else "train"


def read(corpus: Data, split: str, seed: int = 0) -> Rows:
    """Yield the rows of one split, in the order of the source.

    The sources of a mixture alternate by their weights. Each row comes once.
    """
    check_split(split)
    if corpus.source == "mixture":
        yield from _alternate(corpus, split, seed)
        return
    for found, where, row in read_all(corpus, seed):
        if found == split:
            yield where, row


def check_split(split: str) -> None:
    """Refuse a split that does not exist."""
    if split not in SPLITS:
        raise InputError(f"a split must be one of {', '.join(SPLITS)}; got {split!r}")


def read_all(source: Source, seed: int = 0) -> Iterator[tuple[str, str, Row]]:
    """Yield (split, location, row) of a source that is not a mixture; skip blank rows.

    With `max_documents` the seed chooses the rows.
    """
    for where, row in _sample(source, _files(source), seed):
        text = row.get("text", "messages")
        if text and not text.isspace():
            yield row.get("split") or split_of(_split_key(row)), where, row


def refuse_unreadable(corpus: Data) -> None:
    """Refuse local files that do not exist or whose first row is broken; skip Hub data sets."""
    if corpus.source == "mixture":
        for name, one in corpus.sources.items():
            if one.weight:
                refuse_unreadable(alone(corpus, name))
        return
    if files := _files(corpus):
        next(_rows(corpus, files, 0), None)


def identity(source: Source, seed: int) -> dict[str, Any]:
    """Return what decides a source's rows: settings, files, and their sizes and dates."""
    stats = [(file, file.stat()) for file in _files(source)]
    settings = asdict(source)
    settings = {name: settings[name] for name in settings if name not in ("weight", "sources")}
    return settings | {
        "seed": seed if source.max_documents else 0,
        "files": [[str(file.absolute()), one.st_size, one.st_mtime_ns] for file, one in stats],
    }


def _files(source: Source) -> list[Path]:
    """Find the local files of a source; the list is empty for a Hub data set."""
    match source.source:
        case "python_stdlib" | "stdlib_instructions":
            return local.stdlib_files()
        case "files":
            return local.folder_files(source.path, source.patterns)
        case "text" | "jsonl" | "parquet" as kind:
            return local.find(kind, source.path, SUFFIXES[kind])
        case "chat":
            return _chat_files(source)
        case "hub":
            return []
    raise InputError(
        f"a corpus source must be one of {', '.join([*SOURCES, 'mixture'])}; got {source.source!r}"
    )


def _rows(source: Source, files: list[Path], seed: int) -> Rows:
    """Read rows: `text`, or `messages` and maybe `tools`. A row may name its `split`."""
    match source.source:
        case "python_stdlib":
            return local.stdlib_texts(files)
        case "stdlib_instructions":
            return instructions(local.stdlib_texts(files), split_of)
        case "files":
            return local.whole_files(files)
        case "text":
            return local.passages(files)
        case "jsonl":
            return local.jsonl_texts(files, source.column)
        case "parquet":
            return local.table_texts(files, source.column)
        case "chat":
            return _conversations(source, files, seed)
    return _hub_texts(source, seed)


def _split_key(row: Row) -> str:
    """Return the text that decides a row's split; in a conversation, the user's messages."""
    if "text" in row:
        return row["text"]
    turns = [message["content"] for message in row["messages"] if message["role"] == "user"]
    return json.dumps(turns, ensure_ascii=False, sort_keys=True)


def _sample(source: Source, files: list[Path], seed: int) -> Rows:
    """Return all rows, or `max_documents` of them in their order; the Hub's are limited already."""
    most = source.max_documents
    if not most or not files:
        return _rows(source, files, seed)
    if source.streaming:
        return islice(_rows(source, files, seed), most)
    # read the files twice, because the chosen rows may not fit into memory
    number = sum(1 for _ in _rows(source, files, seed))
    chosen = np.zeros(number, np.bool_)
    chosen[np.random.default_rng(seed).permutation(number)[:most]] = True
    rows = zip(_rows(source, files, seed), chosen, strict=True)
    return (row for row, is_chosen in rows if is_chosen)


def _alternate(corpus: Data, split: str, seed: int) -> Rows:
    """Yield the next row of the source that is furthest below its weight, until none is left."""
    weights = {name: one.weight for name, one in corpus.sources.items() if one.weight}
    streams = {name: read(alone(corpus, name), split, seed) for name in weights}
    done = dict.fromkeys(weights, 0)
    while streams:
        name = min(streams, key=lambda one: done[one] / weights[one])
        if (found := next(streams[name], None)) is None:
            del streams[name]
            continue
        done[name] += len(found[1].get("text") or str(found[1]["messages"]))
        yield found


def conversations_and_texts(corpus: Data) -> tuple[Data | None, Data | None]:
    """Split a corpus into its conversations and its text; None for a part that it lacks."""
    if corpus.source != "mixture":
        return (corpus, None) if corpus.source in CONVERSATIONS else (None, corpus)
    used = {name: one for name, one in corpus.sources.items() if one.weight}
    talks = {name: one for name, one in used.items() if one.source in CONVERSATIONS}
    texts = {name: one for name, one in used.items() if name not in talks}
    both = (replace(corpus, sources=some) if some else None for some in (talks, texts))
    return next(both), next(both)


def alone(corpus: Data, name: str) -> Data:
    """Return one source of a mixture as a corpus of its own."""
    settings = asdict(corpus.sources[name])
    del settings["weight"]
    return Data(**settings)


# data sets of the Hub


def load_from_hub(path: str, **choices: Any) -> Any:
    """Call `datasets.load_dataset`; every failure is an `InputError` of one line."""
    # slow to import, and few commands need it
    import datasets

    with _reachable(path):
        return datasets.load_dataset(path, **choices)


def hub_rows(source: Source, seed: int) -> Rows:
    """Yield the rows of the data set's "train" split; stream it if `max_documents` is set.

    A stream is shuffled in a buffer by the seed, unless `streaming` asks for its first rows.
    """
    if not source.path:
        raise InputError(f"source {source.source!r} needs the id of a dataset as its path")
    most = source.max_documents
    rows = load_from_hub(
        source.path,
        name=source.config or None,
        revision=source.revision,
        split="train",
        data_files=list(source.patterns) or None,
        streaming=most > 0,
    )
    if most and not source.streaming:
        rows = rows.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER)
    with _reachable(source.path):
        for number, row in enumerate(rows.take(most) if most else rows, start=1):
            yield f"row {number} of dataset {source.path}", row


def _hub_texts(source: Source, seed: int) -> Rows:
    column = source.column
    for where, row in hub_rows(source, seed):
        if column not in row:
            raise InputError(f"{where} has no column {column!r}; it has {names(row)}")
        yield where, text_row(row, column, where)


@contextmanager
def _reachable(path: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # the network, the Hub and the readers of each format have their own exceptions
        raise InputError(
            f"cannot load {path!r:.80} from the Hub: {first_and_last_line(error)}; check the id "
            "and the network, or pass a local file instead"
        ) from error


# conversations


def _chat_files(source: Source) -> list[Path]:
    """Return local files of conversations; none if the path is an id of the Hub."""
    suffixes = (*local.JSONL, *local.PARQUET)
    is_named = source.path.endswith(suffixes) or local_path(source.path).exists()
    if HUB_ID.fullmatch(source.path) and not is_named:
        if (folder := local_path(source.path).parent).is_dir():
            raise InputError(
                f"source 'chat' needs a file, a folder, a glob or the Hub's USER/NAME, and "
                f"{source.path!r} may be a path or an id: there is a folder {folder} here, without "
                f"{Path(source.path).name}; correct the path, or start elsewhere to ask the Hub"
            )
        return []
    return local.find("chat", source.path, suffixes)


def _conversations(source: Source, files: list[Path], seed: int) -> Rows:
    for where, row in local.rows_of(files) if files else hub_rows(source, seed):
        talk = conversation(row, where)
        yield where, {"messages": talk.messages, "tools": talk.tools}

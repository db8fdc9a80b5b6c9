"""Sources: where documents come from, and which of them may be trained on. See docs/data.md."""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from specheads.config import Data
from specheads.config.parts import Source
from specheads.core.errors import InputError
from specheads.core.paths import HUB_ID, local_path
from specheads.data import local
from specheads.data.conversations import conversation
from specheads.data.hub import hub_rows, hub_texts
from specheads.data.instructions import instructions
from specheads.data.jsonl import Row

SPLITS = ("train", "validation", "prompts")

CONVERSATIONS = ("stdlib_instructions", "chat")
"""Sources whose rows are conversations; those of all others are text."""

Rows = Iterator[tuple[str, Row]]
"""Where each row stands, for errors, and the row: `text`, or the `messages` of a conversation and
maybe its `tools`. Its `split` is given where something else decides over it."""


@dataclass(frozen=True, slots=True)
class _Loader:
    files: Callable[[Source], list[Path]]
    """What is read on this machine; nothing where rows come from the Hub."""
    rows: Callable[[Source, list[Path], int], Rows]
    """Reads it; the seed chooses among the Hub's rows."""


def split_of(text: str) -> str:
    """Return the split a document belongs to: prompts 5 %, validation 2 %, train the rest.

    Only the text itself decides, so duplicates share a split wherever they came from, and text
    that prompts are cut from is never trained on.
    """
    place = int(hashlib.sha256(text.encode()).hexdigest(), 16) % 100
    return "prompts" if place < 5 else "validation" if place < 7 else "train"


def read(corpus: Data, split: str, seed: int = 0) -> Rows:
    """Yield the rows of one split, in the order of the source.

    Of a mixture the sources take turns, so that their text keeps to the weights while all of them
    last; each row comes once.
    """
    if split not in SPLITS:
        raise InputError(f"a split must be one of {', '.join(SPLITS)}; got {split!r}")
    if corpus.source == "mixture":
        yield from _turns(corpus, split, seed)
        return
    for found, where, row in read_all(corpus, seed):
        if found == split:
            yield where, row


def read_all(source: Source, seed: int = 0) -> Iterator[tuple[str, str, Row]]:
    """Yield every row of a source that is no mixture behind its split; blank ones are left out.

    The seed decides which rows are taken where they are bounded.
    """
    loader = _loader(source)
    files = loader.files(source)
    for where, row in _bounded(source, lambda: loader.rows(source, files, seed), files, seed):
        text = row.get("text", "messages")
        if text and not text.isspace():
            yield row.get("split") or split_of(_decisive(row)), where, row


def refuse_unreadable(corpus: Data) -> None:
    """Refuse local files that are not there, or whose first row is none; the Hub is not asked."""
    if corpus.source == "mixture":
        for name, one in corpus.sources.items():
            if one.weight:
                refuse_unreadable(alone(corpus, name))
        return
    loader = _loader(corpus)
    if files := loader.files(corpus):
        next(loader.rows(corpus, files, 0), None)


def identity(source: Source, seed: int) -> tuple[dict[str, Any], int]:
    """Return what decides a source's rows, by name, and about how many bytes they are.

    By its path alone the rows of an older file would be found, so that its size and date count.
    """
    files = _loader(source).files(source)
    stats = [file.stat() for file in files]
    told = {
        name: value for name, value in asdict(source).items() if name not in ("weight", "sources")
    }
    told["seed"] = seed if source.max_documents else 0
    told["files"] = [
        [str(file.absolute()), stat.st_size, stat.st_mtime_ns]
        for file, stat in zip(files, stats, strict=True)
    ]
    return told, sum(map(local.num_bytes, files))


def _loader(source: Source) -> _Loader:
    if source.source not in LOADERS:
        raise InputError(
            f"a corpus source must be one of {', '.join([*LOADERS, 'mixture'])}; got "
            f"{source.source!r}"
        )
    return LOADERS[source.source]


def _decisive(row: Row) -> str:
    """Return what a row's split depends on; of a conversation, what its user says."""
    if "text" in row:
        return row["text"]
    turns = [message["content"] for message in row["messages"] if message["role"] == "user"]
    return json.dumps(turns, ensure_ascii=False, sort_keys=True)


def _bounded(source: Source, rows: Callable[[], Rows], files: list[Path], seed: int) -> Rows:
    """Return all rows, or some of them in their order; the Hub's are bounded already."""
    most = source.max_documents
    if not most or not files:
        return rows()
    if source.streaming:
        return islice(rows(), most)
    # read twice, because those chosen need not fit into memory
    number = sum(1 for _ in rows())
    chosen = np.zeros(number, np.bool_)
    chosen[np.random.default_rng(seed).permutation(number)[:most]] = True
    return (row for row, is_chosen in zip(rows(), chosen, strict=True) if is_chosen)


def _turns(corpus: Data, split: str, seed: int) -> Rows:
    """Yield rows of the source that is furthest behind its weight, until all are used up."""
    weights = {name: one.weight for name, one in corpus.sources.items() if one.weight}
    open_ = {name: read(alone(corpus, name), split, seed) for name in weights}
    done = dict.fromkeys(weights, 0)
    while open_:
        name = min(open_, key=lambda one: done[one] / weights[one])
        if (found := next(open_[name], None)) is None:
            del open_[name]
            continue
        done[name] += len(found[1].get("text") or str(found[1]["messages"]))
        yield found


def by_sort(corpus: Data) -> tuple[Data | None, Data | None]:
    """Return a corpus's conversations and its text; what it has not is None."""
    if corpus.source != "mixture":
        return (corpus, None) if corpus.source in CONVERSATIONS else (None, corpus)
    used = {name: one for name, one in corpus.sources.items() if one.weight}
    talks = {name: one for name, one in used.items() if one.source in CONVERSATIONS}
    texts = {name: one for name, one in used.items() if name not in talks}
    both = (replace(corpus, sources=some) if some else None for some in (talks, texts))
    return next(both), next(both)


def alone(corpus: Data, name: str) -> Data:
    """Return one source of a mixture as a corpus of its own."""
    told = asdict(corpus.sources[name])
    del told["weight"]
    return Data(**told)


def _chat_files(source: Source) -> list[Path]:
    """Return local files of conversations; none where the path is an id of the Hub."""
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


def _stdlib(_: Source) -> list[Path]:
    return local.stdlib_files()


LOADERS = {
    "python_stdlib": _Loader(_stdlib, lambda _, files, __: local.stdlib_texts(files)),
    "stdlib_instructions": _Loader(
        _stdlib, lambda _, files, __: instructions(local.stdlib_texts(files), split_of)
    ),
    "files": _Loader(
        lambda source: local.folder_files(source.path, source.patterns),
        lambda _, files, __: local.whole_files(files),
    ),
    "text": _Loader(
        lambda source: local.find("text", source.path, local.TXT),
        lambda _, files, __: local.passages(files),
    ),
    "jsonl": _Loader(
        lambda source: local.find("jsonl", source.path, local.JSONL),
        lambda source, files, _: local.jsonl_texts(files, source.column),
    ),
    "parquet": _Loader(
        lambda source: local.find("parquet", source.path, local.PARQUET),
        lambda source, files, _: local.table_texts(files, source.column),
    ),
    "hub": _Loader(lambda _: [], lambda source, _, seed: hub_texts(source, seed)),
    "chat": _Loader(_chat_files, _conversations),
}
"""How each kind of source is found and read."""

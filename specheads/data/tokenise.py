"""Corpora as token ids: tokenised once, then memory-mapped. See docs/data.md."""

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from specheads.core.errors import InputError
from specheads.core.files import atomic_folder, cache_folder, sole_writer, sweep
from specheads.data.chat import Template
from specheads.data.conversations import first_answer
from specheads.data.documents import Documents
from specheads.data.encode import DisagreementError, Encode, encoder, tokenizer_fingerprint
from specheads.data.files import BadRows, Row
from specheads.data.settings import CONVERSATIONS, Data, Source
from specheads.data.sources import SPLITS, identity, read_all

FORMAT = 4
"""Increased when the same text would become other documents; older files are not found then."""

FILE = "documents.arrow"
"""All documents of a corpus, of every split."""

ARROW_END = b"\xff\xff\xff\xff\0\0\0\0"
"""Last bytes of an Arrow stream that is not truncated."""

BATCH_CHARACTERS, BATCH_ROWS = 4_000_000, 1000
"""Text tokenised at a time: enough for all cores and small in memory."""

SCHEMA = pa.schema([("split", pa.int8()), ("tokens", pa.list_(pa.int32()))])
CHAT_SCHEMA = SCHEMA.append(pa.field("loss_mask", pa.list_(pa.uint8())))

Located = tuple[str, str, Row]
"""Split, location and row."""


class UnansweredError(InputError):
    """The conversations of a corpus have no answers yet, so there is nothing to learn from."""


class EmptySplitError(InputError):
    """A corpus has no document in the requested split."""


def tokenised(
    corpus: Data,
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    seed: int = 0,
    *,
    bar: Any = None,
) -> Documents:
    """Return one split of a corpus as documents, and tokenise the corpus if it is not cached.

    In text every token is in the loss, and the end-of-text token ends each document. In
    conversations the assistant's tokens are in the loss. One process tokenises all splits of a
    source at once, and others wait for it.

    Args:
        corpus: What to read.
        split: train, validation or prompts.
        tokenizer: Tokenizer of the base; the cached tokens are its own.
        seed: Chooses the documents of a limited source or of a mixture.
        bar: Progress bar, as from `runs.progress.progress`.

    Raises:
        InputError: The corpus cannot be read, or the split is empty.
    """
    assert split in SPLITS

    def documents(source: Source) -> Documents:
        return _documents(_cached(source, tokenizer, seed, bar), source, split)

    if corpus.source == "mixture":
        return _mixture(corpus, split, seed, documents)
    return documents(corpus)


def _cached(source: Source, tokenizer: PreTrainedTokenizerBase, seed: int, bar: Any) -> Path:
    """Return the file of a source's documents, and write it if it does not exist."""
    if tokenizer.eos_token_id is None:
        raise InputError(
            "packing needs a tokenizer with an end-of-text token, this one lacks it; set its "
            "eos_token"
        )
    known = identity(source, seed)
    known |= {"format": FORMAT, "tokenizer": tokenizer_fingerprint(tokenizer)}
    key = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:32]
    folder = cache_folder() / "tokens" / key
    if (folder / FILE).is_file():
        return folder / FILE
    with sole_writer(folder.parent, f".{key}.lock", wait=lambda _: None):
        # another process may have written it while this one waited for the lock
        if (folder / FILE).is_file():
            return folder / FILE
        sweep(folder.parent, key)
        try:
            _write(folder, source, tokenizer, seed, bar, is_fast=True)
        except DisagreementError as error:
            warnings.warn(
                f"fastokens does not read as the tokenizer does ({error}): the tokenizer reads "
                "this corpus alone, which takes longer",
                stacklevel=2,
            )
            _write(folder, source, tokenizer, seed, bar, is_fast=False)
    return folder / FILE


def _write(
    folder: Path,
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    bar: Any,
    *,
    is_fast: bool,
) -> None:
    """Write all documents of a source as an Arrow stream, batch by batch."""
    bad, done = BadRows(), 0
    total = sum(size for _, size, _ in identity(source, seed)["files"])
    task = None if bar is None else bar.add_task("tokenising", total=1, numbers="MB")
    is_chat = source.source in CONVERSATIONS
    batches = _batches(read_all(source, seed, bad))
    first = next(batches, [])
    if is_chat and first and not any(map(_is_answered, first)):
        raise UnansweredError(
            f"a corpus phase learns answers, and {first[0][1]} has no answer; have the base answer "
            "it: a phase with text=distilled, or specheads distill"
        )
    # not before a row is read: report a source that cannot be read first
    if is_chat:
        encode = partial(_conversations, Template(tokenizer), bad)
    else:
        encode = partial(_texts, encoder(tokenizer, is_fast=is_fast), tokenizer.eos_token_id)
    with atomic_folder(folder) as scratch:
        schema = CHAT_SCHEMA if is_chat else SCHEMA
        with pa.ipc.new_stream(str(scratch / FILE), schema) as stream:
            for batch in chain([first] if first else [], batches):
                splits, *columns = encode(batch)
                if splits:
                    numbers = pa.array([SPLITS.index(split) for split in splits], pa.int8())
                    stream.write_batch(pa.record_batch([numbers, *map(_lists, columns)], schema))
                elif source.bad_rows == "stop":
                    # a template that refuses every row would take long over a large source
                    bad.report(source.path or source.source, "stop")
                done += sum(map(_size, batch))
                if bar is not None:
                    bar.update(task, completed=done // 10**6, total=max(total, done) // 10**6 + 1)
        bad.report(source.path or source.source, source.bad_rows)


def _batches(rows: Iterator[Located]) -> Iterator[list[Located]]:
    batch, size = list[Located](), 0
    for one in rows:
        batch.append(one)
        size += _size(one)
        if size >= BATCH_CHARACTERS or len(batch) == BATCH_ROWS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _size(one: Located) -> int:
    return len(one[2].get("text") or str(one[2]["messages"]))


def _is_answered(one: Located) -> bool:
    return first_answer(one[2]["messages"]) < len(one[2]["messages"])


def _texts(encode: Encode, end: Any, batch: list[Located]) -> Any:
    """Return the split and the tokens of each text."""
    found = encode([row["text"] for _, _, row in batch])
    # some tokenizers add the end token themselves
    ended = [ids if ids[-1:] == end else np.append(ids, np.int32(end)) for ids in found]
    return [split for split, _, _ in batch], ended


def _conversations(template: Template, bad: BadRows, batch: list[Located]) -> Any:
    """Return the split, the tokens and the loss mask of each text."""
    splits, tokens, masks = list[str](), list[np.ndarray](), list[np.ndarray]()
    for split, where, row in batch:
        try:
            samples = template.samples(row["messages"], row["tools"], where)
        except InputError as error:
            bad.add(error)
            continue
        splits += [split] * len(samples)
        tokens += [np.array(one.tokens, np.int32) for one in samples]
        masks += [np.array(one.loss_mask, np.uint8) for one in samples]
    return splits, tokens, masks


def _lists(parts: list[np.ndarray]) -> pa.ListArray:
    ends = np.cumsum([0, *map(len, parts)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(np.concatenate(parts)))


def _documents(file: Path, source: Source, split: str) -> Documents:
    """Memory-map the documents of one split."""
    try:
        with pa.memory_map(str(file)) as stored:
            if (
                stored.size() < len(ARROW_END)
                or stored.read_at(len(ARROW_END), stored.size() - len(ARROW_END)) != ARROW_END
            ):
                raise ValueError("it is truncated")
            table = pa.ipc.open_stream(stored).read_all()
        splits = table.column("split").to_numpy()
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise InputError(
            f"tokenised text must be as it was written, and {file} is damaged; remove "
            f"{file.parent} to have it written again"
        ) from error
    order = np.flatnonzero(splits == SPLITS.index(split))
    if not len(order):
        raise EmptySplitError(
            f"a corpus needs at least one document in its {split} split, {source.source} "
            f"{source.path} has 0 of {len(splits)} there; give more documents"
        )
    return Documents(table, order)


def _mixture(corpus: Data, split: str, seed: int, part: Callable[[Source], Documents]) -> Documents:
    """Return documents of several sources, whose fractions of the tokens are their weights.

    The mixture has as many tokens as its sources together. The seed chooses documents of a source
    that has more than its fraction; those of a source with less repeat, each as often as the
    others, give or take one. `datasets.interleave_datasets` has fractions of rows, drawn at random.
    """
    parts: dict[str, Documents] = {}
    weights = {name: one.weight for name, one in corpus.sources.items() if one.weight}
    for name in weights:
        try:
            parts[name] = part(corpus.sources[name])
        except EmptySplitError:
            # a small source may have no held-out document
            if split == "train":
                raise
    if not parts:
        raise EmptySplitError(
            f"a mixture needs a document in its {split} split, and none of {', '.join(weights)} "
            "has one; give more documents"
        )
    total = sum(int(one.lengths.sum()) for one in parts.values())
    whole = sum(weights[name] for name in parts)
    first, chosen = 0, []
    for number, (name, one) in enumerate(parts.items()):
        rng = np.random.default_rng((seed, number))
        chosen.append(first + _chosen(one.lengths, total * weights[name] / whole, rng))
        first += len(one)
    return Documents.joined(list(parts.values()), np.concatenate(chosen))


def _chosen(lengths: np.ndarray, tokens: float, rng: np.random.Generator) -> np.ndarray:
    """Return document numbers with about `tokens` tokens, each number as often as the others."""
    rounds, rest = divmod(tokens, lengths.sum())
    order = rng.permutation(len(lengths))
    # take the last document if at least half of it is needed
    middles = np.cumsum(lengths[order]) - lengths[order] / 2
    some = order[: np.searchsorted(middles, rest)]
    return np.concatenate([np.tile(np.arange(len(lengths)), int(rounds)), some])

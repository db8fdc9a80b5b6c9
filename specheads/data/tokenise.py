"""Corpora as documents of token ids: tokenised once, kept in shards that are mapped into memory.

See docs/data.md.
"""

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from specheads.config import Data
from specheads.core.errors import InputError
from specheads.core.files import sole_writer, sweep
from specheads.core.paths import cache_folder
from specheads.data import jsonl
from specheads.data.chat import Template
from specheads.data.conversations import first_answer
from specheads.data.documents import Documents
from specheads.data.encode import DisagreementError, Encoder
from specheads.data.fingerprint import tokenizer_fingerprint
from specheads.data.shards import MARK, Batch, Document, EmptySplitError, documents, fill
from specheads.data.sources import SPLITS, alone, identity, read_all

FORMAT = 3
"""Raised when the same text would become other documents; older shards are no longer found."""

BATCH_CHARACTERS = 4_000_000
"""Text tokenised at a time: enough for all cores, little enough for memory."""

Row = tuple[str, str, jsonl.Row]
"""A row of a source, behind its split and where it stands."""


class UnansweredError(InputError):
    """A conversation has no answer yet, so that there is nothing to learn in it."""


def tokenised(
    corpus: Data,
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    seed: int = 0,
    *,
    bar: Any = None,
    tell: Callable[[str], object] = warnings.warn,
) -> Documents:
    """Return one split of a corpus as documents, tokenised now or in an earlier run.

    Of text every token counts, and each document is ended by the end-of-text token; of
    conversations the assistant's tokens count. All splits of a source are tokenised in one pass
    into the cache; of several processes one does it and the others wait.

    Args:
        corpus: What to read.
        split: train, validation or prompts.
        tokenizer: Reads it; the shards are its own.
        seed: Chooses the documents where they are bounded or mixed.
        bar: Shows how far it is: what `runs.progress.progress` gives.
        tell: Takes a line where the fast tokenizer had to be left out.

    Raises:
        ValueError: The corpus cannot be read, or the split is empty.
    """
    if split not in SPLITS:
        raise InputError(f"a split must be one of {', '.join(SPLITS)}; got {split!r}")
    if corpus.source == "mixture":

        def part(one: Data) -> Documents:
            return tokenised(one, split, tokenizer, seed, bar=bar, tell=tell)

        return _mixture(corpus, split, seed, part)
    return documents(_shards(corpus, tokenizer, seed, bar, tell), split)


def _shards(
    corpus: Data,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    bar: Any,
    tell: Callable[[str], object],
) -> Path:
    """Return the folder that holds a source's documents, and fill it where it is not there yet."""
    if tokenizer.eos_token_id is None:
        raise InputError(
            "packing needs a tokenizer with an end-of-text token, this one has none; set its "
            "eos_token"
        )
    known, size = identity(corpus, seed)
    known |= {"format": FORMAT, "tokenizer": tokenizer_fingerprint(tokenizer)}
    key = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:32]
    folder = cache_folder() / "tokens" / key
    if (folder / MARK).is_file():
        return folder
    with sole_writer(folder.parent, f".{key}.lock", wait=lambda _: None):
        # another process may just have made it
        if (folder / MARK).is_file():
            return folder
        sweep(folder.parent, key)
        watch = _watch(bar, size)
        try:
            fill(folder, _documents(corpus, tokenizer, seed, watch, is_fast=True), known)
        except DisagreementError as error:
            tell(
                f"fastokens does not read as the tokenizer does ({error}): the tokenizer reads "
                "this corpus alone, which takes longer"
            )
            fill(folder, _documents(corpus, tokenizer, seed, watch, is_fast=False), known)
    return folder


def _watch(bar: Any, size: int) -> Callable[[int], None]:
    """Return what takes the characters read so far, and shows them beside the files' bytes."""
    if bar is None:
        return lambda _: None
    task = bar.add_task("tokenising", total=max(size // 10**6, 1), numbers="MB")

    def show(characters: int) -> None:
        done = characters // 10**6
        bar.update(task, completed=done, total=max(size // 10**6, done + 1))

    return show


def _documents(
    corpus: Data,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    watch: Callable[[int], None],
    *,
    is_fast: bool,
) -> Iterator[Batch]:
    """Yield the documents of a corpus behind their splits, some text at a time."""
    read = None
    for batch in _batches(corpus, seed, watch):
        if read is None:
            is_text = "text" in batch[0][2]
            read = _read_texts(tokenizer, is_fast) if is_text else _read_conversations(tokenizer)
        found = zip(batch, read(batch), strict=True)
        yield [(split, one) for (split, _, _), several in found for one in several]


def _batches(corpus: Data, seed: int, watch: Callable[[int], None]) -> Iterator[list[Row]]:
    batch: list[Row] = []
    size = done = 0
    for split, where, row in read_all(corpus, seed):
        batch.append((split, where, row))
        size += len(row["text"] if "text" in row else str(row["messages"]))
        if size >= BATCH_CHARACTERS:
            yield batch
            done += size
            watch(done)
            batch, size = [], 0
    if batch:
        yield batch


Read = Callable[[list[Row]], list[list[Document]]]
"""Gives the documents of each row."""


def _read_texts(tokenizer: PreTrainedTokenizerBase, is_fast: bool) -> Read:
    encode = Encoder(tokenizer, is_fast=is_fast)
    end: Any = tokenizer.eos_token_id

    def read(batch: list[Row]) -> list[list[Document]]:
        found = encode([row["text"] for _, _, row in batch])
        # some tokenizers end every text themselves
        return [
            [(ids if ids[-1:] == end else np.append(ids, np.int32(end)), None)] for ids in found
        ]

    return read


def _read_conversations(tokenizer: PreTrainedTokenizerBase) -> Read:
    template: Template | None = None

    def read(batch: list[Row]) -> list[list[Document]]:
        """Return the texts of each conversation, and which tokens of them are answers."""
        nonlocal template
        for _, where, row in batch:
            _refuse_unanswered(row["messages"], where)
        if template is None:
            template = Template(tokenizer)
        return [
            [
                (np.array(one.tokens, np.int32), np.array(one.loss_mask, np.uint8))
                for one in template.samples(row["messages"], row.get("tools"), where)
            ]
            for _, where, row in batch
        ]

    return read


def _refuse_unanswered(messages: list[dict[str, Any]], where: str) -> None:
    if first_answer(messages) == len(messages):
        raise UnansweredError(
            f"a corpus phase learns answers, and {where} has none; have the base answer it: a "
            "phase with text=distilled, or specheads distill"
        )


def _mixture(corpus: Data, split: str, seed: int, open_: Callable[[Data], Documents]) -> Documents:
    """Return documents of several sources, whose shares of the tokens are their weights.

    The mixture has as many tokens as its sources have together: of one with more than its share a
    seed chooses the documents, and those of one with less come again.
    """
    parts: dict[str, Documents] = {}
    weights = {name: one.weight for name, one in corpus.sources.items() if one.weight}
    for name in weights:
        try:
            parts[name] = open_(alone(corpus, name))
        except EmptySplitError:
            # 2 % of a small source may be none
            if split == "train":
                raise
    if not parts:
        raise EmptySplitError(
            f"a mixture needs a document in its {split} split, and none of {', '.join(weights)} "
            "has one; give more documents"
        )
    total = sum(int(one.lengths.sum()) for one in parts.values())
    whole = sum(weights[name] for name in parts)
    first, order = 0, []
    for number, (name, one) in enumerate(parts.items()):
        rng = np.random.default_rng((seed, number))
        order.append(first + _chosen(one.lengths, total * weights[name] / whole, rng))
        first += len(one)
    known = [[one.fingerprint, weights[name]] for name, one in parts.items()]
    digest = hashlib.sha256(json.dumps([known, seed]).encode()).hexdigest()[:32]
    return Documents.joined(list(parts.values()), np.concatenate(order), digest)


def _chosen(lengths: np.ndarray, tokens: float, rng: np.random.Generator) -> np.ndarray:
    """Return numbers of documents that have about so many tokens, each as often as any other."""
    rounds, rest = divmod(tokens, lengths.sum())
    order = rng.permutation(len(lengths))
    # of the last one at least half is wanted
    middles = np.cumsum(lengths[order]) - lengths[order] / 2
    some = order[: np.searchsorted(middles, rest)]
    return np.concatenate([np.tile(np.arange(len(lengths)), int(rounds)), some])

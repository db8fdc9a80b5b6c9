"""Corpora as token ids: tokenised once by `datasets`, then memory-mapped. See docs/data.md."""

import hashlib
import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from specheads.config import Data
from specheads.core.errors import InputError
from specheads.core.files import atomic_folder, cache_folder, sole_writer, sweep
from specheads.data.chat import Template
from specheads.data.conversations import first_answer
from specheads.data.documents import Documents
from specheads.data.encode import DisagreementError, Encoder, tokenizer_fingerprint
from specheads.data.sources import CONVERSATIONS, SPLITS, alone, check_split, identity, read_all

FORMAT = 3
"""Increased when the same text would become other documents; older files are not found then."""

FILE = "documents.arrow"
"""All documents of a corpus, of every split."""

ARROW_END = b"\xff\xff\xff\xff\0\0\0\0"
"""Last bytes of an Arrow stream that is not truncated."""

BATCH_BYTES = 4_000_000
"""Text tokenised at a time: enough for all cores and small in memory."""

BATCH_ROWS = 1000
WRITTEN_ROWS = 64
"""Most rows of a batch, and rows that wait in memory until they are written."""

Encoded = list[tuple[str, np.ndarray, np.ndarray | None]]
"""Split, token ids and loss mask of each document; None puts every token in the loss."""
Encode = Callable[[list[dict[str, Any]]], Encoded]


class UnansweredError(InputError):
    """A conversation has no answer yet, so there is nothing to learn from it."""


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
    check_split(split)
    if corpus.source == "mixture":
        return _mixture(
            corpus, split, seed, lambda one: tokenised(one, split, tokenizer, seed, bar=bar)
        )
    return _documents(_cached(corpus, tokenizer, seed, bar), corpus, split)


def _cached(corpus: Data, tokenizer: PreTrainedTokenizerBase, seed: int, bar: Any) -> Path:
    """Return the file of a source's documents, and write it if it does not exist."""
    if tokenizer.eos_token_id is None:
        raise InputError(
            "packing needs a tokenizer with an end-of-text token, this one lacks it; set its "
            "eos_token"
        )
    known = identity(corpus, seed)
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
            _write(folder, corpus, seed, _encode(corpus, tokenizer, is_fast=True), bar)
        except DisagreementError as error:
            warnings.warn(
                f"fastokens does not read as the tokenizer does ({error}): the tokenizer reads "
                "this corpus alone, which takes longer",
                stacklevel=2,
            )
            _write(folder, corpus, seed, _encode(corpus, tokenizer, is_fast=False), bar)
    return folder / FILE


def _write(folder: Path, corpus: Data, seed: int, encode: Encode, bar: Any) -> None:
    # slow to import, and not needed once a corpus is tokenised
    import datasets

    text = datasets.Value("string")
    features = datasets.Features({"split": text, "where": text, "row": text})
    task = None if bar is None else bar.add_task("tokenising", total=1, numbers="MB")
    done = total = 0

    def tokens(batch: pa.Table) -> pa.Table:
        nonlocal done
        found = encode(batch.to_pylist())
        done += batch.nbytes
        if bar is not None:
            bar.update(task, completed=done // 10**6, total=max(total, done) // 10**6 + 1)
        columns = {
            "split": pa.array([SPLITS.index(split) for split, _, _ in found], pa.int8()),
            "tokens": _lists([tokens for _, tokens, _ in found]),
        }
        if masks := [mask for _, _, mask in found if mask is not None]:
            columns["loss_mask"] = _lists(masks)
        return pa.table(columns)

    with atomic_folder(folder) as scratch, _quiet_datasets():
        rows = datasets.Dataset.from_generator(
            lambda: _rows(corpus, seed),
            features=features,
            cache_dir=str(scratch / "rows"),
            # hashing the generator would take long and give another value in each process
            fingerprint=folder.name,
            writer_batch_size=WRITTEN_ROWS,
        )
        total = rows.data.nbytes
        rows.with_format("arrow").map(
            tokens,
            batched=True,
            batch_size=max(1, min(BATCH_ROWS, len(rows) * BATCH_BYTES // total)),
            remove_columns=rows.column_names,
            new_fingerprint=folder.name,
            cache_file_name=str(scratch / FILE),
        )
        shutil.rmtree(scratch / "rows")


def _rows(corpus: Data, seed: int) -> Iterator[dict[str, str]]:
    is_empty = True
    for split, where, row in read_all(corpus, seed):
        is_empty = False
        if "text" in row:
            text = row["text"]
        elif first_answer(row["messages"]) == len(row["messages"]):
            raise UnansweredError(
                f"a corpus phase learns answers, and {where} has no answer; have the base answer "
                "it: a phase with text=distilled, or specheads distill"
            )
        else:
            # JSON keeps objects as they are: Arrow would add null for keys that other rows have
            text = json.dumps(row, ensure_ascii=False, default=str)
        yield {"split": split, "where": where, "row": text}
    if is_empty:
        raise EmptySplitError(
            f"a corpus needs at least one document, {corpus.source} {corpus.path} is empty; give "
            "some"
        )


@contextmanager
def _quiet_datasets() -> Iterator[None]:
    """Hide the progress bars of `datasets`, and raise our own errors as they are."""
    import datasets
    from datasets.exceptions import DatasetGenerationError

    shows_bars = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    except DatasetGenerationError as error:
        cause = error.__cause__ or error
        # otherwise the two would be each other's cause
        error.__cause__ = error.__context__ = None
        raise cause from cause.__cause__
    finally:
        if shows_bars:
            datasets.enable_progress_bars()


def _encode(corpus: Data, tokenizer: PreTrainedTokenizerBase, *, is_fast: bool) -> Encode:
    if corpus.source in CONVERSATIONS:
        return _encode_conversations(tokenizer)
    encode, end = None, np.int32(cast(int, tokenizer.eos_token_id))

    def texts(rows: list[dict[str, Any]]) -> Encoded:
        nonlocal encode
        encode = encode or Encoder(tokenizer, is_fast=is_fast)
        found = encode([row["row"] for row in rows])
        # some tokenizers add the end token themselves
        ended = (ids if ids[-1:] == end else np.append(ids, end) for ids in found)
        return [(row["split"], ids, None) for row, ids in zip(rows, ended, strict=True)]

    return texts


def _encode_conversations(tokenizer: PreTrainedTokenizerBase) -> Encode:
    template: Template | None = None

    def conversations(rows: list[dict[str, Any]]) -> Encoded:
        nonlocal template
        talks = [json.loads(row["row"]) for row in rows]
        template = template or Template(tokenizer)
        return [
            (row["split"], np.array(one.tokens, np.int32), np.array(one.loss_mask, np.uint8))
            for row, talk in zip(rows, talks, strict=True)
            for one in template.samples(talk["messages"], talk.get("tools"), row["where"])
        ]

    return conversations


def _lists(parts: list[np.ndarray]) -> pa.ListArray:
    ends = np.cumsum([0, *map(len, parts)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(np.concatenate(parts)))


def _documents(file: Path, corpus: Data, split: str) -> Documents:
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
            f"a corpus needs at least one document in its {split} split, {corpus.source} "
            f"{corpus.path} has 0 of {len(splits)} there; give more documents"
        )
    return Documents(table, order)


def _mixture(corpus: Data, split: str, seed: int, part: Callable[[Data], Documents]) -> Documents:
    """Return documents of several sources, whose fractions of the tokens are their weights.

    The mixture has as many tokens as its sources together. The seed chooses documents of a source
    that has more than its fraction; those of a source with less repeat, each as often as the
    others, give or take one. `datasets.interleave_datasets` has fractions of rows, drawn at random.
    """
    parts: dict[str, Documents] = {}
    weights = {name: one.weight for name, one in corpus.sources.items() if one.weight}
    for name in weights:
        try:
            parts[name] = part(alone(corpus, name))
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

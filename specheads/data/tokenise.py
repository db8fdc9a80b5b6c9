"""Corpora as token ids: tokenised once, then memory-mapped. See docs/data.md."""

import hashlib
import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from specheads.config.data import DataSettings, SourceSettings
from specheads.core.errors import InputError
from specheads.core.files import atomic_folder, cache_folder, remove_incomplete, sole_writer
from specheads.data.chat import Template
from specheads.data.conversations import first_answer
from specheads.data.documents import TokenisedDocuments, numbers
from specheads.data.encode import encode_text, tokenizer_fingerprint
from specheads.data.files import BadRows, Row, located
from specheads.data.sources import SPLITS, identity, read_source
from specheads.data.traces import refuse_unknown_ids

FORMAT = 7
"""Increased when the same text would become other documents; older files are not found then."""
FILE = "documents.arrow"
"""All documents of a corpus, of every split."""
BATCH_ROWS = 200
"""Rows tokenised at a time."""

SCHEMA = pa.schema(
    {
        "split": pa.int8(),
        "tokens": pa.list_(pa.int32()),
        # null: every token is in the loss
        "loss_mask": pa.list_(pa.uint8()),
    }
)

Located = tuple[str, str, Row]
"""Split, location and row."""
Encoded = tuple[str, list[int], list[int] | None]
"""Split, token ids and loss mask."""


class UnansweredError(InputError):
    """The conversations of a corpus have no answers yet, so there is nothing to learn from."""


def tokenise_corpus(
    corpus: DataSettings,
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    seed: int = 0,
    *,
    bar: Any = None,
) -> TokenisedDocuments:
    """Return one split of a corpus as documents, and tokenise the corpus if it is not cached.

    In text every token is in the loss, and the end-of-text token ends each document. In
    conversations the assistant's tokens are in the loss, and traces have a mask of their own. One
    process tokenises all splits of a source at once, and others wait for it. The seed chooses the
    documents of a limited source or of a mixture.
    """
    weights = [getattr(source, "weight", 1.0) for source in corpus.active_sources]
    parts = [_documents(_cached(one, tokenizer, seed, bar), split) for one in corpus.active_sources]
    for source, documents in zip(corpus.active_sources, parts, strict=True):
        # a small source may have no held-out document
        if split == "train" and not len(documents):
            raise InputError(
                f"a corpus needs at least one document in its train split, and {source.source} "
                f"{source.path} has none there; give more documents"
            )
    return _mixture(parts, weights, seed)


def _cached(
    source: SourceSettings, tokenizer: PreTrainedTokenizerBase, seed: int, bar: Any
) -> Path:
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
        if not (folder / FILE).is_file():
            remove_incomplete(folder.parent, key)
            _write(folder, source, tokenizer, seed, bar)
    return folder / FILE


def _write(
    folder: Path, source: SourceSettings, tokenizer: PreTrainedTokenizerBase, seed: int, bar: Any
) -> None:
    """Write all documents of a source as an Arrow file, batch by batch."""
    bad, done, name = BadRows(), 0, source.path or source.source
    total = sum(size for _, size, _ in identity(source, seed)["files"])
    task = None if bar is None else bar.add_task("tokenising", total=1, numbers="MB")
    rows = read_source(source, seed, bad)
    # read rows first: report a source that cannot be read before anything is written
    batch = list(islice(rows, BATCH_ROWS))
    template = None
    if source.kind.rows == "conversations":
        talks = [row["messages"] for _, _, row in batch]
        if batch and all(first_answer(talk) == len(talk) for talk in talks):
            raise UnansweredError(
                f"a corpus phase learns answers, and {batch[0][1]} has no answer; have the base "
                "answer it: a phase with text=distilled, or specheads distill"
            )
        template = Template(tokenizer)
    with atomic_folder(folder) as scratch:
        with pa.ipc.new_file(str(scratch / FILE), SCHEMA) as stream:
            while batch:
                if template is None and source.kind.rows != "traces":
                    found = _texts(tokenizer, batch)
                else:
                    found = _labelled(tokenizer, template, bad, batch)
                if found:
                    splits, *columns = zip(*found, strict=True)
                    columns = [[SPLITS.index(split) for split in splits], *columns]
                    stream.write_batch(pa.record_batch(columns, schema=SCHEMA))
                elif source.bad_rows == "stop":
                    # a source whose every row is refused would take long
                    bad.report(name, "stop")
                if bar is not None:
                    done += sum(len(row.get("text") or str(row)) for _, _, row in batch)
                    bar.update(task, completed=done // 10**6, total=max(total, done) // 10**6 + 1)
                batch = list(islice(rows, BATCH_ROWS))
        bad.report(name, source.bad_rows)


def _texts(tokenizer: PreTrainedTokenizerBase, batch: list[Located]) -> list[Encoded]:
    """Return the documents of texts, each with the end token."""
    found = encode_text(tokenizer, [row["text"] for _, _, row in batch])
    end: Any = tokenizer.eos_token_id
    return [
        # some tokenizers add the end token themselves
        (split, ids if ids[-1:] == [end] else [*ids, end], None)
        for (split, _, _), ids in zip(batch, found, strict=True)
    ]


def _labelled(
    tokenizer: PreTrainedTokenizerBase,
    template: Template | None,
    bad: BadRows,
    batch: list[Located],
) -> list[Encoded]:
    """Return the documents of conversations, or of traces; bad rows are added to `bad`."""
    found = list[Encoded]()
    for split, where, row in batch:
        try:
            if template is None:
                with located(where):
                    refuse_unknown_ids(row["input_ids"], len(tokenizer))
                found.append((split, row["input_ids"], row["loss_mask"]))
            else:
                samples = template.samples(row["messages"], row["tools"], where)
                found += [(split, one.tokens, [*map(int, one.loss_mask)]) for one in samples]
        except InputError as error:
            bad.add(error)
    return found


def _documents(file: Path, split: str) -> TokenisedDocuments:
    """Memory-map the documents of one split."""
    try:
        with pa.memory_map(str(file)) as stored:
            table = pa.ipc.open_file(stored).read_all()
        splits = numbers(table.column("split").combine_chunks())
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise InputError(
            f"tokenised text must be as it was written, and {file} is damaged; remove "
            f"{file.parent} to have it written again"
        ) from error
    return TokenisedDocuments(table, np.flatnonzero(splits == SPLITS.index(split)))


def _mixture(
    parts: list[TokenisedDocuments], weights: list[float], seed: int
) -> TokenisedDocuments:
    """Return documents of several sources, whose fractions of the tokens are their weights.

    The mixture has as many tokens as its sources together. The seed chooses documents of a source
    that has more than its fraction; those of a source with less repeat, each as often as the
    others, give or take one. `datasets.interleave_datasets` has fractions of rows, drawn at random.
    """
    some = [pair for pair in zip(parts, weights, strict=True) if len(pair[0])]
    if not some:
        return parts[0]
    total, whole = sum(int(one.lengths.sum()) for one, _ in some), sum(weight for _, weight in some)
    first, chosen = 0, []
    for number, (one, weight) in enumerate(some):
        rng = np.random.default_rng((seed, number))
        chosen.append(first + _chosen(one.lengths, total * weight / whole, rng))
        first += len(one)
    return TokenisedDocuments.joined([one for one, _ in some], np.concatenate(chosen))


def _chosen(lengths: np.ndarray, tokens: float, rng: np.random.Generator) -> np.ndarray:
    """Return document numbers with about `tokens` tokens, each number as often as the others."""
    rounds, rest = divmod(tokens, lengths.sum())
    order = rng.permutation(len(lengths))
    # take the last document if at least half of it is needed
    middles = np.cumsum(lengths[order]) - lengths[order] / 2
    some = order[: np.searchsorted(middles, rest)]
    return np.concatenate([np.tile(np.arange(len(lengths)), int(rounds)), some])

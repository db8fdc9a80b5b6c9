"""Corpora as token ids: tokenised once, then memory-mapped documents. See docs/data.md."""

import hashlib
import json
import random
import zlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from specheads.config.data import DataSettings, SourceSettings
from specheads.core.errors import InputError
from specheads.core.files import cache_folder, write_once
from specheads.data.bad_rows import BadRows, locate_errors
from specheads.data.chat import Template
from specheads.data.conversations import first_answer
from specheads.data.encode import Tokenizer, affix_ids, encode_text, tokenizer_fingerprint
from specheads.data.files import Row
from specheads.data.sources import SPLITS, open_source, read_source
from specheads.data.traces import refuse_unknown_ids


class TokenisedDocuments:
    """Tokenised documents, in memory or memory-mapped, by number and in any order.

    `datasets.Dataset` needs 160 us for a document and this class 2 us; a batch has hundreds.

    Args:
        table: `tokens` (int32) and maybe `loss_mask` (uint8) of each row. Without a loss mask, or
            with null, every token is in the loss.
        order: Row of each document; None takes all rows.
    """

    def __init__(self, table: pa.Table, order: np.ndarray | None = None) -> None:
        self._table, self._tokens = table, table["tokens"]
        self._masks = table["loss_mask"] if "loss_mask" in table.column_names else None
        self._order = np.arange(table.num_rows) if order is None else order

    @classmethod
    def concatenate(
        cls, sources: "Sequence[TokenisedDocuments]", chosen: np.ndarray
    ) -> "TokenisedDocuments":
        """Return chosen documents of several sources without a copy; the numbers go through all."""
        first_rows = np.cumsum([0, *(source._table.num_rows for source in sources)])
        pairs = zip(sources, first_rows, strict=False)
        orders = [source._order + first_row for source, first_row in pairs]
        table = pa.concat_tables([source._table for source in sources])
        return cls(table, np.concatenate(orders)[chosen])

    def without_loss_mask(self) -> "TokenisedDocuments":
        """Return the same documents without a loss mask: every token is in the loss."""
        return TokenisedDocuments(self._table.select(["tokens"]), self._order)

    def __len__(self) -> int:
        return len(self._order)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each document."""
        lengths: Any = pc.call_function("list_value_length", [self._tokens])
        return to_numpy(lengths.combine_chunks())[self._order]

    def tokens(self, number: int) -> np.ndarray:
        """Return the token ids of a document: (time,) int32, read-only."""
        return to_numpy(self._tokens[int(self._order[number])].values)

    def loss_mask(self, number: int) -> np.ndarray:
        """Return which tokens of a document are in the loss: (time,) bool."""
        mask = None if self._masks is None else self._masks[int(self._order[number])]
        if mask is None or not mask.is_valid:
            return np.ones(self.lengths[number], np.bool_)
        return to_numpy(mask.values).astype(np.bool_)

    def identity(self) -> str:
        """Return the number of documents and tokens, and a sum of the corpus that they are from."""
        # of all splits: a row that is added to another split is a change too
        checksum = zlib.crc32(self._order.astype(np.int64).tobytes())
        chunks = chain(self._tokens.chunks, self._masks.chunks if self._masks else ())
        for buffer in chain.from_iterable(chunk.buffers() for chunk in chunks):
            checksum = zlib.crc32(b"" if buffer is None else buffer, checksum)
        return f"{len(self):,} documents, {int(self.lengths.sum()):,} tokens, sum {checksum:08x}"


def to_numpy(array: Any) -> np.ndarray:
    """Return an Arrow array without nulls, read-only. Its own method loads pandas, 40 MB."""
    return np.from_dlpack(array)


def cut_windows(
    documents: TokenisedDocuments, tokenizer: Tokenizer, prompt_tokens: int, seed: int = 0
) -> Iterator[tuple[int, list[int]]]:
    """Cut windows that do not overlap: first one of every document, then a second of every one, ...

    Yields (document, window). A window has `prompt_tokens` tokens, with the tokens that the
    tokenizer puts before every text. The seed orders the documents and the windows of each.
    """
    opening, closing = affix_ids(tokenizer)
    room = prompt_tokens - len(opening)
    if room < 1:
        raise InputError(f"prompt_tokens must be at least {len(opening) + 1}, got {prompt_tokens}")
    later_windows: list[list[tuple[int, list[int]]]] = []
    end: Any = tokenizer.eos_token_id
    order = np.random.default_rng(seed).permutation(len(documents))
    for rank, number in enumerate(order.tolist()):
        ids = documents.tokens(number).tolist()
        if ids[: len(opening)] == opening:
            ids = ids[len(opening) :]
        if ids[-1:] == [end]:
            ids.pop()
        if closing and ids[-len(closing) :] == closing:
            ids = ids[: -len(closing)]
        starts = list(range(0, len(ids) - room + 1, room))
        random.Random(f"{seed} {rank}").shuffle(starts)
        # yield the first round at once: a caller that wants few windows reads few documents
        windows = [(number, opening + ids[start : start + room]) for start in starts]
        yield from windows[:1]
        later_windows.append(windows[1:])
    rounds = chain.from_iterable(zip_longest(*later_windows))
    yield from (window for window in rounds if window is not None)


FORMAT = 8
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

LocatedRow = tuple[str, str, Row]
"""Split, location and document."""
EncodedDocument = tuple[str, list[int], list[int] | None]
"""Split, token ids and loss mask."""


class UnansweredError(InputError):
    """The conversations of a corpus have no answers yet, so there is nothing to learn from."""


def tokenise_corpus(
    corpus: DataSettings, split: str, tokenizer: Tokenizer, seed: int = 0, *, bar: Any = None
) -> TokenisedDocuments:
    """Return one split of a corpus as documents, and tokenise the corpus if it is not cached.

    In text every token is in the loss, and the end-of-text token ends each document. In
    conversations the assistant's tokens are in the loss, and traces have a mask of their own. One
    process tokenises all splits of a source at once, and others wait for it. The seed chooses the
    documents of a limited source or of a mixture.
    """
    sources = corpus.active_sources
    weights = [getattr(source, "weight", 1.0) for source in sources]
    documents = [
        _map_documents(_cached_file(source, tokenizer, seed, bar), split) for source in sources
    ]
    for source, source_documents in zip(sources, documents, strict=True):
        # a small source may have no held-out document
        if split == "train" and not len(source_documents):
            raise InputError(
                f"a corpus needs at least one document in its train split, and {source.source} "
                f"{source.path} has none there; give more documents"
            )
    return _mix(documents, weights, seed)


def _cached_file(source: SourceSettings, tokenizer: Tokenizer, seed: int, bar: Any) -> Path:
    """Return the file of a source's documents, and write it if it does not exist."""
    if tokenizer.eos_token_id is None:
        raise InputError(
            "packing needs a tokenizer with an end-of-text token, this one lacks it; set its "
            "eos_token"
        )
    identity = open_source(source).identity(seed)
    identity |= {"format": FORMAT, "tokenizer": tokenizer_fingerprint(tokenizer)}
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]
    folder = cache_folder() / "tokens" / key
    num_bytes = sum(size for _, size, _ in identity["files"])
    write_once(
        folder, lambda scratch: _write_documents(scratch, source, tokenizer, seed, bar, num_bytes)
    )
    return folder / FILE


def _write_documents(
    scratch: Path, source: SourceSettings, tokenizer: Tokenizer, seed: int, bar: Any, num_bytes: int
) -> None:
    """Write all documents of a source as an Arrow file, batch by batch."""
    bad, num_characters, name = BadRows(), 0, source.path or source.source
    task = None if bar is None else bar.add_task("tokenising", total=1, numbers="MB")
    rows = read_source(source, seed, bad)
    # read rows first: report a source that cannot be read before anything is written
    batch = list(islice(rows, BATCH_ROWS))
    template = None
    if source.kind.rows == "conversations":
        conversations = [row["messages"] for _, _, row in batch]
        if batch and all(first_answer(messages) == len(messages) for messages in conversations):
            raise UnansweredError(
                f"a corpus phase learns answers, and {batch[0][1]} has no answer; have the base "
                "answer it: a phase with text=distilled, or specheads distill"
            )
        template = Template(tokenizer)
    with pa.ipc.new_file(str(scratch / FILE), SCHEMA) as stream:
        while batch:
            if source.kind.rows == "text":
                documents = _encode_texts(tokenizer, batch)
            else:
                documents = _encode_labelled(tokenizer, template, bad, batch)
            if documents:
                splits, *columns = zip(*documents, strict=True)
                columns = [[SPLITS.index(split) for split in splits], *columns]
                stream.write_batch(pa.record_batch(columns, schema=SCHEMA))
            elif source.bad_rows == "stop":
                # a source whose every row is refused would take long
                bad.report(name, "stop")
            if bar is not None:
                num_characters += sum(len(row.get("text") or str(row)) for _, _, row in batch)
                total = max(num_bytes, num_characters) // 10**6 + 1
                bar.update(task, completed=num_characters // 10**6, total=total)
            batch = list(islice(rows, BATCH_ROWS))
    bad.report(name, source.bad_rows)


def _encode_texts(tokenizer: Tokenizer, batch: list[LocatedRow]) -> list[EncodedDocument]:
    """Return the documents of texts, each with the end token."""
    batch_ids = encode_text(tokenizer, [row["text"] for _, _, row in batch])
    end: Any = tokenizer.eos_token_id
    return [
        # some tokenizers add the end token themselves
        (split, ids if ids[-1:] == [end] else [*ids, end], None)
        for (split, _, _), ids in zip(batch, batch_ids, strict=True)
    ]


def _encode_labelled(
    tokenizer: Tokenizer, template: Template | None, bad: BadRows, batch: list[LocatedRow]
) -> list[EncodedDocument]:
    """Return the documents of conversations, or of traces; bad rows are added to `bad`."""
    documents = list[EncodedDocument]()
    for split, location, row in batch:
        try:
            if template is None:
                with locate_errors(location):
                    refuse_unknown_ids(row["input_ids"], len(tokenizer))
                documents.append((split, row["input_ids"], row["loss_mask"]))
                continue
            for sample in template.samples(row["messages"], row["tools"], location):
                documents.append((split, sample.tokens, [*map(int, sample.loss_mask)]))
        except InputError as error:
            bad.add(error)
    return documents


def _map_documents(file: Path, split: str) -> TokenisedDocuments:
    """Memory-map the documents of one split."""
    try:
        with pa.memory_map(str(file)) as stored:
            table = pa.ipc.open_file(stored).read_all()
        splits = to_numpy(table.column("split").combine_chunks())
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise InputError(
            f"tokenised text must be as it was written, and {file} is damaged; remove "
            f"{file.parent} to have it written again"
        ) from error
    return TokenisedDocuments(table, np.flatnonzero(splits == SPLITS.index(split)))


def _mix(
    documents: list[TokenisedDocuments], weights: list[float], seed: int
) -> TokenisedDocuments:
    """Return documents of several sources, whose fractions of the tokens are their weights.

    The mixture has as many tokens as its sources together. The seed chooses documents of a source
    that has more than its fraction; those of a source with less repeat, each as often as the
    others, give or take one. `datasets.interleave_datasets` has fractions of rows, drawn at random.
    """
    pairs = [pair for pair in zip(documents, weights, strict=True) if len(pair[0])]
    if not pairs:
        return documents[0]
    num_tokens = sum(int(source.lengths.sum()) for source, _ in pairs)
    total_weight = sum(weight for _, weight in pairs)
    first, chosen = 0, []
    for index, (source, weight) in enumerate(pairs):
        rng = np.random.default_rng((seed, index))
        numbers = _draw_documents(source.lengths, num_tokens * weight / total_weight, rng)
        chosen.append(first + numbers)
        first += len(source)
    return TokenisedDocuments.concatenate([source for source, _ in pairs], np.concatenate(chosen))


def _draw_documents(lengths: np.ndarray, tokens: float, rng: np.random.Generator) -> np.ndarray:
    """Return document numbers with about `tokens` tokens, each number as often as the others."""
    rounds, remainder = divmod(tokens, lengths.sum())
    order = rng.permutation(len(lengths))
    # take the last document if at least half of it is needed
    middles = np.cumsum(lengths[order]) - lengths[order] / 2
    last_round = order[: np.searchsorted(middles, remainder)]
    return np.concatenate([np.tile(np.arange(len(lengths)), int(rounds)), last_round])

"""Tokenised documents with their loss mask, and windows cut from them."""

import random
import zlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain, zip_longest
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from specheads.core.errors import InputError
from specheads.data.encode import Tokenizer, affix_ids


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

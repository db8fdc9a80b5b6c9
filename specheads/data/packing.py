"""Training batches from documents: rows by sample number, for any number of processes.

See docs/data.md.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from specheads.core.errors import InputError
from specheads.data.documents import TokenisedDocuments


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Rows of text to train on."""

    tokens: Int[Tensor, "batch time"]
    loss_mask: Bool[Tensor, "batch time"]
    """Whether the token at this position is a label in the loss."""
    document_ids: Int[Tensor, "batch time"] | None = None
    """Number of each token's document within its row; padding has a number of its own. None: each
    row is one document, maybe with padding after it."""
    first_sample: int = 0
    """Sample number of the first row; the other rows follow."""

    @property
    def samples(self) -> range:
        """Sample numbers of the rows."""
        return range(self.first_sample, self.first_sample + len(self.tokens))

    def to(self, device: torch.device) -> "TokenBatch":
        """Copy the batch to a device; from pinned memory the copy is asynchronous."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> "TokenBatch":
        """Copy the batch to pinned memory."""
        return self._each(Tensor.pin_memory)

    def split(self, count: int) -> "Iterator[TokenBatch]":
        """Yield the rows in nearly equal parts."""
        for number in range(count):
            rows = slice_evenly(range(len(self.tokens)), number, count)
            part = self._each(itemgetter(slice(rows.start, rows.stop)))
            yield replace(part, first_sample=self.first_sample + rows.start)

    def _each(self, change: Any) -> "TokenBatch":
        ids = None if self.document_ids is None else change(self.document_ids)
        return replace(
            self, tokens=change(self.tokens), loss_mask=change(self.loss_mask), document_ids=ids
        )


def slice_evenly(rows: range, number: int, count: int) -> range:
    """Return the `number`-th of `count` nearly equal runs of rows."""
    return rows[len(rows) * number // count : len(rows) * (number + 1) // count]


@runtime_checkable
class BatchStream(Protocol):
    """A source of batches: packed corpus text or generated text."""

    def batches(
        self, cursor: dict[str, Any] | None = None
    ) -> Iterator[tuple[TokenBatch, dict[str, Any]]]:
        """Yield batches without end, each with the cursor that continues after it.

        The cursor is the same on all processes and is JSON.
        """
        ...


class PackedText:
    """An endless stream of batches from documents, with a new order in each epoch.

    Sample n is in epoch n // rows_per_epoch, and seed and epoch decide its row. A batch has the
    same rows for any number of processes, and each process reads its share. The cursor is the
    number of samples before the next batch.

    `sequence_length` is in tokens, and 0 takes the longest document's length. `batch_size` is over
    all processes. docs/data.md describes the values of `packing`. A later piece of a document that
    begins with `opening` begins with it too, in place of its own first tokens.
    """

    def __init__(
        self,
        documents: TokenisedDocuments,
        *,
        sequence_length: int,
        batch_size: int,
        packing: str = "best_fit",
        padding_id: int = 0,
        opening: Sequence[int] = (),
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._documents, self._packing, self._padding_id = documents, packing, padding_id
        self._opening = np.array(opening, np.int64)
        self.length = sequence_length or int(documents.lengths.max(initial=1))
        self._batch_size, self._seed = batch_size, seed
        self._rank, self._world_size = rank, world_size
        self._epoch, self._rows = -1, self._layout(0)
        self.rows_per_epoch = len(self._rows)
        if self.rows_per_epoch < batch_size:
            raise InputError(
                f"a batch of {batch_size} x {self.length} tokens needs as many rows, and "
                f"{len(documents)} documents of {documents.lengths.sum()} tokens fill "
                f"{self.rows_per_epoch}; give more text, or lower the batch size or the sequence "
                "length"
            )
        rows = range(self.rows_per_epoch)
        if not any(self.batch(range(row, row + 1)).loss_mask.any() for row in rows):
            raise InputError(
                f"training needs tokens in the loss, and {self.rows_per_epoch} rows of "
                f"{self.length} tokens have none: every answer is cut off; raise the sequence "
                "length, or give shorter questions"
            )

    @property
    def summary(self) -> str:
        """Sizes, padding, cut documents and tokens left out, for people."""
        rows, lengths = self._rows, self._documents.lengths
        packed, total = int(rows.lengths.sum()), int(lengths.sum())
        whole = np.count_nonzero(rows.lengths == lengths[rows.documents])
        padding = 1 - packed / (len(rows) * self.length)
        cut = 1 - whole / np.count_nonzero(lengths)
        return (
            f"{len(lengths):,} documents in {len(rows):,} rows of {self.length:,} tokens, "
            f"{padding:.1%} padding, {cut:.1%} of documents cut, {1 - packed / total:.1%} of "
            "tokens left out"
        )

    def batches(
        self, cursor: dict[str, Any] | None = None
    ) -> Iterator[tuple[TokenBatch, dict[str, Any]]]:
        """Yield batches without end, each with the cursor that continues after it."""
        sample = 0 if cursor is None else cursor["sample"]
        while True:
            rows = range(sample, sample + self._batch_size)
            sample = rows.stop
            yield self.batch(slice_evenly(rows, self._rank, self._world_size)), {"sample": sample}

    def batch(self, samples: range) -> TokenBatch:
        """Return the rows of consecutive sample numbers."""
        shape = len(samples), self.length
        tokens = np.full(shape, self._padding_id, np.int64)
        loss_mask, numbers = np.zeros(shape, np.bool_), np.zeros(shape, np.int64)
        most = 1
        for row, sample in enumerate(samples):
            end = number = 0
            for number, (document, start, stop) in enumerate(self._pieces(sample)):
                begin, end = end, end + stop - start
                tokens[row, begin:end] = self._documents.tokens(document)[start:stop]
                loss_mask[row, begin:end] = self._documents.loss_mask(document)[start:stop]
                numbers[row, begin:end] = number
                if start and len(self._opening):
                    self._open(document, tokens[row, begin:end], loss_mask[row, begin:end])
            numbers[row, end:] = number + 1
            most = max(most, number + 1)
        alone = self._packing != "best_fit" or most == 1
        document_ids = None if alone else torch.from_numpy(numbers)
        rows = torch.from_numpy(tokens), torch.from_numpy(loss_mask)
        return TokenBatch(*rows, document_ids, samples.start)

    def _open(self, document: int, tokens: np.ndarray, loss_mask: np.ndarray) -> None:
        """Begin a later piece of a document as the document begins; no label is there."""
        size = len(self._opening)
        if len(tokens) > size and (self._documents.tokens(document)[:size] == self._opening).all():
            tokens[:size], loss_mask[:size] = self._opening, False

    def _pieces(self, sample: int) -> Iterator[tuple[int, int, int]]:
        epoch, place = divmod(sample, self.rows_per_epoch)
        if epoch != self._epoch:
            if self._packing == "stream":
                self._rows = self._layout(epoch)
            self._epoch, self._order = epoch, self._shuffled(epoch, 0, self.rows_per_epoch)
        return self._rows.pieces(int(self._order[place]))

    def _layout(self, epoch: int) -> "Layout":
        lengths = self._documents.lengths
        if self._packing == "stream":
            return end_to_end(lengths, self.length, self._shuffled(epoch, 1, len(lengths)))
        return (best_fit if self._packing == "best_fit" else one_a_row)(lengths, self.length)

    def _shuffled(self, epoch: int, purpose: int, count: int) -> np.ndarray:
        return np.random.default_rng((self._seed, epoch, purpose)).permutation(count)


# layouts: which documents make up a row


@dataclass(frozen=True, slots=True)
class Layout:
    """Rows of equal length, made of pieces of documents; row r has pieces ends[r] : ends[r + 1]."""

    documents: np.ndarray
    """Document number of each piece."""
    starts: np.ndarray
    """First token of each piece in its document."""
    lengths: np.ndarray
    """Tokens of each piece."""
    ends: np.ndarray
    """First piece of each row, and the number of pieces at the end."""

    def __len__(self) -> int:
        return len(self.ends) - 1

    def pieces(self, row: int) -> Iterator[tuple[int, int, int]]:
        """Yield (document, start, stop) of each piece of a row."""
        for at in range(self.ends[row], self.ends[row + 1]):
            start = int(self.starts[at])
            yield int(self.documents[at]), start, start + int(self.lengths[at])


def one_a_row(lengths: np.ndarray, length: int) -> Layout:
    """Give each document its own row; drop tokens after the row's end."""
    (documents,) = np.nonzero(lengths)
    kept = np.minimum(lengths[documents], length)
    return Layout(documents, np.zeros_like(kept), kept, np.arange(len(documents) + 1))


def end_to_end(lengths: np.ndarray, length: int, order: np.ndarray) -> Layout:
    """Concatenate documents in an order and cut rows; drop the last row if it is not full."""
    bounds = np.concatenate([[0], np.cumsum(lengths[order], dtype=np.int64)])
    num_rows = int(bounds[-1]) // length
    cuts = np.arange(num_rows + 1, dtype=np.int64) * length
    edges = np.union1d(bounds[bounds <= cuts[-1]], cuts)
    starts, sizes = edges[:-1], np.diff(edges)
    # side="right": an empty document begins where the next one does
    at = np.searchsorted(bounds, starts, side="right") - 1
    return Layout(order[at], starts - bounds[at], sizes, np.searchsorted(starts, cuts))


def best_fit(lengths: np.ndarray, length: int) -> Layout:
    """Put each document into the fullest row that has room, longest documents first.

    Documents longer than a row fill whole rows first, and their rest is packed. Documents of equal
    length are placed together, so a million documents take about a second.

    Source: Ding et al. 2024, arXiv:2404.10830.
    """
    full, rest = np.divmod(lengths.astype(np.int64), length)
    num_full = int(full.sum())
    cut = np.repeat(np.arange(len(lengths)), full)
    nth = np.arange(num_full) - np.repeat(np.cumsum(full) - full, full)
    (short,) = np.nonzero(rest)
    short = short[np.argsort(-rest[short], kind="stable")]
    row = num_full + _fit(rest[short], length)
    rows = np.concatenate([np.arange(num_full), row])
    by_row = np.argsort(rows, kind="stable")
    counts = np.bincount(rows, minlength=int(rows.max(initial=-1)) + 1)
    return Layout(
        np.concatenate([cut, short])[by_row],
        np.concatenate([nth * length, full[short] * length])[by_row],
        np.concatenate([np.full(num_full, length), rest[short]])[by_row],
        np.concatenate([[0], np.cumsum(counts)]),
    )


def _fit(lengths: np.ndarray, length: int) -> np.ndarray:
    """Return the row of each piece; lengths are in descending order, from 1 to `length`."""
    found = np.empty(len(lengths), np.int64)
    rooms: list[int] = []
    """The distinct amounts of room left in rows, ascending."""
    by_room: defaultdict[int, list[np.ndarray]] = defaultdict(list)

    def keep(room: int, rows: np.ndarray) -> None:
        if room and len(rows):
            if not by_room[room]:
                insort(rooms, room)
            by_room[room].append(rows)

    num_rows = at = 0
    sizes, counts = np.unique(lengths, return_counts=True)
    for size, left in zip(sizes[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while left:
            place = bisect_left(rooms, size)
            if place < len(rooms):
                room = rooms[place]
                rows = by_room[room].pop()
                if not by_room[room]:
                    rooms.pop(place)
            else:
                room = length
                rows = np.arange(num_rows, num_rows + -(-left // (room // size)))
                num_rows += len(rows)
            # a row that takes one piece becomes the fullest, so it takes as many as fit
            each = room // size
            whole = min(len(rows), left // each)
            some = left % each if whole < len(rows) else 0
            for taken, times in ((rows[:whole], each), (rows[whole : whole + 1], some)):
                placed = len(taken) * times
                found[at : at + placed] = np.repeat(taken, times)
                at, left = at + placed, left - placed
                if times:
                    keep(room - times * size, taken)
            keep(room, rows[whole + (some > 0) :])
    return found

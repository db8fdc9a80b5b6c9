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
from specheads.data.tokenise import TokenisedDocuments


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
        return self._map_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> "TokenBatch":
        """Copy the batch to pinned memory."""
        return self._map_tensors(Tensor.pin_memory)

    def split(self, count: int) -> "Iterator[TokenBatch]":
        """Yield the rows in `count` nearly equal batches."""
        for index in range(count):
            rows = slice_evenly(range(len(self.tokens)), index, count)
            batch = self._map_tensors(itemgetter(slice(rows.start, rows.stop)))
            yield replace(batch, first_sample=self.first_sample + rows.start)

    def _map_tensors(self, change: Any) -> "TokenBatch":
        ids = None if self.document_ids is None else change(self.document_ids)
        return replace(
            self, tokens=change(self.tokens), loss_mask=change(self.loss_mask), document_ids=ids
        )


def slice_evenly(rows: range, index: int, count: int) -> range:
    """Return the `index`-th of `count` nearly equal runs of rows."""
    return rows[len(rows) * index // count : len(rows) * (index + 1) // count]


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
        self._epoch, self._rows = -1, self._pack(0)
        self.rows_per_epoch = len(self._rows)
        if self.rows_per_epoch < batch_size:
            raise InputError(
                f"a batch of {batch_size} x {self.length} tokens needs as many rows, and "
                f"{len(documents)} documents of {documents.lengths.sum()} tokens fill "
                f"{self.rows_per_epoch}; give more text, or lower the batch size or the sequence "
                "length"
            )
        # a later piece of a document has lost the question, with any packing
        masks = (documents.loss_mask(number) for number in range(len(documents)))
        if not any(mask[: self.length].any() for mask in masks):
            raise InputError(
                f"training needs tokens in the loss, and none of {len(documents)} documents has "
                f"one in its first {self.length} tokens, the length of a row: every answer is cut "
                "off; raise sequence_length, or give shorter questions"
            )

    @property
    def summary(self) -> str:
        """Sizes, padding, cut documents and tokens left out, for people."""
        rows, lengths = self._rows, self._documents.lengths
        packed, total = int(rows.lengths.sum()), int(lengths.sum())
        num_uncut = np.count_nonzero(rows.lengths == lengths[rows.documents])
        padding = 1 - packed / (len(rows) * self.length)
        cut = 1 - num_uncut / np.count_nonzero(lengths)
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
        num_documents = 1
        for row, sample in enumerate(samples):
            end = number = 0
            for number, (document, start, stop) in enumerate(self._pieces(sample)):
                begin, end = end, end + stop - start
                tokens[row, begin:end] = self._documents.tokens(document)[start:stop]
                loss_mask[row, begin:end] = self._documents.loss_mask(document)[start:stop]
                numbers[row, begin:end] = number
                if start and len(self._opening):
                    self._write_opening(document, tokens[row, begin:end], loss_mask[row, begin:end])
            numbers[row, end:] = number + 1
            num_documents = max(num_documents, number + 1)
        is_single = self._packing != "best_fit" or num_documents == 1
        document_ids = None if is_single else torch.from_numpy(numbers)
        rows = torch.from_numpy(tokens), torch.from_numpy(loss_mask)
        return TokenBatch(*rows, document_ids, samples.start)

    def _write_opening(self, document: int, tokens: np.ndarray, loss_mask: np.ndarray) -> None:
        """Begin a later piece of a document as the document begins; no label is there."""
        size = len(self._opening)
        if len(tokens) > size and (self._documents.tokens(document)[:size] == self._opening).all():
            tokens[:size], loss_mask[:size] = self._opening, False

    def _pieces(self, sample: int) -> Iterator[tuple[int, int, int]]:
        epoch, index = divmod(sample, self.rows_per_epoch)
        if epoch != self._epoch:
            if self._packing == "stream":
                self._rows = self._pack(epoch)
            self._epoch, self._order = epoch, self._shuffled(epoch, 0, self.rows_per_epoch)
        return self._rows.pieces(int(self._order[index]))

    def _pack(self, epoch: int) -> "PackedRows":
        lengths = self._documents.lengths
        if self._packing == "stream":
            return pack_end_to_end(lengths, self.length, self._shuffled(epoch, 1, len(lengths)))
        return (pack_best_fit if self._packing == "best_fit" else pad_each)(lengths, self.length)

    def _shuffled(self, epoch: int, purpose: int, count: int) -> np.ndarray:
        return np.random.default_rng((self._seed, epoch, purpose)).permutation(count)


# layouts: which documents make up a row


@dataclass(frozen=True, slots=True)
class PackedRows:
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
        for piece in range(self.ends[row], self.ends[row + 1]):
            start = int(self.starts[piece])
            yield int(self.documents[piece]), start, start + int(self.lengths[piece])


def pad_each(lengths: np.ndarray, length: int) -> PackedRows:
    """Give each document its own row; drop tokens after the row's end."""
    (documents,) = np.nonzero(lengths)
    row_lengths = np.minimum(lengths[documents], length)
    starts = np.zeros_like(row_lengths)
    return PackedRows(documents, starts, row_lengths, np.arange(len(documents) + 1))


def pack_end_to_end(lengths: np.ndarray, length: int, order: np.ndarray) -> PackedRows:
    """Concatenate documents in an order and cut rows; drop the last row if it is not full."""
    bounds = np.concatenate([[0], np.cumsum(lengths[order], dtype=np.int64)])
    num_rows = int(bounds[-1]) // length
    cuts = np.arange(num_rows + 1, dtype=np.int64) * length
    edges = np.union1d(bounds[bounds <= cuts[-1]], cuts)
    starts, sizes = edges[:-1], np.diff(edges)
    # side="right": an empty document begins where the next one does
    index = np.searchsorted(bounds, starts, side="right") - 1
    return PackedRows(order[index], starts - bounds[index], sizes, np.searchsorted(starts, cuts))


def pack_best_fit(lengths: np.ndarray, length: int) -> PackedRows:
    """Put each document into the fullest row that has room, longest documents first.

    Documents longer than a row fill whole rows first, and their rest is packed. Documents of equal
    length are placed together, so a million documents take about a second.

    Source: Ding et al. 2024, arXiv:2404.10830.
    """
    num_full_rows, tails = np.divmod(lengths.astype(np.int64), length)
    num_full = int(num_full_rows.sum())
    cut = np.repeat(np.arange(len(lengths)), num_full_rows)
    first_full = np.repeat(np.cumsum(num_full_rows) - num_full_rows, num_full_rows)
    full_starts = (np.arange(num_full) - first_full) * length
    (short,) = np.nonzero(tails)
    short = short[np.argsort(-tails[short], kind="stable")]
    rows = np.concatenate([np.arange(num_full), num_full + _assign_rows(tails[short], length)])
    by_row = np.argsort(rows, kind="stable")
    counts = np.bincount(rows, minlength=int(rows.max(initial=-1)) + 1)
    return PackedRows(
        np.concatenate([cut, short])[by_row],
        np.concatenate([full_starts, num_full_rows[short] * length])[by_row],
        np.concatenate([np.full(num_full, length), tails[short]])[by_row],
        np.concatenate([[0], np.cumsum(counts)]),
    )


def _assign_rows(lengths: np.ndarray, length: int) -> np.ndarray:
    """Return the row of each piece; lengths are in descending order, from 1 to `length`."""
    row_of_piece = np.empty(len(lengths), np.int64)
    rooms: list[int] = []
    """The distinct amounts of room left in rows, ascending."""
    rows_by_room: defaultdict[int, list[np.ndarray]] = defaultdict(list)

    def add_rows(room: int, rows: np.ndarray) -> None:
        if room and len(rows):
            if not rows_by_room[room]:
                insort(rooms, room)
            rows_by_room[room].append(rows)

    num_rows = num_placed = 0
    sizes, counts = np.unique(lengths, return_counts=True)
    for size, num_left in zip(sizes[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while num_left:
            index = bisect_left(rooms, size)
            if index < len(rooms):
                room = rooms[index]
                rows = rows_by_room[room].pop()
                if not rows_by_room[room]:
                    rooms.pop(index)
            else:
                room = length
                rows = np.arange(num_rows, num_rows + -(-num_left // (room // size)))
                num_rows += len(rows)
            # a row that takes one piece becomes the fullest, so it takes as many as fit
            capacity = room // size
            num_filled = min(len(rows), num_left // capacity)
            remainder = num_left % capacity if num_filled < len(rows) else 0
            filled, next_row = rows[:num_filled], rows[num_filled : num_filled + 1]
            for target_rows, times in ((filled, capacity), (next_row, remainder)):
                stop = num_placed + len(target_rows) * times
                row_of_piece[num_placed:stop] = np.repeat(target_rows, times)
                num_placed, num_left = stop, num_left - (stop - num_placed)
                if times:
                    add_rows(room - times * size, target_rows)
            add_rows(room, rows[num_filled + (remainder > 0) :])
    return row_of_piece

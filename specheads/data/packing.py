"""Batches out of documents: rows by sample number, the same for any number of processes.

See docs/data.md.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, repeat
from operator import itemgetter
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from specheads.core.errors import InputError
from specheads.data.documents import Documents
from specheads.data.rows import PACKINGS, Rows, Waste, best_fit, end_to_end, one_a_row, waste


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Rows of text to train on. `loss_mask[b, t]`: token t is a label the loss counts."""

    tokens: Int[Tensor, "batch time"]
    loss_mask: Bool[Tensor, "batch time"]
    document_ids: Int[Tensor, "batch time"] | None = None
    """Which document of its row each token is of, padding being one of its own; None: each row is
    one text, and maybe padding behind it."""
    first_sample: int = 0
    """Number of the first row's sample in its text; those of the others follow."""

    @property
    def samples(self) -> range:
        """Numbers of the rows among the samples of the text."""
        return range(self.first_sample, self.first_sample + len(self.tokens))

    def to(self, device: torch.device) -> "TokenBatch":
        """Return the batch on a device; what is pinned is copied while others compute."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> "TokenBatch":
        """Return the batch in memory that a GPU can copy from by itself."""
        return self._each(Tensor.pin_memory)

    def parts(self, count: int) -> "Iterator[TokenBatch]":
        """Yield the rows in nearly equal parts."""
        for number in range(count):
            rows = share(range(len(self.tokens)), number, count)
            part = self._each(itemgetter(slice(rows.start, rows.stop)))
            yield replace(part, first_sample=self.first_sample + rows.start)

    def _each(self, change: Any) -> "TokenBatch":
        ids = None if self.document_ids is None else change(self.document_ids)
        return replace(
            self, tokens=change(self.tokens), loss_mask=change(self.loss_mask), document_ids=ids
        )


def share(rows: range, number: int, count: int) -> range:
    """Return the `number`-th of `count` nearly equal runs of rows."""
    return rows[len(rows) * number // count : len(rows) * (number + 1) // count]


@runtime_checkable
class Text(Protocol):
    """Where batches come from: corpus and self-distilled text alike."""

    def batches(
        self, cursor: dict[str, Any] | None = None
    ) -> Iterator[tuple[TokenBatch, dict[str, Any]]]:
        """Yield batches for ever, each with the cursor from which the next one follows.

        The cursor is the same on all processes, and fit for JSON.
        """
        ...


class PackedText:
    """An endless stream of batches from documents, each epoch in an order of its own.

    Rows are picked by sample number: sample n is a row of epoch n // rows an epoch, and its place
    there is drawn from seed and epoch. A batch is the same rows for any number of processes, of
    which this one takes its share; a cursor is the number of samples in the batches before it.

    Args:
        documents: Text, and which of it counts.
        sequence_length: Tokens of a row. Zero takes the longest document's.
        batch_size: Rows of a batch over all processes; several are those of the first batches, and
            the last one stays.
        packing: best_fit, stream or none: see docs/data.md.
        padding_id: Token that fills rows up; it is never in the loss mask.
        seed: Seed of the orders.
        rank: Number of this process.
        world_size: Number of processes.

    Raises:
        ValueError: The documents do not fill one batch.
    """

    def __init__(
        self,
        documents: Documents,
        *,
        sequence_length: int,
        batch_size: int | Sequence[int],
        packing: str = "best_fit",
        padding_id: int = 0,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if packing not in PACKINGS:
            raise InputError(f"packing must be one of {', '.join(PACKINGS)}, got {packing!r}")
        self._documents, self._packing, self._padding_id = documents, packing, padding_id
        self.length = sequence_length or int(documents.lengths.max(initial=1))
        self._sizes = [batch_size] if isinstance(batch_size, int) else [*batch_size]
        self._seed = seed
        self._rank, self._world_size = rank, world_size
        self._epoch, self._rows = -1, self._lay(0)
        self.rows_per_epoch = len(self._rows)
        self._refuse_too_short()

    @cached_property
    def waste(self) -> Waste:
        """What packing costs."""
        return waste(self._rows, self._documents.lengths, self.length)

    def batches(
        self, cursor: dict[str, Any] | None = None
    ) -> Iterator[tuple[TokenBatch, dict[str, Any]]]:
        """Yield batches for ever, each with the cursor from which the next one follows."""
        sample = 0 if cursor is None else _sample(cursor)
        # a cursor says how many of the first batches lie before it
        first = bisect_right([*accumulate(self._sizes[:-1])], sample)
        for size in chain(self._sizes[first:], repeat(self._sizes[-1])):
            rows = range(sample, sample + size)
            sample = rows.stop
            yield self.batch(share(rows, self._rank, self._world_size)), {"sample": sample}

    def batch(self, samples: range) -> TokenBatch:
        """Return the rows of these sample numbers, which follow one another."""
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
            numbers[row, end:] = number + 1
            most = max(most, number + 1)
        alone = self._packing != "best_fit" or most == 1
        documents = None if alone else torch.from_numpy(numbers)
        shown = torch.from_numpy(tokens), torch.from_numpy(loss_mask)
        return TokenBatch(*shown, documents, samples.start)

    def _pieces(self, sample: int) -> Iterator[tuple[int, int, int]]:
        epoch, place = divmod(sample, self.rows_per_epoch)
        if epoch != self._epoch:
            if self._packing == "stream":
                self._rows = self._lay(epoch)
            self._epoch, self._order = epoch, self._shuffled(epoch, 0, self.rows_per_epoch)
        return self._rows.pieces(int(self._order[place]))

    def _lay(self, epoch: int) -> Rows:
        lengths = self._documents.lengths
        if self._packing == "stream":
            return end_to_end(lengths, self.length, self._shuffled(epoch, 1, len(lengths)))
        return (best_fit if self._packing == "best_fit" else one_a_row)(lengths, self.length)

    def _shuffled(self, epoch: int, what: int, count: int) -> np.ndarray:
        return np.random.default_rng((self._seed, epoch, what)).permutation(count)

    def _refuse_too_short(self) -> None:
        if self.rows_per_epoch < (batch_size := self._sizes[-1]):
            raise InputError(
                f"a batch of {batch_size} x {self.length} tokens needs as many rows, and "
                f"{len(self._documents)} documents of {self._documents.lengths.sum()} tokens fill "
                f"{self.rows_per_epoch}; give more text, or lower the batch size or the sequence "
                "length"
            )


def _sample(cursor: dict[str, Any]) -> int:
    """Return how many samples were read; refuse the cursors of earlier versions."""
    if set(cursor) != {"sample"}:
        raise InputError(
            "a run goes on at a sample of its text, and this one stopped at a place of an earlier "
            f"version ({', '.join(sorted(cursor))}); finish it with that version, or train anew"
        )
    return cursor["sample"]

"""Batches out of documents: rows by sample number, so that any number of processes resume them.

See docs/packing.md.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
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
    """Rows of text to train on. `counted[b, t]`: token t is a label the loss counts."""

    tokens: Int[Tensor, "batch time"]
    counted: Bool[Tensor, "batch time"]
    documents: Int[Tensor, "batch time"] | None = None
    """Which document of its row each token is of, padding being one of its own; None: each row is
    one text, and maybe padding behind it."""

    def to(self, device: torch.device) -> "TokenBatch":
        """Return the batch on a device; what is pinned is copied while others compute."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> "TokenBatch":
        """Return the batch in memory that a GPU can copy from by itself."""
        return self._each(Tensor.pin_memory)

    def _each(self, change: Any) -> "TokenBatch":
        documents = None if self.documents is None else change(self.documents)
        return replace(
            self, tokens=change(self.tokens), counted=change(self.counted), documents=documents
        )


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
    there is drawn from seed and epoch. A cursor is the number of samples that all processes have
    read together, so any number of them goes on from it. Of each batch over all processes this one
    takes the rows of its rank.

    Args:
        documents: Text, and which of it counts.
        sequence_length: Tokens of a row. Zero takes the longest document's.
        batch_size: Rows of a batch on each process.
        packing: best_fit, stream or none: see docs/packing.md.
        padding_id: Token that fills rows up; it is never counted.
        seed: Seed of the orders.
        rank: Number of this process.
        world_size: Number of processes.

    Raises:
        ValueError: The documents do not fill one batch on every process.
    """

    def __init__(
        self,
        documents: Documents,
        *,
        sequence_length: int,
        batch_size: int,
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
        self._batch_size, self._seed = batch_size, seed
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
        while True:
            first = sample + self._rank * self._batch_size
            sample += self._batch_size * self._world_size
            yield self.batch(range(first, first + self._batch_size)), {"sample": sample}

    def batch(self, samples: range) -> TokenBatch:
        """Return the rows of these sample numbers."""
        shape = len(samples), self.length
        tokens = np.full(shape, self._padding_id, np.int64)
        counted, numbers = np.zeros(shape, np.bool_), np.zeros(shape, np.int64)
        most = 1
        for row, sample in enumerate(samples):
            end = number = 0
            for number, (document, start, stop) in enumerate(self._pieces(sample)):
                begin, end = end, end + stop - start
                tokens[row, begin:end] = self._documents.tokens(document)[start:stop]
                counted[row, begin:end] = self._documents.counted(document)[start:stop]
                numbers[row, begin:end] = number
            numbers[row, end:] = number + 1
            most = max(most, number + 1)
        alone = self._packing != "best_fit" or most == 1
        documents = None if alone else torch.from_numpy(numbers)
        return TokenBatch(torch.from_numpy(tokens), torch.from_numpy(counted), documents)

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
        # the verdict is over all documents, so that every process comes to the same one
        batch, world_size = self._batch_size, self._world_size
        if self.rows_per_epoch < batch * world_size:
            raise InputError(
                f"a batch of {batch} x {self.length} tokens on each of {world_size} processes "
                f"needs {batch * world_size} rows, and {len(self._documents)} documents of "
                f"{self._documents.lengths.sum()} tokens fill {self.rows_per_epoch}; give more "
                "text, or lower the batch size or the sequence length"
            )


def _sample(cursor: dict[str, Any]) -> int:
    """Return how many samples were read; refuse the cursors of earlier versions."""
    if set(cursor) != {"sample"}:
        raise InputError(
            "a run goes on at a sample of its text, and this one stopped at a place of an earlier "
            f"version ({', '.join(sorted(cursor))}); finish it with that version, or train anew"
        )
    return cursor["sample"]

"""Packing: documents end to end, cut into rows of equal length, resumable to the bit."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from specheads.core.errors import InputError
from specheads.data.documents import Documents

Place = dict[str, int]

GROUP = 8
"""Documents a lane tokenises at a time: enough to keep a fast tokenizer's threads busy."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Rows of text to train on. `counted[b, t]`: token t is a label the loss counts."""

    tokens: Int[Tensor, "batch time"]
    counted: Bool[Tensor, "batch time"]


@runtime_checkable
class Text(Protocol):
    """Where batches come from: corpus and self-distilled text alike."""

    def batches(
        self, cursor: dict[str, Any] | None = None
    ) -> Iterator[tuple[TokenBatch, dict[str, Any]]]:
        """Yield batches for ever, each with the cursor from which the next one follows."""
        ...


class PackedText:
    """An endless stream of batches from a corpus, of which every token counts.

    Documents are laid end to end and cut; several such lanes take turns, row by row. Every epoch
    has its own order, and nothing is dropped where one epoch meets the next.

    A process reads documents rank, rank + world_size, ... of each epoch, `batch_size` rows a batch.
    Its lanes keep a batch and its neighbours from all coming from one long document. A corpus too
    short for one batch on every process is refused.
    """

    def __init__(
        self,
        documents: Documents,
        *,
        sequence_length: int,
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        lanes: int = 16,
    ) -> None:
        self._documents = documents
        self._batch_size, self._length = batch_size, sequence_length
        # every lane needs a document to begin with
        self._num_lanes = max(1, min(lanes, len(documents) // world_size))
        self._seed, self._rank, self._world_size = seed, rank, world_size
        self._refuse_too_short()

    def batches(
        self, cursor: dict[str, Any] | None = None
    ) -> Iterator[tuple[TokenBatch, dict[str, Any]]]:
        """Yield batches for ever, each with the cursor from which the next one continues.

        A cursor is a few integers, fit for JSON: whose turn it is, and of each lane the epoch, the
        document in the lane's order of it, and the tokens of that document already used. It is
        meant for the same corpus, tokenizer, seed and number of processes.
        """
        start = {"epoch": 0, "document": 0, "offset": 0}
        turn: int = cursor["turn"] if cursor else 0
        places: list[Place] = list(cursor["lanes"]) if cursor else [start] * self._num_lanes
        lanes = [self._rows(lane, place) for lane, place in enumerate(places)]
        while True:
            rows = []
            for _ in range(self._batch_size):
                row, places[turn] = next(lanes[turn])
                rows.append(row)
                turn = (turn + 1) % self._num_lanes
            tokens = torch.tensor(rows)
            batch = TokenBatch(tokens, torch.ones_like(tokens, dtype=torch.bool))
            yield batch, {"turn": turn, "lanes": list(places)}

    def _rows(self, lane: int, place: Place) -> Iterator[tuple[list[int], Place]]:
        """Yield one lane's rows, each with the place after it."""
        stream = self._tokenised(lane, place["epoch"], place["document"])
        epoch, document, ids = next(stream)
        offset = place["offset"]
        while True:
            row: list[int] = []
            while len(row) < self._length:
                if offset >= len(ids):
                    (epoch, document, ids), offset = next(stream), 0
                piece = ids[offset : offset + self._length - len(row)]
                offset += len(piece)
                row += piece
            yield row, {"epoch": epoch, "document": document, "offset": offset}

    def _tokenised(
        self, lane: int, epoch: int, document: int
    ) -> Iterator[tuple[int, int, list[int]]]:
        """Yield (epoch, document, its tokens) from this document on, epoch after epoch."""
        first = self._rank * self._num_lanes + lane
        while True:
            order = np.random.default_rng((self._seed, epoch)).permutation(len(self._documents))
            mine = order[first :: self._world_size * self._num_lanes]
            for start in range(document, len(mine), GROUP):
                group = self._tokenise(mine[start : start + GROUP])
                for place, ids in enumerate(group, start=start):
                    yield epoch, place, ids
            epoch, document = epoch + 1, 0

    def _tokenise(self, rows: Any) -> list[list[int]]:
        return [self._documents.tokens(int(row)).tolist() for row in rows]

    def _refuse_too_short(self) -> None:
        # the verdict is over the whole corpus, so that every process comes to the same one
        batch, length = self._batch_size, self._length
        needed, found = batch * length * self._world_size, 0
        for start in range(0, len(self._documents), GROUP):
            rows = range(start, min(start + GROUP, len(self._documents)))
            found += sum(map(len, self._tokenise(rows)))
            if found >= needed:
                break
        if found < needed or len(self._documents) < self._world_size:
            raise InputError(
                f"a batch of {batch} x {length} tokens on each of {self._world_size} processes "
                f"needs {needed} tokens and a document for each process, the corpus has {found} "
                f"tokens in {len(self._documents)} documents; give more text, or lower the batch "
                "size or the sequence length"
            )

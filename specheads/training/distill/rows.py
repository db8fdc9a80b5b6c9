"""Batches of documents, one a row."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from specheads.core.errors import InputError
from specheads.data.documents import Documents
from specheads.data.packing import TokenBatch


class DocumentRows:
    """Batches of documents, epoch after epoch, in an order drawn from the seed.

    Processes read disjoint rows. `padding_id` fills short ones and is never counted; a
    `sequence_length` of zero keeps whole rows.
    """

    def __init__(
        self,
        documents: Documents,
        folder: Path,
        batch_size: int,
        padding_id: int,
        *,
        sequence_length: int = 0,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.batch_size, self.seed, self.rank, self.world_size = batch_size, seed, rank, world_size
        self.batches_per_epoch = len(documents) // (batch_size * world_size)
        if self.batches_per_epoch == 0:
            raise InputError(
                f"a batch needs {batch_size} texts on each of {world_size} processes; "
                f"{folder} holds {len(documents)}; write more (num_samples) or use a smaller "
                "batch_size"
            )
        longest = int(documents.lengths.max())
        self.tokens = torch.full((len(documents), longest), padding_id)
        self.counted = torch.zeros(len(documents), longest, dtype=torch.bool)
        for row, length in enumerate(documents.lengths.tolist()):
            self.tokens[row, :length] = torch.from_numpy(documents.tokens(row).copy()).long()
            self.counted[row, :length] = torch.from_numpy(documents.counted(row).copy())
        if sequence_length:
            self.tokens = self.tokens[:, :sequence_length]
            self.counted = self.counted[:, :sequence_length]

    def batches(
        self, cursor: dict[str, Any] | None = None
    ) -> Iterator[tuple[TokenBatch, dict[str, Any]]]:
        """Yield batches for ever, each with the cursor from which the next one follows."""
        batch = int(cursor["batch"]) if cursor else 0
        while True:
            epoch, place = divmod(batch, self.batches_per_epoch)
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            order = torch.randperm(len(self.tokens), generator=generator)
            start = (place * self.world_size + self.rank) * self.batch_size
            rows = order[start : start + self.batch_size]
            batch += 1
            yield TokenBatch(self.tokens[rows], self.counted[rows]), {"batch": batch}

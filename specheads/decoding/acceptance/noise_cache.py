"""The noise of the positions ahead of each row: made once, and kept until they are committed."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specheads.base.cache import upload
from specheads.decoding.acceptance import noise
from specheads.decoding.acceptance.accept import in_blocks, likeliest
from specheads.decoding.acceptance.gumbel_max import gumbel_max

BLOCK = {"cpu": 2**16}
"""Numbers that are made at once: on a processor as many as stay in its cache between operations."""

MOST = 2**22
"""The same on other devices, which bounds the memory that it takes on the way."""


class NoiseCache:
    """Gumbel noise for each token at the positions after each row's root.

    A row's noise follows from its seed and the position alone; rows that draw nothing have zeros,
    at no cost. A ring of slots holds position i at i modulo their number, so that what is ahead
    stays where it is while roots advance.

    Args:
        seeds: Seed of each row.
        drawing: Whether each row draws.
        vocab_size: Tokens that noise is for.
        dtype: What it is computed in.
    """

    def __init__(
        self,
        seeds: Int[Tensor, " batch"],
        drawing: list[bool],
        vocab_size: int,
        dtype: torch.dtype,
    ) -> None:
        self.seeds, self.drawing = seeds, drawing
        self.vocab_size, self.dtype = vocab_size, dtype
        self._seeded = noise.bits(seeds)
        self._values: Float[Tensor, "batch slot vocab"] | None = None
        self._rows = torch.arange(len(drawing), device=seeds.device)[:, None]
        self._known = [0] * len(drawing)
        """Positions after each root that lie in the ring, known without asking the device."""

    def after(
        self,
        lengths: Int[Tensor, " batch"],
        depths: Int[Tensor, "batch node"] | int,
        num_positions: int,
    ) -> Float[Tensor, "batch node vocab"]:
        """Return the noise at the position after each node.

        Args:
            lengths: Position of each row's root.
            depths: How many edges each node lies below the root; a number is one node a row.
            num_positions: Positions after the root that are, or soon will be, asked for.
        """
        values = self._filled(lengths, num_positions)
        slots = values.shape[1]
        places = self._rows * slots + (lengths[:, None] + (depths + 1)) % slots
        return values.flatten(0, 1).index_select(0, places.flatten()).unflatten(0, places.shape)

    def draw(
        self,
        scores: Float[Tensor, "batch node vocab"],
        lengths: Int[Tensor, " batch"],
        depths: Int[Tensor, "batch node"],
        num_positions: int,
    ) -> Int[Tensor, "batch node"]:
        """Return the token whose score and noise together are the largest after each node.

        The other arguments are those of `after`. Where drafts have asked for noise it is at hand;
        where none has, only tokens that can win need it.
        """
        scores = scores.to(self.dtype)
        if self._values is not None or not in_blocks(scores):
            return likeliest(self.after(lengths, depths, num_positions).add_(scores))
        after = lengths[:, None] + (depths + 1)
        keys = noise.bits(after, noise.TOKEN, state=self._seeded[:, None])
        drawn = gumbel_max(scores.flatten(0, 1), keys.flatten()).view_as(keys)
        if all(self.drawing):
            return drawn
        return torch.where(torch.tensor(self.drawing)[:, None], drawn, likeliest(scores))

    def _filled(self, lengths: Tensor, num_positions: int) -> Float[Tensor, "batch slot vocab"]:
        """Return the ring with at least so many positions after each root in it."""
        if self._values is None or self._values.shape[1] < num_positions:
            shape = len(self.drawing), num_positions, self.vocab_size
            self._values = torch.zeros(shape, dtype=self.dtype, device=lengths.device)
            self._known = [0] * len(self.drawing)
        slots = self._values.shape[1]
        missing = [
            [row, ahead + 1, row * slots]
            for row, (known, draws) in enumerate(zip(self._known, self.drawing, strict=True))
            for ahead in range(known, num_positions)
            if draws
        ]
        if missing:
            rows, ahead, first = upload(missing, lengths.device).unbind(-1)
            positions = lengths[rows] + ahead
            keys = noise.bits(positions, noise.TOKEN, state=self._seeded[rows])
            places = first + positions % slots
            size = max(1, BLOCK.get(lengths.device.type, MOST) // self.vocab_size)
            flat = self._values.flatten(0, 1)
            for some, where in zip(keys.split(size), places.split(size), strict=True):
                flat.index_copy_(0, where, noise.gumbel(some, self.vocab_size, self.dtype))
        self._known = [max(known, num_positions) for known in self._known]
        return self._values

    def advance(self, counts: list[int]) -> None:
        """Let go of the first positions after each root: so many were committed."""
        self._known = [
            max(known - count, 0) for known, count in zip(self._known, counts, strict=True)
        ]

    def keep(self, rows: list[int], index: Int[Tensor, " kept"]) -> "NoiseCache":
        """Return the noise of these rows, whose numbers lie on the device too."""
        kept = NoiseCache(
            self.seeds[index], [self.drawing[row] for row in rows], self.vocab_size, self.dtype
        )
        if self._values is not None:
            kept._values = self._values[index]
            kept._known = [self._known[row] for row in rows]
        return kept

    def join(self, other: "NoiseCache") -> "NoiseCache":
        """Return the noise of both; it is made anew where their rings differ in size."""
        joined = NoiseCache(
            torch.cat([self.seeds, other.seeds]),
            self.drawing + other.drawing,
            self.vocab_size,
            self.dtype,
        )
        ours, theirs = self._values, other._values
        if ours is not None and theirs is not None and ours.shape[1] == theirs.shape[1]:
            joined._values = torch.cat([ours, theirs])
            joined._known = self._known + other._known
        return joined

"""Gradients of states and vocabulary projections, added up chunk by chunk."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

BLOCK_ROWS = {"cpu": 2**10}
"""Rows of a weight whose gradient is multiplied and added at once: what a core's cache holds."""


class Gradients:
    """Adds up the gradients of states, weights and biases, of those that are wanted.

    Products run in the states' own precision, as autocast chose it; losses in at least float32.
    """

    def __init__(
        self, depth: int, tensors: Sequence[Tensor | None], wanted: Sequence[bool]
    ) -> None:
        self.states = [tensor for tensor in tensors[:depth] if tensor is not None]
        dtype = self.states[0].dtype
        self.precision = torch.promote_types(dtype, torch.float32)
        # a tensor that several depths share gets one gradient, and one copy in the states'
        # precision, at its first place
        self.place = [
            next(first for first, other in enumerate(tensors) if other is tensor)
            for tensor in tensors
        ]
        own = [first == place for place, first in enumerate(self.place)]
        self.sums = [
            torch.zeros_like(tensor) if want and first and tensor is not None else None
            for tensor, want, first in zip(tensors, wanted, own, strict=True)
        ]
        self.cast = [
            tensor.to(dtype) if first and tensor is not None else None
            for tensor, first in zip(tensors, own, strict=True)
        ]

    def _projection(self, level: int) -> tuple[Tensor, Tensor | None]:
        places = self._places(level)
        weight = self.cast[places[0]]
        assert weight is not None
        return weight, self.cast[places[1]]

    def _places(self, level: int) -> list[int]:
        """Return the places of a depth's weight and bias."""
        first = len(self.states) + 2 * level
        return self.place[first : first + 2]

    def logits(self, level: int, rows: slice, room: Tensor | None = None) -> Tensor:
        """Return a depth's logits of some rows, written into former ones where there is room."""
        state, (weight, bias) = self.states[level][rows], self._projection(level)
        if room is None or room.shape[1] != len(weight) or len(room) < len(state):
            return F.linear(state, weight, bias)
        logits = torch.mm(state, weight.T, out=room[: len(state)])
        return logits if bias is None else logits.add_(bias)

    def add(self, level: int, rows: slice, slopes: Tensor, scale: Tensor) -> None:
        """Add what the slopes of some rows' logits give, each row times its scale."""
        state = self.states[level][rows]
        scale = scale.to(state.dtype)
        weight, bias = self._places(level)
        # scaled where a row is a state's width, and not the vocabulary's
        if (sums := self.sums[self.place[level]]) is not None:
            sums[rows] += (slopes @ self._projection(level)[0]).mul_(scale[:, None])
        if (sums := self.sums[weight]) is not None:
            scaled = state * scale[:, None]
            # in place where precisions agree: the product alone is as large as the weight
            if sums.dtype == state.dtype:
                sums.addmm_(slopes.T, scaled)
            else:
                _add_product(sums, slopes, scaled)
        if (sums := self.sums[bias]) is not None:
            sums += scale @ slopes


def _add_product(sums: Tensor, slopes: Tensor, states: Tensor) -> None:
    """Add `slopes.T @ states` to sums of another precision.

    On a CPU a whole product of a vocabulary's rows would be written out, and once more in the
    sums' precision, into pages that are new each time: longer than it takes to multiply.
    """
    size = BLOCK_ROWS.get(sums.device.type, len(sums))
    for start in range(0, len(sums), size):
        sums[start : start + size] += slopes[:, start : start + size].T @ states

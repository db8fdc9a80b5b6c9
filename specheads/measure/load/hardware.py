"""What steps would take on a machine that one does not have: computed, never measured.

Source: Williams et al. 2009, the roofline model; Sadhukhan et al. 2024, arXiv:2408.11049
(MagicDec), section 3, for what a drafter with a window of fixed size reads.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from specheads.core.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What bounds a forward."""

    bandwidth: float
    """Bytes a second between memory and processor."""
    flops: float
    """Floating-point operations a second, of dense products in the weights' precision."""

    def __post_init__(self) -> None:
        if not (self.bandwidth > 0 and self.flops > 0):
            raise InputError(
                "a machine needs bandwidth and flops above 0, got "
                f"{self.bandwidth} and {self.flops}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What a forward of a model reads and computes."""

    parameters: int
    """Those that every token is multiplied with."""
    weight_bytes: int
    """Bytes of all of them, which a forward reads once."""
    position_bytes: int
    """Bytes of keys and values of one position, in all layers. Zero attends to none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedCost:
    """Seconds of a step on a machine: of each forward the longer of memory's and arithmetic's.

    A forward reads the weights once, and the keys and values of what its rows attend to; each token
    takes two operations a parameter. Those of attention itself, and the time of launching kernels,
    of sampling and of communication, are left out: a real machine is slower.
    """

    machine: Machine
    base: Size
    draft: Size
    """Of one forward of the drafter."""
    window: float = math.inf
    """Most positions of a row that the drafter attends to, attention sinks included."""
    levels: int = 1
    """Levels that a forward of the drafter drafts: above one all of a block, however many of them
    are taken."""

    def forward(self, size: Size, tokens: int | float, positions: int | float) -> float:
        """Return what a forward over so many tokens takes that attend to so many positions."""
        memory = size.weight_bytes + size.position_bytes * positions
        arithmetic = 2 * size.parameters * tokens
        return max(memory / self.machine.bandwidth, arithmetic / self.machine.flops)

    def prefill(self, tokens: int) -> float:
        """Return what reading prompts of so many tokens takes."""
        return self.forward(self.base, tokens, tokens)

    def seconds(self, batch: int, context: int | float, nodes: int, depth: int) -> float:
        """Return what a step takes: see `decoding.cost.StepCost.seconds`."""
        verified = self.forward(self.base, batch * nodes, batch * context)
        if depth == 0:
            return verified
        seen = batch * min(context, self.window)
        read = self.levels if self.levels > 1 else (nodes - 1) / depth
        forwards = -(-depth // self.levels)
        return verified + forwards * self.forward(self.draft, batch * read, seen)

    def context(self, lengths: Sequence[int]) -> float:
        """Return the tokens of a row, on average: paged attention reads what rows hold."""
        return statistics.fmean(lengths)

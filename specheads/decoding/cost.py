"""What a step of decoding takes, by what it works on.

Source: Liu et al. 2024, arXiv:2406.14066 (SmartSpec), section 4: a forward takes a fixed time,
one for each token of its batch, and one for each position that its rows attend to. `several`,
`free` and `power` are ours, zero, zero and one in theirs: see docs/tune.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from specheads.base.tree_attention import spans


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardCost:
    """Seconds of one forward of a whole batch."""

    fixed: float
    """Whatever it works on."""

    token: float
    """For each token that it works on, over all rows."""

    context: float
    """For each committed position that its rows attend to, over all rows."""

    several: float = 0.0
    """Where it works on more than one token: a processor multiplies matrices with one vector in
    another way than with two."""

    free: int = 0
    """Tokens that take no time of their own: a machine multiplies them while it reads weights."""

    power: float = 1.0
    """Exponent of the number of the others; below one where many cost less each than few."""

    def seconds(self, tokens: int | float, context: int | float) -> float:
        """Return what a forward over so many tokens and positions takes."""
        jump = self.several if tokens > 1 else 0.0
        paid = max(tokens - self.free, 0) ** self.power
        return self.fixed + jump + self.token * paid + self.context * context


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Seconds of a step: some levels of drafting, then one forward of the base."""

    verify: ForwardCost
    """The base's forward over the trees of all rows."""

    draft: ForwardCost
    """One level of drafting, for all rows."""

    def seconds(self, batch: int, context: int | float, nodes: int, depth: int) -> float:
        """Return what a step takes.

        Args:
            batch: Rows.
            context: Committed tokens of a row, on average; see `context`.
            nodes: Nodes of a row's tree, root included; one is the base alone.
            depth: Levels that are drafted; zero is the base alone.
        """
        verified = self.verify.seconds(batch * nodes, batch * context)
        if depth == 0:
            return verified
        # a level reads the nodes of the one above; each node but the root was drafted once
        drafted = self.draft.seconds(batch * (nodes - 1) / depth, batch * context)
        return verified + depth * drafted

    def context(self, lengths: Sequence[int]) -> float:
        """Return the tokens that each of such rows counts as, on average.

        A shorter row is read as far as the longest of those that are read with it.
        """
        read = sum((one.stop - one.start) * longest for one, longest in spans(tuple(lengths)))
        return read / len(lengths)


@runtime_checkable
class Cost(Protocol):
    """What a step takes, measured and fitted as in `StepCost`, or computed."""

    def seconds(self, batch: int, context: int | float, nodes: int, depth: int) -> float:
        """Return what a step takes: see `StepCost.seconds`."""
        ...

    def context(self, lengths: Sequence[int]) -> float:
        """Return the tokens that each of such rows counts as: see `StepCost.context`."""
        ...

"""The time of a decoding step as a linear function of its work.

Source: Liu et al. 2024, arXiv:2406.14066 (SmartSpec), section 4: a forward takes a fixed time, a
time per token of its batch and a time per position that its rows attend to. `specheads tune` fits
it, the computed machines of `specheads simulate` have it too, and goodput chooses by it.
"""

from dataclasses import dataclass

from specheads.core.ranges import NonNegativeFloat, PositiveInt

RECENT, PRIOR = 0.03, 0.001
"""Weights of the last step and of the measured cost in `FollowedCost`."""
PRIOR_TOKENS = 8
"""Tokens of the step by whose seconds changes of the measured cost are judged."""
STALL = 2.0
"""Most times the expected seconds that a step counts as."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardCost:
    """Seconds of one forward of a whole batch."""

    fixed: NonNegativeFloat
    """Seconds of any forward."""
    token: NonNegativeFloat
    """Seconds per token, over all rows."""
    context: NonNegativeFloat
    """Seconds per committed position that a row attends to, over all rows."""

    def seconds(self, tokens: float, positions: float) -> float:
        """Return the seconds of a forward over `tokens` that attend to `positions`."""
        return self.fixed + self.token * tokens + self.context * positions


class FollowedCost:
    """A `ForwardCost` whose times per step and per token follow the steps that a server runs.

    They are a least-squares fit to the recent steps that deviates as little as possible from the
    cost that was measured before. In a server, steps also wait for its other processes.
    """

    def __init__(self, measured: ForwardCost) -> None:
        self.measured = self.current = measured
        usual = max(measured.fixed + PRIOR_TOKENS * measured.token, 1e-6)
        # both may change by the same share; a measured zero may grow too
        shares = 0.1 * usual, 0.001 * usual
        times = measured.fixed, measured.token
        self._prior = [PRIOR * (usual / max(pair)) ** 2 for pair in zip(times, shares, strict=True)]
        # moving averages of 1, tokens, tokens squared, and of the error times 1 and tokens
        self._moments, self._errors = [0.0, 0.0, 0.0], [0.0, 0.0]

    def follow(self, tokens: int, positions: int, seconds: float) -> None:
        """Follow a step that verified so many tokens; one that stalled counts as `STALL` times."""
        seconds = min(seconds, STALL * self.current.seconds(tokens, positions))
        error = seconds - self.measured.seconds(tokens, positions)
        for power in range(3):
            self._moments[power] += RECENT * (tokens**power - self._moments[power])
        for power in range(2):
            self._errors[power] += RECENT * (error * tokens**power - self._errors[power])
        # two equations in plain numbers: an array library costs more than a level of drafting
        a, b, c = self._prior[0] + self._moments[0], self._moments[1], self._moments[2]
        c += self._prior[1]
        x, y = self._errors
        determinant = a * c - b * b
        fixed = max(self.measured.fixed + (c * x - b * y) / determinant, 0.0)
        token = max(self.measured.token + (a * y - b * x) / determinant, 0.0)
        self.current = ForwardCost(fixed=fixed, token=token, context=self.measured.context)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Seconds of a step: some levels of drafting, then one forward of the base."""

    verify: ForwardCost
    """The base's forward over the trees of all rows."""
    draft: ForwardCost
    """One forward of the drafter, for all rows."""
    levels: PositiveInt = 1
    """Levels that one forward of the drafter drafts; above 1 it always drafts a whole block."""

    def seconds(
        self, batch: int, context: int | float, nodes: int, depth: int, copied: int = 0
    ) -> float:
        """Return the seconds of a step of `batch` rows with so many committed tokens each.

        `nodes` are those of a row's own tree, root included; `depth` is the number of levels that
        are drafted; zero is the base alone. `copied` nodes are verified but not drafted.
        """
        verify_seconds = self.verify.seconds(batch * (nodes + copied), batch * context)
        if depth == 0:
            return verify_seconds
        # a level reads the nodes of the one above; each node but the root was drafted once
        draft_tokens = self.levels if self.levels > 1 else (nodes - 1) / depth
        num_forwards = -(-depth // self.levels)
        draft_seconds = self.draft.seconds(batch * draft_tokens, batch * context)
        return verify_seconds + num_forwards * draft_seconds

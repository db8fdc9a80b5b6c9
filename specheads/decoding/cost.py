"""The load of a step, by which tree policies choose, and the time that it takes.

The load is the batch, its context and its acceptance rates. The time is a linear function of work.

Source: Liu et al. 2024, arXiv:2406.14066 (SmartSpec), section 4: a forward takes a fixed time, a
time per token of its batch and a time per position that its rows attend to. `specheads tune` fits
it, the computed machines of `specheads simulate` have it too, and goodput chooses by it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

from specheads.core.ranges import NonNegativeFloat, PositiveInt
from specheads.decoding.suffix_decoding import LookupText, common_prefix_length

RECENT, PRIOR = 0.03, 0.001
"""Weights of the last step and of the measured cost in `FollowedCost`."""
PRIOR_TOKENS = 8
"""Tokens of the step by whose seconds changes of the measured cost are judged."""
STALL = 2.0
"""Most times the expected seconds that a step counts as."""
WEIGHT, RETURN = 0.05, 0.01
"""Weight of a new observation in a moving average, and of the start if nothing was observed. A
depth that stopped paying is thus tried again later."""


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


# --- the load of a step ------------------------------------------------------------------------


def expected_tokens(rates: Iterable[float]) -> list[float]:
    """Return the expected tokens per step by drafted depth: 1, 1 + a, 1 + a + a b, ..."""
    return list(accumulate(accumulate(rates, mul), initial=1.0))


@dataclass(slots=True)
class MovingRates:
    """Moving averages of a request's conditional acceptance rates, from the `start` values on."""

    start: Sequence[float] = ()
    rates: list[float] = field(init=False)
    """Share of drafts accepted at each depth among those accepted at every earlier one."""
    tokens: list[float] = field(init=False)
    """Expected tokens per step by drafted depth: see `expected_tokens`."""

    def __post_init__(self) -> None:
        self.rates = list(self.start)
        self.tokens = expected_tokens(self.rates)

    def update(self, num_accepted: int, *, refused: bool) -> None:
        """Update the rates with a step's accepted tokens and whether the next one was refused."""
        num_observed = num_accepted + refused
        for depth, rate in enumerate(self.rates):
            if depth < num_observed:
                self.rates[depth] += WEIGHT * ((depth < num_accepted) - rate)
            else:
                self.rates[depth] += RETURN * (self.start[depth] - rate)
        self.tokens = expected_tokens(self.rates)


@dataclass(slots=True)
class RequestRates:
    """Acceptance rates of one request, of drafted and of copied tokens, assumed independent.

    Without start values they stay empty, for policies that do not use them.
    """

    drafted: MovingRates = field(default_factory=MovingRates)
    """Rates of drafted tokens."""
    copied: Sequence[MovingRates] = ()
    """Rates of copied tokens after a match of one, two, ... tokens."""
    text: LookupText = field(default_factory=LookupText)
    """The request's text up to the root, which the decoding loop extends."""
    lookup_length: int = 0
    """Most tokens that prompt lookup copies."""
    match: MovingRates | None = None
    """Rates of the tokens to copy in the next step; None copies nothing."""
    to_copy: list[int] = field(default_factory=list)
    """Tokens that prompt lookup would copy in the next step."""

    def find_match(self) -> None:
        """Look for the tokens to copy in the next step."""
        if self.copied:
            length, self.to_copy = self.text.find(self.lookup_length)
            longest = min(length, len(self.copied))
            self.match = self.copied[longest - 1] if longest else None

    def observe(self, num_drafted: int, num_accepted: int, tokens: Sequence[int]) -> None:
        """Observe a step: the levels that were drafted and accepted, and the new tokens."""
        self.drafted.update(num_accepted, refused=num_accepted < num_drafted)
        # copied tokens that were not drafted are compared with the text too
        if self.match:
            num_equal = common_prefix_length(self.to_copy, tokens)
            refused = num_equal < min(len(self.to_copy), len(tokens))
            self.match.update(num_equal, refused=refused)
        self.find_match()


@dataclass(frozen=True, slots=True)
class RowLoad:
    """One request in the batch."""

    context: int
    """Tokens of prompt and output."""
    room: int
    """Largest number of further tokens."""
    rates: RequestRates


@dataclass(frozen=True, slots=True)
class StepLoad:
    """The requests of the next step, at least one."""

    rows: Sequence[RowLoad]

    @property
    def batch(self) -> int:
        """Number of requests."""
        return len(self.rows)

    @property
    def mean_context(self) -> float:
        """Mean tokens of prompt and output per request."""
        return sum(row.context for row in self.rows) / len(self.rows)

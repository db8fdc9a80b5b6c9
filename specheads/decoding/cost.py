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

MEMORY, PRIOR, SHRINK = 64, 0.03, 4
"""Steps of one shape that `FollowedCost` averages at most, and the weights, in steps, of no
correction and of a shape's own one being zero."""
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
    """Corrects expected seconds by those that a server's steps take.

    The correction is a line in the work of a step, such as its tokens. It is fitted to the mean
    errors of each shape of steps and deviates from zero as little as possible. What it leaves of a
    shape's own error is added. Each shape has its own average, so that one that is seldom run is
    not forgotten: steps without a draft, for example.

    Args:
        usual: Seconds of a usual step.
        fixed: Seconds per step, of which an error of the same size is likely.
        slope: Seconds per unit of work, likewise.
    """

    def __init__(self, usual: float, fixed: float, slope: float) -> None:
        # a measured zero may grow too
        self._usual = usual = max(usual, 1e-6)
        scales = max(fixed, 0.1 * usual), max(slope, 0.001 * usual)
        self._prior = [PRIOR * (usual / scale) ** 2 for scale in scales]
        self._means: dict[int, list[float]] = {}
        """Number of steps, mean work and mean error, by shape."""
        self.fixed, self.slope = 0.0, 0.0
        self._rest: dict[int, float] = {}

    def seconds(self, work: float, shape: int, expected: float) -> float:
        """Return the corrected seconds of a step."""
        corrected = expected + self.fixed + self.slope * work + self._rest.get(shape, 0.0)
        # a line may leave the range of its points
        return max(corrected, 0.1 * expected)

    def follow(self, work: float, shape: int, expected: float, seconds: float) -> bool:
        """Follow a step; return whether it is the first of its shape.

        A step that stalled counts as `STALL` times the expected seconds.
        """
        is_first = shape not in self._means
        longest = STALL * max(self.seconds(work, shape, expected), self._usual)
        seconds = min(seconds, longest)
        means = self._means.setdefault(shape, [0.0, 0.0, 0.0])
        means[0] = min(means[0] + 1, MEMORY)
        for index, value in enumerate((work, seconds - expected), 1):
            means[index] += (value - means[index]) / means[0]
        # two equations in plain numbers: an array library costs more than a level of drafting
        (a, c), b, x, y = self._prior, 0.0, 0.0, 0.0
        for count, mean_work, error in self._means.values():
            a, b, c = a + count, b + count * mean_work, c + count * mean_work**2
            x, y = x + count * error, y + count * error * mean_work
        determinant = a * c - b * b
        self.fixed, self.slope = (c * x - b * y) / determinant, (a * y - b * x) / determinant
        for key, (count, mean_work, error) in self._means.items():
            remainder = error - self.fixed - self.slope * mean_work
            self._rest[key] = remainder * count / (count + SHRINK)
        return is_first


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

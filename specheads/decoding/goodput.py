"""Choose in each step how many levels to draft and how many tokens to copy, or neither.

Source: Liu et al. 2024, arXiv:2406.14066 (SmartSpec). See docs/serve.md.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Any
from weakref import WeakKeyDictionary

from specheads.decoding.cost import StepCost
from specheads.decoding.loop import DecodingStep
from specheads.decoding.prompt_lookup import LookupText, common_prefix_length
from specheads.decoding.trees import policies
from specheads.decoding.trees.hybrid import HybridTree
from specheads.decoding.trees.tuned import Choice, Tuned

WEIGHT, RETURN = 0.05, 0.01
"""Weight of a new observation in a moving average, and of the seed if nothing was observed. A depth
that stopped paying is thus tried again later."""
SIZES = 2, 4, 7
"""Numbers of copied tokens to choose from, in addition to all that have a rate."""


@dataclass(slots=True)
class MovingRates:
    """Moving averages of a request's conditional acceptance rates, starting at `seed`."""

    seed: Sequence[float]
    rates: list[float] = field(init=False)
    """Share of drafts accepted at each depth among those accepted at every earlier one."""
    tokens: list[float] = field(init=False)
    """Expected tokens per step by drafted depth: see `expected_tokens`."""

    def __post_init__(self) -> None:
        self.rates = list(self.seed)
        self.tokens = expected_tokens(self.rates)

    def note(self, accepted: int, *, refused: bool) -> None:
        """Update the rates with a step's accepted tokens and whether the next one was refused."""
        observed = accepted + refused
        for depth, rate in enumerate(self.rates):
            if depth < observed:
                self.rates[depth] += WEIGHT * ((depth < accepted) - rate)
            else:
                self.rates[depth] += RETURN * (self.seed[depth] - rate)
        self.tokens = expected_tokens(self.rates)


def expected_tokens(rates: Iterable[float]) -> list[float]:
    """Return the expected tokens per step by drafted depth: 1, 1 + a, 1 + a + a b, ..."""
    return list(accumulate(accumulate(rates, mul), initial=1.0))


Draft = tuple[int, int]
"""Levels of the drafter's chain, and nodes for copied text next to it. Copied tokens that are
drafted too leave room for more; that is not counted."""


@dataclass(slots=True)
class RequestRates:
    """Acceptance rates of one request, of drafted and of copied tokens, assumed independent."""

    own: MovingRates
    """Rates of drafted tokens."""
    copied: Sequence[MovingRates] = ()
    """Rates of copied tokens after a match of one, two, ... tokens."""
    text: LookupText = field(default_factory=LookupText)
    """The request's text, if text is copied."""
    num_steps: int = 0
    """Number of steps observed."""
    last_depth: int = 0
    """Levels drafted in the last step."""
    match: MovingRates | None = None
    """Rates of the tokens to copy in the next step; None copies nothing."""
    to_copy: list[int] = field(default_factory=list)
    """Tokens that prompt lookup would copy in the next step."""

    def observe(self, steps: Sequence[DecodingStep], size: int) -> None:
        """Observe the new steps, and look for at most `size` tokens to copy."""
        for step in steps[self.num_steps :]:
            levels = drafted_levels(step)
            self.own.note(levels, refused=levels < self.last_depth)
            # copied tokens that were not drafted are compared with the text too
            if self.match:
                right = common_prefix_length(self.to_copy, step.tokens)
                refused = right < min(len(self.to_copy), len(step.tokens))
                self.match.note(right, refused=refused)
            if self.copied:
                self.text.extend(step.tokens)
        self.num_steps = len(steps)
        if self.copied:
            matched, self.to_copy = self.text.find(size)
            longest = min(matched, len(self.copied))
            self.match = self.copied[longest - 1] if longest else None


Row = tuple[Any, RequestRates]
"""A request, of which only `length` and `room` are read, and its rates."""


def step_tokens(drafts: Sequence[Draft], rows: Sequence[Row]) -> list[float]:
    """Return the expected tokens of a step of these rows, within their limits, for each draft."""
    own = _summed([(row, rates.own.tokens) for row, rates in rows])
    matches = [(row, rates.own, rates.match) for row, rates in rows if rates.match]
    if not matches:
        return [own[depth] for depth, _ in drafts]
    # expected tokens of either = of one + of the other - of both
    copied = _summed([(row, match.tokens) for row, _, match in matches])
    joint = [(row, map(mul, own.rates, match.rates)) for row, own, match in matches]
    both = _summed([(row, expected_tokens(rates)) for row, rates in joint])
    return [own[depth] + copied[size] - both[min(depth, size)] for depth, size in drafts]


def _summed(rows: Sequence[tuple[Any, list[float]]]) -> list[float]:
    """Return the expected tokens of all rows by depth, each row limited by its room."""
    limited = [(tokens, max(row.room, 1) - 1) for row, tokens in rows]
    depths = range(len(rows[0][1]))
    return [sum(tokens[min(depth, last)] for tokens, last in limited) for depth in depths]


def best_draft(cost: StepCost, drafts: Sequence[Draft], rows: Sequence[Row]) -> int:
    """Return the index of the draft with the highest goodput in tokens per second.

    The first of equals is chosen, so smaller drafts come first and those with copied text last;
    these are left out if no row has a match.
    """
    context = max(row.length for row, _ in rows)
    if not any(rates.match for _, rates in rows):
        drafts = [(depth, copied) for depth, copied in drafts if not copied]
    goodput = [
        tokens / cost.seconds(len(rows), context, depth + 1, depth, copied)
        for tokens, (depth, copied) in zip(step_tokens(drafts, rows), drafts, strict=True)
    ]
    # values that differ by rounding only are equal
    enough = max(goodput) * (1 - 1e-9)
    return next(place for place, one in enumerate(goodput) if one >= enough)


class Goodput(Choice):
    """Chooses the draft with the highest goodput for the batch of each step, or no draft.

    The candidates are chains of every depth from zero on, each without and with copied text. The
    rates of a request are moving averages over its own steps.

    Args:
        cost: Cost of a step on this machine.
        rates: Measured conditional acceptance rate of each depth, the start of every request.
        copied: Measured rates of copied text, one per token: after a match of one token, of two,
            and so on, up to the longest match that prompt lookup looks for.
    """

    def __init__(
        self, cost: StepCost, rates: Sequence[float], copied: Sequence[Sequence[float]] = ()
    ) -> None:
        self.cost, self.rates = cost, rates
        most = min(map(len, copied), default=0)
        self.copied_rates = [known[:most] for known in copied if most]
        sizes = [0, *(size for size in SIZES if size < most), most] if most else [0]
        depths = range(len(rates) + 1)
        self.drafts = [(depth, size) for size in sizes for depth in depths]
        trees = [policies.chain(depth) for depth in depths]
        # all look up equally many tokens, those whose rates are observed
        longest = len(rates) + most
        own = [(trees[depth], size) for depth, size in self.drafts if size]
        copying = [HybridTree(tree, size, copied=longest) for tree, size in own]
        super().__init__("goodput", [*trees, *copying], self._best)
        self._rates: WeakKeyDictionary[Any, RequestRates] = WeakKeyDictionary()

    @classmethod
    def of(cls, tuned: Tuned) -> "Goodput":
        """Return the policy for the measured times and rates of a head."""
        acceptance = tuned.acceptance
        return cls(tuned.cost, acceptance.per_depth, [one.rates for one in acceptance.matches])

    def _best(self, requests: Sequence[Any]) -> int:
        """Return the index of the tree with the most tokens per second for these requests."""
        for request in requests:
            rates = self._rates.get(request)
            if rates is None:
                copied = [*map(MovingRates, self.copied_rates)]
                rates = RequestRates(MovingRates(self.rates), copied)
                rates.num_steps = len(request.steps)
                if copied:
                    rates.text.extend(request.all_tokens)
                self._rates[request] = rates
            rates.observe(request.steps, self.copied)
        rows = [(request, self._rates[request]) for request in requests]
        place = best_draft(self.cost, self.drafts, rows)
        for _, rates in rows:
            rates.last_depth = self.drafts[place][0]
        return place


def drafted_levels(step: DecodingStep) -> int:
    """Return how many levels of the head's own tree a step accepted."""
    size = len(step.drafted) - step.num_copied
    return sum(node < size for node in step.path) - 1

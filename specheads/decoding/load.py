"""The load of a step, by which tree policies choose: batch, context and acceptance rates."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

from specheads.decoding.prompt_lookup import LookupText, common_prefix_length

WEIGHT, RETURN = 0.05, 0.01
"""Weight of a new observation in a moving average, and of the start if nothing was observed. A
depth that stopped paying is thus tried again later."""


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

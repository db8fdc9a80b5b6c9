"""Choose how many tokens of each request's chain an engine verifies: see `ChainBudget`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from specheads.decoding.calibration import Chances, Curve
from specheads.decoding.cost import FollowedCost, StepCost
from specheads.decoding.prompt_lookup import common_prefix_length

RETRY = 16
"""Steps without a draft after which the first level is drafted again."""
WEIGHT, SLOW = 0.05, 0.02
"""Weights of a new observation in moving averages of a request, and of all requests' rates."""
PRIOR = 4.0
"""Accepted drafts that the start of a request's correction counts as."""
MARGIN = 1.01
"""Least gain in expected tokens per second for which a step begins to draft."""
MOST = 0.999
"""Largest probability of acceptance."""


def num_verified(
    survivals: Sequence[float] | NDArray[np.float64],
    num_rows: int,
    seconds: Callable[[NDArray[np.float64]], NDArray[np.float64]],
) -> int:
    """Return how many drafted tokens to verify for the most expected tokens per second.

    Args:
        survivals: The probability that each drafted token of all rows is accepted, from the largest
            on: the product of the conditional ones along its path. The first n are thus trees.
        num_rows: Rows of the batch; each also gets one token of the base's own.
        seconds: Seconds of a step that verifies so many tokens, roots included, for each element.

    The smallest of equals is returned; zero does not draft.
    """
    tokens = num_rows + np.concatenate([[0.0], np.cumsum(survivals)])
    rates = tokens / seconds(num_rows + np.arange(len(tokens), dtype=float))
    # values that differ by rounding only are equal
    return int(np.argmax(rates >= rates.max() * (1 - 1e-9)))


@dataclass(slots=True)
class RequestDrafts:
    """Observations of the drafts of one request, or of all."""

    chain: list[int] = field(default_factory=list)
    """The last draft, with the tokens that the engine did not verify."""
    chances: Chances = field(default_factory=lambda: np.zeros(0))
    """Calibrated probability that each token of it is accepted, given those before."""
    accepted: float = 0.0
    """Number of tokens that were right; earlier ones weigh less."""
    expected: float = 0.0
    """Sum of the probabilities of the same drafts."""

    def factor(self, start: float) -> float:
        """Return accepted over expected tokens; `start` is the value of no observation."""
        return (self.accepted + PRIOR * start) / (self.expected + PRIOR)

    def note(self, right: int, expected: float) -> None:
        """Add the observed tokens of a draft."""
        self.accepted += right - WEIGHT * self.accepted
        self.expected += expected - WEIGHT * self.expected


class ChainBudget:
    """Chooses how many levels to draft, and how many tokens of each chain to verify.

    Tokens are taken in the order of the probability that they are accepted, as long as the expected
    tokens per second of the whole batch rise. That of a drafted token is the head's own, calibrated
    and corrected by what the request accepted lately. A step drafts at all if drafts paid lately in
    batches of this size. Rows are those of the engine's batch, and `positions` counts the committed
    tokens of all rows that draft.

    Source: Liu et al. 2024, arXiv:2406.14066 (SmartSpec), token by token.
    """

    def __init__(self, cost: StepCost, rates: Sequence[float], curves: Sequence[Curve]) -> None:
        self.rates, self.curves = np.array(rates, dtype=float), curves
        self.verify, self.draft = FollowedCost(cost.verify), FollowedCost(cost.draft)
        self._requests: dict[str, RequestDrafts] = {}
        self._all = RequestDrafts()
        self._gains: dict[int, float] = {}
        """Moving average of the tokens per second with drafts over those without, by the number of
        binary digits of the batch size."""
        self._idle = 0
        self._chances: Chances
        """Conditional probabilities: (row, level). A level that is not drafted has a usual rate."""

    def observe(self, requests: Sequence[str], sampled: Sequence[list[int]]) -> None:
        """Compare the last drafts of the requests of a batch with the tokens that followed."""
        known = self._requests
        self._requests = {request: known.get(request) or RequestDrafts() for request in requests}
        for one, tokens in zip(self._requests.values(), sampled, strict=True):
            # tokens that were not verified count too, because those that were are easier
            if observed := min(len(one.chain), len(tokens)):
                right = common_prefix_length(one.chain, tokens)
                expected = float(one.chances[: min(right + 1, observed)].sum())
                one.note(right, expected)
                self._all.note(right, expected)
                levels = np.arange(min(right + 1, observed))
                self.rates[levels] += SLOW * ((levels < right) - self.rates[levels])
                one.chain = []
        usual = self._all.factor(1.0)
        self._factors = np.array([one.factor(usual) for one in self._requests.values()])
        self._chances = np.minimum(self._factors[:, None] / usual * self.rates, MOST)

    def starts(self, num_rows: int) -> bool:
        """Return whether to draft in this step; every `RETRY` steps the first level is drafted."""
        pays = self._gains.get(num_rows.bit_length(), MARGIN) >= MARGIN
        self._idle = 0 if pays or self._idle == RETRY else self._idle + 1
        return not self._idle

    def note(self, rows: list[int], level: int, logits: Float[Tensor, "row 1 vocab"]) -> None:
        """Replace the probabilities of a level by those of the tokens that were drafted."""
        probs = (logits.amax(-1) - logits.logsumexp(-1)).exp()[:, 0].float().cpu().numpy()
        self._chances[rows, level] = self.curves[level].at(probs)

    def continues(self, rows: list[int], levels: int, positions: int) -> bool:
        """Return whether to draft another level for these rows, after so many."""
        chances = self._corrected(rows, levels)
        # one level ahead is enough: levels cost the same and survival falls
        now, then = (self._best(chances[:, : levels + more], positions)[0] for more in (0, 1))
        # values that differ by rounding only are equal
        return then > now * (1 + 1e-9)

    def cut(self, drafts: list[list[int]], positions: int) -> list[list[int]]:
        """Return the part of each chain to verify."""
        rows = [row for row, chain in enumerate(drafts) if chain]
        levels = max(map(len, drafts))
        for one, chances, chain in zip(self._requests.values(), self._chances, drafts, strict=True):
            one.chain, one.chances = chain, chances[: len(chain)].copy()
            chances[len(chain) :] = 0.0
        chances = self._corrected(rows, levels)[:, :levels]
        goodput, count = self._best(chances, positions)
        gain = goodput * self.verify.now.seconds(len(rows), positions) / len(rows)
        size = len(rows).bit_length()
        self._gains[size] = gain + (1 - WEIGHT) * (self._gains.get(size, gain) - gain)
        chosen = np.argsort(-chances.cumprod(1), axis=None, kind="stable")[:count] // levels
        kept = dict(zip(rows, np.bincount(chosen, minlength=len(rows)).tolist(), strict=True))
        return [chain[: kept.get(row, 0)] for row, chain in enumerate(drafts)]

    def _corrected(self, rows: list[int], levels: int) -> Chances:
        """Return the probabilities of these rows, and correct the drafted levels."""
        chances = self._chances[rows]
        drafted = chances[:, :levels] * self._factors[rows, None]
        chances[:, :levels] = np.minimum(drafted, MOST)
        return chances

    def _best(self, chances: Chances, positions: int) -> tuple[float, int]:
        """Return the goodput in tokens per second, and the number of tokens to verify."""
        rows, levels = chances.shape
        survivals = -np.sort(-chances.cumprod(1), axis=None)
        drafting = levels * self.draft.now.seconds(rows, positions)

        def seconds(tokens: Any) -> Any:
            return self.verify.now.seconds(tokens, positions) + drafting

        count = num_verified(survivals, rows, seconds)
        return (rows + survivals[:count].sum()) / seconds(rows + count), count

"""Choose how many tokens of each request's chain an engine verifies: see `ChainBudget`."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

import torch
from jaxtyping import Float
from torch import Tensor

from specheads.decoding.calibration import Curve
from specheads.decoding.cost import FollowedCost, StepCost
from specheads.decoding.suffix_decoding import common_prefix_length

RETRY = 32
"""Steps without a draft after which the first level is drafted again."""
WEIGHT, RATE_WEIGHT = 0.05, 0.02
"""Weights of a new observation in moving averages of a request, and of all requests' rates."""
PRIOR = 4.0
"""Accepted drafts that the start of a request's correction counts as."""
MARGIN = 1.05
"""Least gain in expected tokens per second for which a step begins to draft."""
MAX_CHANCE = 0.999
"""Largest probability of acceptance."""


def num_verified(
    survivals: Sequence[float], num_rows: int, seconds: Callable[[float], float]
) -> tuple[int, float]:
    """Return how many drafted tokens to verify, and the expected tokens per second, the most.

    Args:
        survivals: The probability that each drafted token of all rows is accepted, from the largest
            on: the product of the conditional ones along its path. The first n are thus trees.
        num_rows: Rows of the batch; each also gets one token of the base's own.
        seconds: Seconds of a step that verifies so many tokens, roots included.

    The smallest of equal numbers is returned; zero does not draft.
    """
    tokens = float(num_rows)
    count, best = 0, tokens / seconds(tokens)
    for number, survival in enumerate(survivals, 1):
        tokens += survival
        goodput = tokens / seconds(num_rows + number)
        # values that differ by rounding only are equal
        if goodput > best * (1 + 1e-9):
            count, best = number, goodput
    return count, best


@dataclass(slots=True)
class RequestDrafts:
    """Observations of the drafts of one request, or of all."""

    chain: list[int] = field(default_factory=list)
    """The last draft, with the tokens that the engine did not verify."""
    chances: list[float] = field(default_factory=list)
    """Calibrated probability that each token of it is accepted, given those before."""
    accepted: float = 0.0
    """Number of tokens that were right; earlier ones weigh less."""
    expected: float = 0.0
    """Sum of the probabilities of the same drafts."""

    def factor(self, start: float) -> float:
        """Return accepted over expected tokens; `start` is the value of no observation."""
        return (self.accepted + PRIOR * start) / (self.expected + PRIOR)

    def add(self, num_right: int, expected: float) -> None:
        """Add the observed tokens of a draft."""
        self.accepted += num_right - WEIGHT * self.accepted
        self.expected += expected - WEIGHT * self.expected


class ChainBudget:
    """Chooses how many levels to draft, and how many tokens of each chain to verify.

    Tokens are taken in the order of the probability that they are accepted, as long as the expected
    tokens per second of the whole batch rise. That of a drafted token is the head's own, calibrated
    and corrected by what the request accepted lately. Where chains of unequal length cost `ragged`
    further seconds per row, equal ones are an alternative. A step drafts at all if drafts paid
    lately in batches of this size. Rows are those of the engine's batch, and `positions` counts the
    committed tokens of all rows that draft.

    Source: Liu et al. 2024, arXiv:2406.14066 (SmartSpec), token by token.
    """

    def __init__(
        self,
        cost: StepCost,
        rates: Sequence[float],
        curves: Sequence[Curve],
        ragged: float = 0.0,
    ) -> None:
        self.rates, self.curves, self.ragged = [*rates], curves, ragged
        self.verify, self.draft = FollowedCost(cost.verify), FollowedCost(cost.draft)
        self._requests: dict[str, RequestDrafts] = {}
        self._all = RequestDrafts()
        self._gains: dict[int, float] = {}
        """Moving average of the tokens per second with drafts over those without, by the number of
        binary digits of the batch size."""
        self._idle = 0
        self._chances: list[list[float]]
        """Conditional probabilities of each row by level. A level that is not drafted has a usual
        rate. Lists, because arrays are slower for so few numbers."""

    def observe(self, requests: Sequence[str], sampled: Sequence[list[int]]) -> None:
        """Compare the last drafts of the requests of a batch with the tokens that followed."""
        earlier = self._requests
        self._requests = {request: earlier.get(request) or RequestDrafts() for request in requests}
        for drafts, tokens in zip(self._requests.values(), sampled, strict=True):
            # tokens that were not verified count too, because those that were are easier
            if num_compared := min(len(drafts.chain), len(tokens)):
                num_right = common_prefix_length(drafts.chain, tokens)
                num_observed = min(num_right + 1, num_compared)
                expected = sum(drafts.chances[:num_observed])
                drafts.add(num_right, expected)
                self._all.add(num_right, expected)
                for level in range(num_observed):
                    self.rates[level] += RATE_WEIGHT * ((level < num_right) - self.rates[level])
                drafts.chain = []
        usual = self._all.factor(1.0)
        self._factors = [drafts.factor(usual) for drafts in self._requests.values()]
        self._chances = [
            [min(factor / usual * rate, MAX_CHANCE) for rate in self.rates]
            for factor in self._factors
        ]

    def should_draft(self, num_rows: int) -> bool:
        """Return whether to draft in this step; every `RETRY` steps the first level is drafted."""
        pays = self._gains.get(num_rows.bit_length(), MARGIN) >= MARGIN
        self._idle = 0 if pays or self._idle == RETRY else self._idle + 1
        return not self._idle

    def update_level(
        self, rows: list[int], level: int, logits: Float[Tensor, "row 1 vocab"]
    ) -> None:
        """Replace the probabilities of a level by those of the tokens that were drafted."""
        probs = logits.softmax(-1, dtype=torch.float32).amax(-1)[:, 0].cpu().numpy()
        for row, chance in zip(rows, self.curves[level].at(probs).tolist(), strict=True):
            self._chances[row][level] = chance

    def should_draft_level(self, rows: list[int], levels: int, positions: int) -> bool:
        """Return whether to draft another level for these rows, after so many."""
        # one level ahead is enough: levels cost the same and survival falls
        deeper = self._survivals(rows, levels, levels + 1)
        current = [survivals[:-1] for survivals in deeper]
        goodput, deeper_goodput = (
            self._best_cut(survivals, positions)[1] for survivals in (current, deeper)
        )
        # values that differ by rounding only are equal
        return deeper_goodput > goodput * (1 + 1e-9)

    def cut_chains(self, drafts: list[list[int]], positions: int) -> list[list[int]]:
        """Return the part of each chain to verify."""
        rows = [row for row, chain in enumerate(drafts) if chain]
        levels = max(map(len, drafts))
        requests = self._requests.values()
        for request, chances, chain in zip(requests, self._chances, drafts, strict=True):
            request.chain, request.chances = chain, chances[: len(chain)]
            chances[len(chain) :] = [0.0] * (len(chances) - len(chain))
        survivals = self._survivals(rows, levels, levels)
        lengths, goodput = self._best_cut(survivals, positions)
        gain = goodput * self.verify.current.seconds(len(rows), positions) / len(rows)
        size = len(rows).bit_length()
        self._gains[size] = gain + (1 - WEIGHT) * (self._gains.get(size, gain) - gain)
        length_of = dict(zip(rows, lengths, strict=True))
        return [chain[: length_of.get(row, 0)] for row, chain in enumerate(drafts)]

    def _survivals(self, rows: list[int], drafted: int, levels: int) -> list[list[float]]:
        """Return the probability of each row that so many levels are accepted.

        Those of the drafted levels are corrected by what the request accepted lately.
        """
        paths = []
        for row in rows:
            chances, factor = self._chances[row], self._factors[row]
            corrected = [min(chance * factor, MAX_CHANCE) for chance in chances[:drafted]]
            paths.append([*accumulate([*corrected, *chances[drafted:levels]], mul)])
        return paths

    def _best_cut(self, survivals: list[list[float]], positions: int) -> tuple[list[int], float]:
        """Return how many tokens of each chain to verify, and the goodput in tokens per second."""
        rows, levels = len(survivals), len(survivals[0])
        drafting = levels * self.draft.current.seconds(rows, positions)

        def seconds(drafts: float) -> float:
            return self.verify.current.seconds(rows + drafts, positions) + drafting

        # whole levels of all rows
        totals = [sum(level) for level in zip(*survivals, strict=True)]
        level, best = num_verified(totals, rows, lambda tokens: seconds(rows * (tokens - rows)))
        nodes = [(survival, row) for row, path in enumerate(survivals) for survival in path]
        nodes.sort(reverse=True)
        extra_seconds = self.ragged * rows
        count, goodput = num_verified(
            [survival for survival, _ in nodes],
            rows,
            lambda tokens: seconds(tokens - rows) + extra_seconds,
        )
        # values that differ by rounding only are equal
        if goodput <= best * (1 + 1e-9):
            return [level] * rows, best
        lengths = Counter(row for _, row in nodes[:count])
        return [lengths[row] for row in range(rows)], goodput

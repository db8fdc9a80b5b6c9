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

FIRST_TRIAL, LAST_TRIAL, TRIALS = 4, 128, 256
"""Steps between trials of the other choice, to draft or not. They double from the first number up
to the last, or to `TRIALS` times what the choices differ, so that trials cost little."""
WEIGHT, RATE_WEIGHT, GAIN_WEIGHT = 0.05, 0.02, 0.1
"""Weights of a new observation in moving averages of a request, of all requests' rates, and of
gains."""
PRIOR = 4.0
"""Accepted drafts that the start of a request's correction counts as."""
MARGIN = 1.02
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


@dataclass(slots=True)
class BatchCost:
    """What steps of about as many rows took, and whether drafts paid in them."""

    verify: FollowedCost
    """By the tokens of a step."""
    draft: FollowedCost
    """By the levels of a draft."""
    gain: float = MARGIN
    """Moving average of the tokens per second with drafts over those without."""
    num_gains: int = 0
    pays: bool = True
    """Whether the last steps drafted, but for trials."""
    num_steps: int = 0
    """Steps since the last trial of the other choice."""
    interval: int = FIRST_TRIAL
    """Steps until the next one."""

    def next_step(self) -> tuple[bool, bool]:
        """Return whether to draft in the next step, and whether that is a trial."""
        pays = self.gain >= MARGIN
        if pays != self.pays:
            self.pays, self.num_steps, self.interval = pays, 0, FIRST_TRIAL
        self.num_steps += 1
        is_trial = self.num_steps > self.interval
        if is_trial:
            longest = min(FIRST_TRIAL + TRIALS * abs(self.gain - 1), LAST_TRIAL)
            self.num_steps, self.interval = 0, min(2 * self.interval, int(longest))
        return pays != is_trial, is_trial

    def add_gain(self, gain: float) -> None:
        """Add the gain of a step that drafted."""
        self.num_gains += 1
        self.gain += max(GAIN_WEIGHT, 1 / self.num_gains) * (gain - self.gain)
        if not self.pays and gain >= MARGIN:
            self.interval = FIRST_TRIAL


class ChainBudget:
    """Chooses how many levels to draft, and how many tokens of each chain to verify.

    Tokens are taken in the order of the probability that they are accepted, as long as the expected
    tokens per second of the whole batch rise. That of a drafted token is the head's own, calibrated
    and corrected by what the request accepted lately. Where chains of unequal length cost `ragged`
    further seconds per row, equal ones are an alternative. A step drafts at all if drafts paid
    lately in batches of this size. Rows are those of the engine's batch, and `positions` counts the
    committed tokens of all rows that draft.

    The measured cost is only a start. It is corrected by the seconds that drafts and forwards take,
    for each number of binary digits of the batch size. Now and then a step without a draft, or one
    with a draft where none pay, is run to know its seconds.

    Source: Liu et al. 2024, arXiv:2406.14066 (SmartSpec), token by token.
    """

    def __init__(
        self, cost: StepCost, rates: Sequence[float], curves: Sequence[Curve], ragged: float = 0.0
    ) -> None:
        self.cost, self.rates, self.curves, self.ragged = cost, [*rates], curves, ragged
        self._requests: dict[str, RequestDrafts] = {}
        self._all = RequestDrafts()
        self._batches: dict[int, BatchCost] = {}
        """By the number of binary digits of the batch size."""
        self._is_trial = False
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

    def follow_verify(self, num_drafts: Sequence[int], positions: int, seconds: float) -> None:
        """Follow a forward that verified so many drafts of each row, and read no prompt."""
        rows, drafts = len(num_drafts), sum(num_drafts)
        is_ragged = len({*num_drafts}) > 1
        batch, forward = self._batch(rows), self._forward(rows, drafts, positions, is_ragged)
        if batch.verify.follow(*forward, seconds):
            # earlier gains are of a cost that knew less
            batch.num_gains = 0

    def follow_draft(self, rows: int, levels: int, positions: int, seconds: float) -> None:
        """Follow a draft of so many levels of rows whose earlier positions were read."""
        expected = levels * self.cost.draft.seconds(rows, positions)
        self._batch(rows).draft.follow(levels, levels, expected, seconds)

    def should_draft(self, num_rows: int) -> bool:
        """Return whether to draft in this step."""
        drafts, self._is_trial = self._batch(num_rows).next_step()
        return drafts

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
        batch = self._batch(len(rows))
        alone = batch.verify.seconds(*self._forward(len(rows), 0, positions, is_ragged=False))
        batch.add_gain(goodput * alone / len(rows))
        if self._is_trial and not any(lengths):
            # otherwise the seconds of a verified token stay unknown
            lengths = [1] * len(rows)
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
        batch = self._batch(rows)
        drafting = levels * self.cost.draft.seconds(rows, positions)
        drafting = batch.draft.seconds(levels, levels, drafting)

        def seconds(drafts: float, *, is_ragged: bool) -> float:
            forward = self._forward(rows, drafts, positions, is_ragged)
            return drafting + batch.verify.seconds(*forward)

        # whole levels of all rows
        totals = [sum(level) for level in zip(*survivals, strict=True)]
        level, best = num_verified(
            totals, rows, lambda tokens: seconds(rows * (tokens - rows), is_ragged=False)
        )
        nodes = [(survival, row) for row, path in enumerate(survivals) for survival in path]
        nodes.sort(reverse=True)
        count, goodput = num_verified(
            [survival for survival, _ in nodes],
            rows,
            # a step without drafts is not ragged
            lambda tokens: seconds(tokens - rows, is_ragged=tokens > rows),
        )
        # values that differ by rounding only are equal
        if goodput <= best * (1 + 1e-9):
            return [level] * rows, best
        lengths = Counter(row for _, row in nodes[:count])
        return [lengths[row] for row in range(rows)], goodput

    def _forward(
        self, rows: int, drafts: float, positions: int, is_ragged: bool
    ) -> tuple[float, int, float]:
        """Return tokens, shape and measured seconds of a forward that verifies so many drafts."""
        seconds = self.cost.verify.seconds(rows + drafts, positions)
        if is_ragged:
            seconds += self.ragged * rows
        return rows + drafts, 2 * round(drafts / rows) + is_ragged, seconds

    def _batch(self, rows: int) -> BatchCost:
        """Return the cost of batches of about so many rows."""
        size = rows.bit_length()
        if size not in self._batches:
            verify, level = self.cost.verify, self.cost.draft.seconds(rows, 0)
            usual = verify.seconds(2 * rows, 0)
            self._batches[size] = BatchCost(
                FollowedCost(usual, verify.fixed, verify.token), FollowedCost(level, level, level)
            )
        return self._batches[size]

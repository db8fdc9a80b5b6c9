"""The probability that a drafted token is accepted, from the head's own probability of it.

A head is trained to the base's distribution, and greedy decoding accepts the base's best token, so
its probabilities of best guesses are too low. A curve for each depth corrects them by a temperature
and a bias of the log-odds (Platt 1999). The error is that of Guo et al. 2017, arXiv:1706.04599.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from specheads.core.drafter import Drafter, State
from specheads.core.errors import InputError
from specheads.core.ranges import NonEmpty, PositiveInt, Probability

BINS = 15
"""Bins of equal width of the calibration error, as in Guo et al."""
KNOTS = 33
"""Knots of a fitted curve."""
MIN_PROB = 1e-3
"""Least probability of a calibrated draft, and of a rejection."""
Chances = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reliability:
    """How often drafts were accepted next to their probability, in bins of the probability.

    Errors are expected calibration errors (ECE): see `calibration_error`.
    """

    error_before: Probability
    """Error of the head's own probabilities."""
    error: Probability
    """Error of the calibrated ones."""
    counts: Annotated[list[PositiveInt], NonEmpty]
    """Number of drafts in each bin that is not empty."""
    chances: list[Probability]
    """Mean calibrated probability in each bin."""
    accepted: list[Probability]
    """Share of accepted drafts in each bin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Piecewise linear curve from a head's probability of a drafted token to its acceptance.

    The acceptance is conditional: given that the token's parent was accepted.
    """

    probs: Annotated[list[Probability], NonEmpty]
    """The head's probabilities at the knots, increasing."""
    accepted: Annotated[list[Probability], NonEmpty]
    """Probabilities of acceptance at the knots, not decreasing."""
    judged: Reliability | None = None
    """Measured on texts that the curve was not fitted to."""

    def __post_init__(self) -> None:
        """Refuse a damaged curve."""
        rising = np.diff(self.probs) > 0, np.diff(self.accepted) >= 0
        if len(self.probs) != len(self.accepted) or not all(map(np.all, rising)):
            raise InputError(
                "a calibration curve has increasing probs, and as many values of accepted that do "
                f"not decrease, got {self.probs!r:.60} and {self.accepted!r:.60}"
            )

    def at(self, probs: ArrayLike) -> Chances:
        """Return the probability of acceptance for each of the head's probabilities."""
        return np.interp(np.asarray(probs), self.probs, self.accepted)


def calibration_error(probs: Chances, accepted: NDArray[np.bool_]) -> float:
    """Return the expected calibration error (ECE) over `BINS` bins of equal width.

    It is the mean distance between the probability and the share accepted, over all drafts.
    """
    errors = [abs(float(np.sum(probs[drafts] - accepted[drafts]))) for drafts in bin_drafts(probs)]
    return sum(errors) / len(probs)


def bin_drafts(probs: Chances) -> list[NDArray[np.int64]]:
    """Return the indices of the drafts in each of `BINS` bins; empty bins are left out."""
    bins = np.minimum((probs * BINS).astype(int), BINS - 1)
    return [np.flatnonzero(bins == index) for index in np.unique(bins)]


def fit_curve(
    probs: Chances,
    accepted: NDArray[np.bool_],
    judged_probs: Chances,
    judged_accepted: NDArray[np.bool_],
) -> Curve:
    """Fit a temperature and a bias of the log-odds to some drafts; judge the curve on others."""

    def inputs(probs: Chances) -> Tensor:
        clipped = torch.from_numpy(np.clip(probs, MIN_PROB, 1 - MIN_PROB))
        return torch.stack([torch.ones_like(clipped), clipped.logit()], dim=1)

    knots = np.linspace(0.0, 1.0, KNOTS)
    weights = logistic_regression(inputs(probs), torch.from_numpy(accepted), [0.0, 1.0])
    chances = (inputs(knots) @ weights).sigmoid().numpy()
    if weights[1] < 0:
        # a falling curve would reorder guesses
        chances = np.full(KNOTS, accepted.mean())
    chances = np.clip(chances, MIN_PROB, 1 - MIN_PROB)
    curve = Curve(probs=knots.tolist(), accepted=chances.tolist())
    return replace(curve, judged=reliability(curve, judged_probs, judged_accepted))


def reliability(curve: Curve, probs: Chances, accepted: NDArray[np.bool_]) -> Reliability:
    """Return how a curve does on drafts, at least one."""
    chances = curve.at(probs)
    bins = bin_drafts(chances)
    return Reliability(
        error_before=calibration_error(probs, accepted),
        error=calibration_error(chances, accepted),
        counts=[len(drafts) for drafts in bins],
        chances=[float(chances[drafts].mean()) for drafts in bins],
        accepted=[float(accepted[drafts].mean()) for drafts in bins],
    )


def logistic_regression(
    inputs: Float64[Tensor, "row column"], labels: Bool[Tensor, " row"], prior: Sequence[float]
) -> Float64[Tensor, " column"]:
    """Return the weight of each column, with a ridge towards the prior.

    The ridge keeps weights finite for labels without a mistake.
    """
    start = torch.tensor(prior, dtype=torch.float64)
    weights, targets = start.clone().requires_grad_(), labels.double()
    optimizer = torch.optim.LBFGS([weights], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.binary_cross_entropy_with_logits(inputs @ weights, targets, reduction="sum")
        value = value + 0.5e-2 * (weights - start).square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return weights.detach()


# --- chains that stop early ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceEstimate:
    """Probability that a drafted token is accepted: a logistic regression on traces.

    Source: Mamou et al. 2024, arXiv:2405.04304 (DISCO), for its inputs; DISCO uses a small network.
    """

    bias: float
    log_prob: float
    """Weight of the token's log-probability under the drafter."""
    entropy: float
    """Weight of the entropy of the drafter's distribution, in nats."""
    level: float
    """Weight of the number of drafted tokens above it."""

    def __call__(self, log_probs: Tensor, entropies: Tensor, level: int | Tensor) -> Tensor:
        """Return the probability, element by element."""
        weighed = self.log_prob * log_probs + self.entropy * entropies
        return (self.bias + self.level * level + weighed).sigmoid()


def acceptance_chances(
    drafter: Drafter,
    estimate: AcceptanceEstimate | None,
    logits: Float[Tensor, "batch level vocab"],
    state: State,
    drafted: Int[Tensor, "batch node"],
    parents: Int[Tensor, " node"],
    level: int,
) -> Float[Tensor, "batch node"]:
    """Return how likely each node of a level is to be accepted.

    This is the estimate, if there is one, or the token's probability under the drafter. A drafter
    with its own estimate uses that for its best guess, and for others in proportion to their
    probability. `logits` and `state` are those of the level above, `drafted` are the columns of
    this level's nodes, and `level` is the number of drafted tokens above them.
    """
    logs = logits.log_softmax(-1)
    chosen = logs[:, parents].gather(-1, drafted[..., None])[..., 0]
    if estimate is not None:
        return estimate(chosen, entropy(logs)[:, parents], level)
    if (sure := drafter.confidence(state)) is not None:
        return (chosen - logs.amax(-1)[:, parents]).exp() * sure[:, parents]
    return chosen.exp()


def entropy(log_probs: Float[Tensor, "*any vocab"]) -> Float[Tensor, "*any"]:
    """Return the entropy of distributions in nats; probabilities of zero add nothing."""
    return torch.special.entr(log_probs.exp()).sum(-1)

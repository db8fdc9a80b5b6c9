"""The probability that a drafted token is accepted, from the head's own probability of it.

A head is trained to the base's distribution, and greedy decoding accepts the base's best token: its
probabilities are too low for sure tokens and too high for others. A curve for each depth corrects
them: temperature scaling (Guo et al. 2017, arXiv:1706.04599) of the token's log-odds, or isotonic
regression (Zadrozny and Elkan 2002), whichever has the lower log loss on other texts.
"""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from specheads.core.errors import InputError
from specheads.core.ranges import NonEmpty, NonNegativeInt, Probability, one_of

BINS = 15
"""Bins of equal width of the calibration error, as in Guo et al."""
KNOTS = 33
"""Knots of a temperature's curve, and most blocks of an isotonic one."""
TEMPERATURES = np.geomspace(0.2, 5.0, 65)
"""Temperatures to choose from."""
LEAST = 1e-3
"""Least probability of a calibrated draft, and of a rejection."""
Chances = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Piecewise linear curve from a head's probability of a drafted token to its acceptance.

    The acceptance is conditional: given that the token's parent was accepted.
    """

    kind: Annotated[str, one_of("temperature", "isotonic")]
    probs: Annotated[list[Probability], NonEmpty]
    """The head's probabilities at the knots, increasing."""
    accepted: Annotated[list[Probability], NonEmpty]
    """Probabilities of acceptance at the knots, not decreasing."""
    error_before: Probability = 0.0
    """Calibration error of the head's own probabilities, on texts that the curve was not fitted to:
    see `calibration_error`."""
    error: Probability = 0.0
    """Calibration error of the curve on the same texts."""
    num_judged: NonNegativeInt = 0
    """Number of drafts of these errors."""

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

    def of(self, probs: Tensor) -> Tensor:
        """Return the same for a tensor, on its device and of its shape."""
        knots, values = (probs.new_tensor(one) for one in (self.probs, self.accepted))
        if len(knots) == 1:
            return values.expand_as(probs)
        after = torch.searchsorted(knots, probs.contiguous()).clamp(1, len(knots) - 1)
        share = (probs - knots[after - 1]) / (knots[after] - knots[after - 1])
        return torch.lerp(values[after - 1], values[after], share.clamp(0.0, 1.0))


def calibration_error(probs: Chances, accepted: NDArray[np.bool_]) -> float:
    """Return the expected calibration error (ECE) over `BINS` bins of equal width.

    It is the mean distance between the probability and the share accepted, over all drafts.
    """
    return sum(abs(float(np.sum(probs[one] - accepted[one]))) for one in bins(probs)) / len(probs)


def bins(probs: Chances) -> list[NDArray[np.int64]]:
    """Return the indices of the drafts in each of `BINS` bins; empty bins are left out."""
    place = np.minimum((probs * BINS).astype(int), BINS - 1)
    return [found for one in range(BINS) if len(found := np.flatnonzero(place == one))]


def log_loss(probs: Chances, accepted: NDArray[np.bool_]) -> float:
    """Return the mean negative log-likelihood in nats."""
    likely = np.where(accepted, probs, 1 - probs)
    return float(-np.log(np.maximum(likely, 1e-12)).mean())


def fit_curve(
    probs: Chances,
    accepted: NDArray[np.bool_],
    judged_probs: Chances,
    judged: NDArray[np.bool_],
) -> Curve:
    """Fit both kinds of curve to some drafts; return the one with the lower log loss on others."""
    curves = temperature(probs, accepted), isotonic(probs, accepted)
    best = min(curves, key=lambda curve: log_loss(curve.at(judged_probs), judged))
    return Curve(
        kind=best.kind,
        probs=best.probs,
        accepted=best.accepted,
        error_before=calibration_error(judged_probs, judged),
        error=calibration_error(best.at(judged_probs), judged),
        num_judged=len(judged),
    )


def temperature(probs: Chances, accepted: NDArray[np.bool_]) -> Curve:
    """Return the curve that divides log-odds by the temperature of the least log loss."""

    def scaled(probs: Chances, temperature: float) -> Chances:
        inside = np.clip(probs, LEAST, 1 - LEAST)
        return 1 / (1 + ((1 - inside) / inside) ** (1 / temperature))

    best = min(TEMPERATURES, key=lambda one: log_loss(scaled(probs, one), accepted))
    knots = np.linspace(0.0, 1.0, KNOTS)
    return _curve("temperature", knots, scaled(knots, best))


def isotonic(probs: Chances, accepted: NDArray[np.bool_]) -> Curve:
    """Return the curve of isotonic regression, which is level within each block.

    Neighbours are merged until shares do not decrease (pool adjacent violators). Drafts are first
    grouped by quantiles, so that no block rests on a few drafts.
    """
    order = np.argsort(probs, kind="stable")
    blocks: list[NDArray[np.int64]] = []
    for group in np.array_split(order, min(KNOTS, max(1, len(order) // 20))):
        block = group
        # a block must also begin above the end of the one before
        while blocks and (
            accepted[block].mean() <= accepted[blocks[-1]].mean()
            or probs[block[0]] <= probs[blocks[-1][-1]]
        ):
            block = np.concatenate([blocks.pop(), block])
        blocks.append(block)
    ends = [(probs[block[0]], probs[block[-1]], accepted[block].mean()) for block in blocks]
    knots = {prob: share for *both, share in ends for prob in both}
    return _curve("isotonic", np.array([*knots]), np.array([*knots.values()]))


def _curve(kind: str, probs: Chances, accepted: Chances) -> Curve:
    bounded = np.clip(accepted, LEAST, 1 - LEAST)
    return Curve(kind=kind, probs=probs.tolist(), accepted=bounded.tolist())

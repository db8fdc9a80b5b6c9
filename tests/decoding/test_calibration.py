"""Calibration turns a head's probabilities into shares of accepted drafts."""

import numpy as np
import pytest

from specheads.core.errors import InputError
from specheads.decoding.calibration import Curve, calibration_error, fit_curve


def drafts(truth, count: int = 20_000, seed: int = 0):
    """Return probabilities of a head, and whether drafts accepted with `truth(p)` were accepted."""
    generator = np.random.default_rng(seed)
    probs = generator.beta(0.7, 0.7, count)
    return probs, generator.random(count) < truth(probs)


def sharper(probs):
    """A temperature of one half, and a bias."""
    return 2 * probs**2 / (2 * probs**2 + (1 - probs) ** 2)


def test_a_fitted_curve_is_calibrated_on_other_drafts():
    curve = fit_curve(*drafts(sharper), *drafts(sharper, seed=1))
    assert curve.judged is not None
    assert curve.judged.error < 0.015
    assert curve.judged.error_before > 0.08
    assert sum(curve.judged.counts) == 20_000
    probs, accepted = drafts(sharper, seed=2)
    assert calibration_error(curve.at(probs), accepted) < 0.015


def test_a_calibration_error_is_the_mean_distance_of_bins():
    probs = np.array([0.01, 0.05, 0.95, 1.0])
    # the first bin: |0.06 - 1|, the last: |1.95 - 1|
    error = calibration_error(probs, np.array([True, False, True, False]))
    assert error == pytest.approx((0.94 + 0.95) / 4)


def test_few_or_equal_drafts_give_a_curve():
    falling = [0.1] * 20 + [0.9] * 20, [True] * 20 + [False] * 20
    for probs, accepted in (([0.4], [True]), ([0.4] * 50, [True, False] * 25), falling):
        texts = np.array(probs), np.array(accepted)
        assert 0 < fit_curve(*texts, *texts).at(0.4) < 1


@pytest.mark.parametrize(
    ("probs", "accepted"), [([0.1, 0.1], [0.2, 0.3]), ([0.1, 0.2], [0.3, 0.2]), ([0.1], [0.1, 0.2])]
)
def test_a_damaged_curve_is_refused(probs, accepted):
    with pytest.raises(InputError, match="increasing probs"):
        Curve(probs=probs, accepted=accepted)

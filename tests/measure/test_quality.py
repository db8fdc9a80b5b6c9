"""The base's own quality on windows of text, and its change."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from specheads.measure.quality import compare_quality, measure_quality
from tests import tiny


def test_quality_scores_each_window_by_itself():
    base = tiny.base("granite")
    windows = [[3, 1, 4, 1, 5], [9, 2, 6]]
    found = measure_quality(base, windows)
    for window, (nats, right, number) in zip(windows, found, strict=True):
        tokens = torch.tensor([window])
        with torch.no_grad():
            logits = base.model(input_ids=tokens, use_cache=False).logits[0, :-1]
        wanted = F.cross_entropy(logits, tokens[0, 1:], reduction="sum").item()
        assert nats == pytest.approx(wanted, rel=1e-12)
        assert right == (logits.argmax(-1) == tokens[0, 1:]).sum()
        assert number == len(window) - 1


def test_quality_has_token_means_and_a_paired_change():
    section = compare_quality([(6.0, 1, 3), (2.0, 1, 1)], [(7.5, 2, 3), (2.5, 1, 1)])
    before, after, change = section["before"], section["after"], section["change"]
    assert (before.cross_entropy, before.accuracy) == (2.0, 0.5)
    assert (after.cross_entropy, after.accuracy) == (2.5, 0.75)
    # both windows became worse by half a nat per token, so the interval has no width
    assert (change.cross_entropy, change.cross_entropy_interval) == (0.5, (0.5, 0.5))
    assert change.accuracy == 0.25
    low, high = before.accuracy_interval
    assert low < 0.5 < high

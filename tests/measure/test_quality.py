"""The base's own quality on windows of text, and its change."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from specheads.measure.quality import Quality, compare_quality, measure_quality
from specheads.measure.results import QualityChange
from specheads.measure.summary import summary
from tests import tiny
from tests.results import bare


def test_quality_scores_each_window_by_itself():
    base = tiny.base("granite")
    windows = [[3, 1, 4, 1, 5], [9, 2, 6]]
    found = measure_quality(base, windows)
    assert found.tokens == [4, 2]
    for place, window in enumerate(windows):
        tokens = torch.tensor([window])
        with torch.no_grad():
            logits = base.model(input_ids=tokens, use_cache=False).logits[0, :-1]
        nats = F.cross_entropy(logits, tokens[0, 1:], reduction="sum").item()
        assert found.nats[place] == pytest.approx(nats, rel=1e-12)
        assert found.right[place] == (logits.argmax(-1) == tokens[0, 1:]).sum()


def test_quality_has_token_means_and_a_paired_change():
    before = Quality(nats=[6.0, 2.0], right=[1, 1], tokens=[3, 1])
    after = Quality(nats=[7.5, 2.5], right=[2, 1], tokens=[3, 1])
    section = compare_quality(before, after)
    assert section.before.cross_entropy == 2.0
    assert section.before.accuracy == 0.5
    assert section.after.cross_entropy == 2.5
    assert section.after.accuracy == 0.75
    # both windows became worse by half a nat per token, so the interval has no width
    assert section.change == QualityChange(cross_entropy=0.5, interval=(0.5, 0.5))
    assert section.before.windows == 2
    low, high = section.before.accuracy_interval
    assert low < 0.5 < high


@pytest.mark.parametrize("windows", [[], [[1, 2], [3]]])
def test_windows_of_one_token_raise(windows: list[list[int]]):
    with pytest.raises(ValueError, match="two tokens at least"):
        measure_quality(tiny.base(), windows)


def test_report_shows_base_quality():
    before = Quality([6.0], [1], [3])
    results = replace(
        bare(base={"name": "b", "parameters": 20, "adapter": "runs/x/adapter"}),
        base_quality=compare_quality(before, Quality([6.3], [2], [3])),
    )
    rows = dict(summary(results))
    assert rows["base"] == "b + runs/x/adapter, 20 parameters"
    assert rows["nats per token, base"] == "2.0000 (2.0000 to 2.0000); 33.3% right"
    assert rows["nats per token, base + adapter"].startswith("2.1000")
    assert rows["change of the base's nats per token"].startswith("+0.1000")
    assert "nats per token, base" not in dict(summary(replace(results, base_quality=None)))

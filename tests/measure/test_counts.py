"""Counts, rates, intervals, the rule for looping text and the base's quality, by hand."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from specheads.measure.counts import (
    DepthCounts,
    bootstrap_interval,
    conditional_acceptance,
    is_repetitive,
    paired_gain,
)
from specheads.measure.evaluation import compare_quality, measure_quality
from specheads.measure.results import DraftCounts
from tests import tiny


def test_a_forward_offers_every_depth_up_to_the_first_rejection():
    counts = DepthCounts.zeros(3)
    counts.add(0, drafted_beyond=True)
    counts.add(2, drafted_beyond=True)
    counts.add(3, drafted_beyond=False)
    counts.add(1, drafted_beyond=False)
    assert counts.forwards == 4
    assert counts.offered == [4, 2, 2]
    assert counts.accepted == [3, 2, 1]
    assert counts.per_depth()[2] == DraftCounts(offered=2, accepted=1)
    assert counts.levels() == [3 / 4, 2 / 3, 1 / 2]


def test_prompts_of_one_source_are_resampled_together():
    # four sources of five equal prompts: 4 independent samples, not 20
    tokens = [value for value in (10, 14, 22, 30) for _ in range(5)]
    files = [f"file {row // 5}" for row in range(20)]
    separate, together = (bootstrap_interval(tokens, [10] * 20, names) for names in ((), files))
    assert together == bootstrap_interval([50, 70, 110, 150], [50] * 4)
    assert together[1] - together[0] > 1.5 * (separate[1] - separate[0])
    # a prompt without a source is a source of its own
    assert bootstrap_interval(tokens, [10] * 20, [""] * 20) == separate


def test_conditional_acceptance_has_an_interval_per_depth():
    counts = [DepthCounts(10, [10, 6, 0], [6, 3, 0]), DepthCounts(10, [10, 2, 0], [2, 1, 0])]
    first, second = conditional_acceptance(counts)
    assert (first.rate, second.rate) == (8 / 20, 4 / 8)
    assert first.interval == (0.2, 0.6)
    assert second.interval == (0.5, 0.5)


def test_interval_has_its_nominal_coverage():
    generator = torch.Generator().manual_seed(1)
    hits = 0
    for _ in range(200):
        tokens = 15 + 3 * torch.randn(40, generator=generator, dtype=torch.float64)
        low, high = bootstrap_interval(tokens.tolist(), [10.0] * 40)
        hits += low <= 1.5 <= high
    assert 180 <= hits <= 198
    # 50 of 100: 1.96 standard errors of 0.05 on both sides
    assert bootstrap_interval([0, 1] * 50, [1] * 100) == pytest.approx((0.4, 0.6), abs=0.011)


def test_prompts_without_a_forward_are_skipped():
    assert bootstrap_interval([3, 0, 4], [2, 0, 2]) == bootstrap_interval([3, 4], [2, 2])
    with pytest.raises(ValueError, match="got 2 prompts without one"):
        bootstrap_interval([0, 0], [0, 0])


def test_paired_gain_cancels_the_difficulty_of_prompts():
    # prompts differ tenfold; on each we need about a tenth fewer forwards
    forwards = [9 * size + size % 3 for size in range(10, 100, 10)]
    baseline_forwards = [10 * size for size in range(10, 100, 10)]
    # every prompt has 1,000 new tokens
    counts, baseline = (
        [DepthCounts(number, [], [1000 - number]) for number in numbers]
        for numbers in (forwards, baseline_forwards)
    )
    gain = paired_gain(counts, baseline)
    low, high = gain.interval
    assert low < gain.ratio < high
    assert gain.ratio == pytest.approx(sum(baseline_forwards) / sum(forwards))
    unpaired = bootstrap_interval([prompt.new_tokens for prompt in counts], forwards)
    assert high - low < 0.1 * (unpaired[1] - unpaired[0])
    equal = paired_gain(counts, counts)
    assert (equal.ratio, equal.interval) == (1.0, (1.0, 1.0))


@pytest.mark.parametrize("period", [1, 16])
def test_a_block_repeated_to_the_end_is_a_loop(period):
    assert is_repetitive([91, 92, 93, *(list(range(period)) * 48)[:48]])


def test_similar_text_is_not_a_loop():
    assert not is_repetitive([7] * 47), "shorter than the window"
    assert not is_repetitive([9, *[7] * 47]), "the window's first token differs"
    assert not is_repetitive([*[7] * 60, 8]), "it came out of the loop"
    assert not is_repetitive(list(range(17)) * 6), "the period is longer than 16"


def test_quality_scores_each_window_by_itself():
    base = tiny.base("granite")
    windows = [[3, 1, 4, 1, 5], [9, 2, 6]]
    scores = measure_quality(base, windows)
    for window, (nats, number) in zip(windows, scores, strict=True):
        tokens = torch.tensor([window])
        with torch.no_grad():
            logits = base.model(input_ids=tokens, use_cache=False).logits[0, :-1]
        expected = F.cross_entropy(logits, tokens[0, 1:], reduction="sum").item()
        assert nats == pytest.approx(expected, rel=1e-12)
        assert number == len(window) - 1


def test_quality_has_token_means_and_a_paired_change():
    section = compare_quality([(6.0, 3), (2.0, 1)], [(7.5, 3), (2.5, 1)])
    before, after, change = section["before"], section["after"], section["change"]
    assert (before.cross_entropy, after.cross_entropy) == (2.0, 2.5)
    # both windows became worse by half a nat per token, so the interval has no width
    assert (change.cross_entropy, change.cross_entropy_interval) == (0.5, (0.5, 0.5))

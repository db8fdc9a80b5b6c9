"""Simulated waiting times match queueing theory, and goodput has the shortest."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specheads.core.errors import InputError
from specheads.decoding.cost import ForwardCost, StepCost
from specheads.decoding.goodput import Goodput
from specheads.heads.load import build_for
from specheads.measure.simulate import (
    Arrival,
    Simulation,
    computed_cost,
    poisson,
    read_arrivals,
    sampled_lengths,
    simulate,
    sizes,
    summarise,
)
from tests import tiny

RATES = [0.8, 0.7, 0.6, 0.5]


def linear(fixed: float, token: float = 0.0, context: float = 0.0, share: float = 0.1) -> StepCost:
    drafted = ForwardCost(fixed=share * fixed, token=share * token, context=share * context)
    return StepCost(verify=ForwardCost(fixed=fixed, token=token, context=context), draft=drafted)


def run(
    cost: StepCost,
    arrivals: list[Arrival],
    right: Sequence[int] | None = None,
    rates: Sequence[float] = RATES,
    seed: int = 0,
    **how: Any,
) -> Simulation:
    """Simulate a chain whose drafts are `right`, in each request, or sampled from the rates."""
    each = [
        [*right] if right else sampled_lengths(rates, (seed, number), one.new_tokens)
        for number, one in enumerate(arrivals)
    ]
    return simulate(Goodput(cost, rates), arrivals, each, **how)


@pytest.mark.parametrize(
    "load", [0.6, *(pytest.param(one, marks=pytest.mark.slow) for one in (0.3, 0.8))]
)
def test_mean_wait_matches_m_d_1(load):
    # one row and a service time of 0.5 s: 0.25 s for the prompt and 0.25 s for one step
    number = 100_000 if load == 0.8 else 40_000
    arrivals = poisson(load / 0.5, number, prompt_tokens=1, new_tokens=2, seed=3)
    served = run(linear(0.25), arrivals, [0], depth=0).served
    theory = load * 0.5 / (2 * (1 - load))
    waits = [one.first - 0.25 - one.arrival.seconds for one in served]
    assert np.mean(waits) == pytest.approx(theory, rel=0.03)


def test_littles_law_holds():
    arrivals = poisson(9.0, 4000, prompt_tokens=30, new_tokens=20, seed=1)
    found = run(linear(0.02, 1e-3), arrivals, max_batch=8, depth=2)
    span = max(one.finished for one in found.served)
    rate = len(arrivals) / span
    times = np.random.default_rng(0).uniform(0, span, 20_000)[:, None]
    for begins, name in (("arrival", "all"), ("first", "served")):
        starts = np.array(
            [one.arrival.seconds if begins == "arrival" else one.first for one in found.served]
        )
        ends = np.array([one.finished for one in found.served])
        present = np.mean([((starts <= time) & (time < ends)).sum() for time in times[:, 0]])
        assert present == pytest.approx(rate * np.mean(ends - starts), rel=0.03), name
    # a request takes steps, or waits for the prompts of others
    in_steps = sum(one.batch * one.seconds for one in found.steps)
    assert in_steps <= sum(one.finished - one.first for one in found.served) * (1 + 1e-9)


def test_events_follow_the_engine():
    #  0.0  A arrives, its prompt takes until 2.0, its steps until 4.0
    #  3.0  B arrives; its prompt takes from 4.0 to 6.0, steps of both until 8.0 and 10.0
    arrivals = [Arrival(0.0, 10, 4), Arrival(3.0, 10, 3)]
    found = run(linear(2.0), arrivals, [0] * 4, max_batch=2, depth=0)
    first, second = found.served
    assert [(one.began, one.batch) for one in found.steps] == [(2, 1), (6, 2), (8, 2)]
    assert (first.first, first.finished) == (2.0, 10.0)
    assert (second.first, second.finished) == (6.0, 10.0)


def test_right_drafts_are_replayed_by_position():
    #  place     0 1 2 3 4 5    from the first token on: 2 drafts right, then at place 3 none,
    #  right     2 . . 0 1 .    at place 4 one, and the last token ends it
    arrivals, right = [Arrival(0.0, 1, 8)], [2, 9, 9, 0, 1, 9, 9, 9]
    found = run(linear(1.0), arrivals, right, depth=2)
    assert (len(found.steps), found.served[0].tokens) == (4, 8)
    assert len(run(linear(1.0), arrivals, right, depth=0).steps) == 7


def test_sampled_lengths_have_their_rates():
    found = np.array([sampled_lengths(RATES, (2, number), 500) for number in range(40)])
    reached = [(found >= level).mean() for level in range(5)]
    rates = [more / less for less, more in pairwise(reached)]
    assert rates == pytest.approx(RATES, abs=0.02)
    assert sampled_lengths(RATES, (2, 3), 50) != sampled_lengths(RATES, (3, 3), 50)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(one, marks=pytest.mark.slow) for one in (1, 2))]
)
def test_goodput_beats_every_fixed_depth_under_varying_load(seed):
    # a draft is cheap for one row; for 16 rows each node costs about a whole step
    cost = linear(0.02, 1.5e-3, 1e-7)
    parts = (0.2, 2.0, 0.2, 1.5)
    arrivals = poisson(5.0, 600, prompt_tokens=5, new_tokens=48, parts=parts, seed=seed)

    def figures(depth: int | None) -> tuple[float, float]:
        row = summarise("", "", run(cost, arrivals, seed=seed, max_batch=16, depth=depth))
        return row.latency.mean, row.tokens_per_second

    latency, speed = figures(None)
    fixed = [figures(depth) for depth in range(5)]
    assert latency < min(one for one, _ in fixed)
    assert speed >= 0.999 * max(one for _, one in fixed)


def test_goodput_with_wrong_drafts_is_the_base_alone():
    arrivals = poisson(3.0, 200, prompt_tokens=20, new_tokens=30)
    goodput, alone = (
        run(linear(0.02, 1e-3), arrivals, rates=[0.0] * 3, max_batch=8, depth=depth)
        for depth in (None, 0)
    )
    assert [one.finished for one in goodput.served] == [one.finished for one in alone.served]
    assert {one.depth for one in goodput.steps} == {0}


def test_goodput_adapts_to_easy_requests():
    # a level takes a tenth of a base step: a rate of 0.3 pays for one level, a rate of 1 for all
    arrivals = [Arrival(0.0, 5, 300)]
    depths = [one.depth for one in run(linear(0.02), arrivals, [3] * 300, [0.3] * 3).steps]
    assert (depths[0], depths[-5]) == (1, 3)


def test_arrivals_have_the_rate_of_each_part_and_follow_from_the_seed():
    arrivals = poisson(10.0, 60_000, prompt_tokens=1, new_tokens=1, parts=(0.0, 1.0, 3.0), seed=4)
    times = np.array([one.seconds for one in arrivals])
    part = 60_000 / 10 / 4
    counts = [int(((times >= k * part) & (times < (k + 1) * part)).sum()) for k in range(3)]
    assert counts == [0, pytest.approx(15_000, rel=0.03), pytest.approx(45_000, rel=0.03)]
    assert (np.diff(times) >= 0).all()
    ours, same, other = (
        poisson(2.0, 50, prompt_tokens=1, new_tokens=1, seed=seed) for seed in (1, 1, 2)
    )
    assert ours == same != other


def test_recorded_arrivals_are_read_and_errors_name_the_line(tmp_path: Path):
    file = tmp_path / "load.jsonl"
    late, early = {"seconds": 2, "prompt_tokens": 3, "new_tokens": 4}, {"seconds": 0.5}
    file.write_text("\n".join(map(json.dumps, [late, late | early])))
    assert read_arrivals(file) == [Arrival(0.5, 3, 4), Arrival(2.0, 3, 4)]
    for wrong in (early, late | {"new_tokens": 0}, late | {"prompt_tokens": 1.5}):
        file.write_text(json.dumps(wrong))
        with pytest.raises(InputError, match=r"_tokens in line 1 of .* must be a whole number"):
            read_arrivals(file)


def test_figures_of_a_load_add_up():
    arrivals = poisson(1.0, 300, prompt_tokens=10, new_tokens=11)
    row = summarise("1", "none", run(linear(0.01), arrivals, max_batch=4, depth=0))
    assert row.latency.mean >= 0.1
    assert row.latency.p50 <= row.latency.p90 <= row.latency.p99
    assert row.first_token.mean < row.latency.mean
    # eleven tokens each: one comes with the prompt, and each step takes 10 ms
    span = arrivals[-1].seconds - arrivals[0].seconds
    assert row.tokens_per_second == pytest.approx(300 * 11 / span, rel=0.01)


def test_rows_are_read_up_to_the_longest():
    # 3 rows, their first token from their prompts and one more from a step
    arrivals = [Arrival(0.0, length - 1, 2) for length in (300, 200, 900)]
    cost = linear(1.0, context=1.0, share=0.0)
    found = run(cost, arrivals, [0, 0], max_batch=3, depth=0)
    assert found.steps[0].seconds == 1.0 + 3 * 900


# --- machines that one does not have -------------------------------------------------------------


def a100(draft_parameters: float = 8e9, **more: Any) -> StepCost:
    """Return the cost of Llama-3.1-8B on an A100, which drafts for itself with a window."""
    sizes = {"parameters": 8e9, "position_bytes": 131072, "window": 512}
    sizes |= {"draft_parameters": draft_parameters, "draft_position_bytes": 131072} | more
    return computed_cost(bandwidth=2.0e12, flops=312e12, **sizes)


def ratio(cost: StepCost, batch: int, context: int, depth: int = 3) -> float:
    """Return the time of a step over that of the base alone."""
    alone = cost.seconds(batch, context, 1, 0)
    return cost.seconds(batch, context, depth + 1, depth) / alone


def test_forward_reads_weights_and_context_and_computes_tokens():
    cost = a100().verify
    assert cost.seconds(0, 0) == pytest.approx(16e9 / 2e12)
    assert cost.seconds(0, 1e6) == pytest.approx((16e9 + 131072e6) / 2e12)
    assert cost.seconds(1000, 0) == pytest.approx(16e9 / 2e12 + 16e9 * 1000 / 312e12)


def test_window_as_long_as_the_text_costs_as_much_as_the_base():
    cost = a100(window=0)
    assert cost.seconds(4, 1000, 2, 1) == pytest.approx(
        cost.seconds(4, 1000, 2, 0) + cost.seconds(4, 1000, 1, 0)
    )
    assert a100(window=1000).seconds(4, 1000, 3, 2) == cost.seconds(4, 1000, 3, 2)


def test_block_costs_one_forward_at_any_depth():
    cost = a100(1e9, draft_position_bytes=0, levels=7)
    drafts = [
        cost.seconds(1, 100, nodes, depth) - cost.seconds(1, 100, nodes, 0)
        for nodes, depth in ((2, 1), (8, 7), (30, 7))
    ]
    # all slots of the block are computed
    assert drafts == pytest.approx([2e9 / 2e12 + 7 * 2e9 / 312e12] * 3)


@pytest.mark.parametrize("kind", ["dflash", "dspark", "medusa"])
def test_sizes_count_own_parameters_once(kind: str):
    base = tiny.base()
    head = build_for({"kind": kind, "depth": 3}, base)
    found, own = sizes(base, head), sum(one.numel() for one in head.parameters())
    lent = tiny.VOCAB * base.width
    whole = {"medusa": own // 3}.get(kind, own + lent)
    assert (found["draft_parameters"], found["levels"]) == (whole, 1 if kind == "medusa" else 3)


def test_windowed_drafts_gain_from_batches_only_in_long_texts():
    long, short = ([ratio(a100(), batch, at) for batch in (32, 64, 128)] for at in (32_000, 100))
    assert long[0] > long[1] > long[2]
    assert short[0] <= short[1] <= short[2]


def test_break_even_context_falls_with_the_batch_size():
    # a drafter with all weights needs keys to outweigh them, and a batch has more keys
    tokens = 1 + 0.8 + 0.8**2 + 0.8**3

    def first(batch: int) -> int:
        return next(at for at in range(0, 400_000, 50) if ratio(a100(), batch, at) < tokens)

    found = [first(batch) for batch in (1, 4, 16, 64, 128, 256)]
    assert found == sorted(found, reverse=True)
    assert found[0] != found[-1]

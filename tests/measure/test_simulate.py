"""Simulated waiting times match queueing theory, and goodput has the shortest."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specheads.core.errors import InputError
from specheads.decoding.cost import ForwardCost, StepCost
from specheads.decoding.goodput import Goodput, MovingRates, RequestRates
from specheads.heads.load import build_for_base
from specheads.measure.simulate import (
    Arrival,
    ServedRequest,
    ServerStep,
    computed_cost,
    model_sizes,
    poisson_arrivals,
    read_arrivals,
    sampled_lengths,
    simulate,
    summarise_load,
)
from tests import tiny

RATES = [0.8, 0.7, 0.6, 0.5]


def linear(fixed: float, token: float = 0.0, context: float = 0.0, share: float = 0.1) -> StepCost:
    drafted = ForwardCost(fixed=share * fixed, token=share * token, context=share * context)
    return StepCost(verify=ForwardCost(fixed=fixed, token=token, context=context), draft=drafted)


def run(
    cost: StepCost,
    arrivals: list[Arrival],
    num_right: Sequence[int] | None = None,
    rates: Sequence[float] = RATES,
    seed: int = 0,
    **settings: Any,
) -> tuple[list[ServedRequest], list[ServerStep]]:
    """Simulate a chain with `num_right` drafts right in each request, or sampled from the rates."""
    lengths = [
        [*num_right] if num_right else sampled_lengths(rates, (seed, number), arrival.new_tokens)
        for number, arrival in enumerate(arrivals)
    ]
    return simulate(Goodput(cost, rates), arrivals, lengths, **settings)


@pytest.mark.parametrize(
    "load", [0.6, *(pytest.param(load, marks=pytest.mark.slow) for load in (0.3, 0.8))]
)
def test_mean_wait_matches_m_d_1(load):
    # one row and a service time of 0.5 s: 0.25 s for the prompt and 0.25 s for one step
    number = {0.3: 40_000, 0.6: 20_000, 0.8: 100_000}[load]
    arrivals = poisson_arrivals(load / 0.5, number, prompt_tokens=1, new_tokens=2, seed=3)
    served = run(linear(0.25), arrivals, [0], depth=0)[0]
    theory = load * 0.5 / (2 * (1 - load))
    waits = [row.first_token_time - 0.25 - row.arrival.seconds for row in served]
    assert np.mean(waits) == pytest.approx(theory, rel=0.03)


def test_events_follow_the_engine():
    #  0.0  A arrives, its prompt takes until 2.0, its steps until 4.0
    #  3.0  B arrives; its prompt takes from 4.0 to 6.0, steps of both until 8.0 and 10.0
    arrivals = [Arrival(0.0, 10, 4), Arrival(3.0, 10, 3)]
    (first, second), steps = run(linear(2.0), arrivals, [0] * 4, max_batch=2, depth=0)
    assert [step.batch for step in steps] == [1, 2, 2]
    assert (first.first_token_time, first.end_time) == (2.0, 10.0)
    assert (second.first_token_time, second.end_time) == (6.0, 10.0)


def test_right_drafts_are_replayed_by_position():
    #  position  0 1 2 3 4 5    from the first token on: 2 drafts right, then at position 3 none,
    #  right     2 . . 0 1 .    at position 4 one, and the last token ends it
    arrivals, num_right = [Arrival(0.0, 1, 8)], [2, 9, 9, 0, 1, 9, 9, 9]
    (served,), steps = run(linear(1.0), arrivals, num_right, depth=2)
    assert (len(steps), served.tokens) == (4, 8)
    assert len(run(linear(1.0), arrivals, num_right, depth=0)[1]) == 7


def test_a_draft_that_is_right_to_its_end_says_nothing_of_deeper_levels():
    served = ServedRequest(Arrival(0.0, 1, 9), [2] * 9, RequestRates(MovingRates(RATES)), tokens=1)
    served.add_step(2, is_observed=True)
    assert served.tokens == 4
    rates = served.rates.drafted.rates
    assert rates[0] > RATES[0]
    assert rates[1] > RATES[1]
    assert rates[2:] == RATES[2:]


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
)
def test_goodput_beats_every_fixed_depth_under_varying_load(seed):
    # a draft is cheap for one row; for 16 rows each node costs about a whole step
    cost = linear(0.02, 1.5e-3, 1e-7)
    # a Poisson process whose rate is 1, 10, 1 and 7.5 requests per second, each for 31 seconds
    waits, period = np.random.default_rng(seed).exponential(size=600).cumsum(), 600 / 5 / 3.9
    ends = np.cumsum([0, 1.0, 10.0, 1.0, 7.5]) * period
    rounds, remainder = np.divmod(waits, ends[-1])
    times = rounds * 4 * period + np.interp(remainder, ends, period * np.arange(5))
    arrivals = [Arrival(time, 5, 48) for time in times.tolist()]

    def figures(depth: int | None) -> tuple[float, float]:
        row = summarise_load("", "", *run(cost, arrivals, seed=seed, max_batch=16, depth=depth))
        return row.latency["mean"], row.tokens_per_second

    latency, speed = figures(None)
    fixed = [figures(depth) for depth in range(5)]
    assert latency < min(fixed_latency for fixed_latency, _ in fixed)
    assert speed >= 0.999 * max(fixed_speed for _, fixed_speed in fixed)


def test_recorded_arrivals_are_read_and_errors_name_the_line(tmp_path: Path):
    file = tmp_path / "load.jsonl"
    late, early = {"seconds": 2, "prompt_tokens": 3, "new_tokens": 4}, {"seconds": 0.5}
    file.write_text("\n".join(map(json.dumps, [late, late | early])))
    assert read_arrivals(file) == [Arrival(0.5, 3, 4), Arrival(2.0, 3, 4)]
    for invalid in (early, late | {"new_tokens": 0}, late | {"prompt_tokens": 1.5}):
        file.write_text(json.dumps(invalid))
        with pytest.raises(InputError, match=r"_tokens in line 1 of .* must be a whole number"):
            read_arrivals(file)


# --- machines that one does not have -------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dflash", "dspark", "medusa"])
def test_sizes_count_own_parameters_once(kind: str):
    base = tiny.base()
    head = build_for_base({"kind": kind, "depth": 3}, base)
    sizes = model_sizes(base, head)
    num_parameters = sum(parameter.numel() for parameter in head.parameters())
    draft_parameters = num_parameters + tiny.VOCAB * base.width
    if kind == "medusa":
        draft_parameters = num_parameters // 3
    levels = 1 if kind == "medusa" else 3
    assert (sizes["draft_parameters"], sizes["levels"]) == (draft_parameters, levels)


def test_a_block_is_drafted_whole_for_a_chain_of_any_depth():
    cost = replace(linear(2.0, token=0.1), levels=4)
    steps = [cost.seconds(3, 0, depth + 1, depth) for depth in range(5)]
    verify = [cost.verify.seconds(3 * (depth + 1), 0) for depth in range(5)]
    draft = cost.draft.seconds(3 * 4, 0)
    assert steps == [verify[0], *(seconds + draft for seconds in verify[1:])]


def test_forward_reads_weights_and_context_and_computes_tokens():
    # Llama-3.1-8B on an A100
    sizes = {"parameters": 8e9, "position_bytes": 131072, "draft_parameters": 1e8}
    cost = computed_cost(bandwidth=2.0e12, flops=312e12, **sizes).verify
    assert cost.seconds(0, 0) == pytest.approx(16e9 / 2e12)
    assert cost.seconds(0, 1e6) == pytest.approx((16e9 + 131072e6) / 2e12)
    assert cost.seconds(1000, 0) == pytest.approx(16e9 / 2e12 + 16e9 * 1000 / 312e12)

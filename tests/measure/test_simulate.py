"""Simulated waiting times match queueing theory, and goodput has the shortest."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specheads.decoding.cost import ForwardCost, StepCost
from specheads.decoding.goodput import Draft, chains
from specheads.decoding.trees.tuned import MatchRates
from specheads.heads.load import build_for
from specheads.measure.simulate import LoadResults, Sizes, draw, summarise, table
from specheads.measure.simulate_engine import (
    ComputedCost,
    ForwardSize,
    Roofline,
    Simulation,
    System,
    simulate,
)
from specheads.measure.simulate_requests import (
    Arrival,
    Copy,
    poisson,
    rates_of,
    read_accepted,
    read_arrivals,
    recorded,
    sampled_copies,
    sampled_lengths,
)
from tests import tiny

RATES = [0.8, 0.7, 0.6, 0.5]


LONG = Copy(1, 9)
"""A position where no step begins."""


def linear(fixed: float, token: float = 0.0, context: float = 0.0, share: float = 0.1) -> StepCost:
    drafted = ForwardCost(fixed=share * fixed, token=share * token, context=share * context)
    return StepCost(verify=ForwardCost(fixed=fixed, token=token, context=context), draft=drafted)


def system(
    cost: StepCost, max_batch: int = 1, rates: Sequence[float] = RATES, prefill: float = 0.0
) -> System:
    return System(
        cost=cost,
        prefill=lambda tokens: prefill * tokens,
        rates=[rates],
        drafts=chains(len(rates)),
        max_batch=max_batch,
    )


def waits(found: Simulation, read: float) -> list[float]:
    """Return the time from each arrival until its prompt is read."""
    return [one.first - read - one.arrival.seconds for one in found.served]


@pytest.mark.parametrize(
    "load", [0.6, *(pytest.param(one, marks=pytest.mark.slow) for one in (0.3, 0.8))]
)
def test_mean_wait_matches_m_d_1(load):
    # one row and a service time of 0.5 s: 0.25 s for the prompt and 0.25 s for one step
    number = 100_000 if load == 0.8 else 40_000
    arrivals = poisson(load / 0.5, number, prompt_tokens=1, new_tokens=2, seed=3)
    served = simulate(system(linear(0.25), prefill=0.25), arrivals, [recorded([[0]])], 0)
    theory = load * 0.5 / (2 * (1 - load))
    assert np.mean(waits(served, 0.25)) == pytest.approx(theory, rel=0.03)


def test_littles_law_holds():
    arrivals = poisson(9.0, 4000, prompt_tokens=30, new_tokens=20, seed=1)
    found = simulate(
        system(linear(0.02, 1e-3), 8, prefill=1e-4), arrivals, [sampled_lengths(RATES)], 2
    )
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
    #  0.0  A arrives, its prompt takes until 1.0, its steps until 3.0
    #  2.0  B arrives; its prompt takes from 3.0 to 4.0, steps of both until 6.0 and 8.0
    arrivals = [Arrival(0.0, 10, 4), Arrival(2.0, 10, 3)]
    found = simulate(system(linear(2.0), 2, prefill=0.1), arrivals, [recorded([[0]])], 0)
    first, second = found.served
    assert [(one.began, one.batch) for one in found.steps] == [(1, 1), (4, 2), (6, 2)]
    assert (first.first, first.finished) == (1.0, 8.0)
    assert (second.first, second.finished) == (4.0, 8.0)


def test_recorded_lengths_are_replayed_by_position():
    #  place     0 1 2 3 4 5    from the first token on: 2 drafts right, then at place 3 none,
    #  right     2 . . 0 1 .    at place 4 one, and the last token ends it
    arrivals = [Arrival(0.0, 1, 8)]
    lengths = [recorded([[2, 9, 9, 0, 1, 9, 9]])]
    steps = simulate(system(linear(1.0)), arrivals, lengths, 2).steps
    assert len(steps) == 4
    alone = simulate(system(linear(1.0)), arrivals, lengths, 0).steps
    assert len(alone) == 7
    assert simulate(system(linear(1.0)), arrivals, lengths, 2).served[0].tokens == 8


def test_recorded_copies_are_accepted_and_cost_nodes():
    #  place         0 1 2 3 4 5 6    a chain of one and three copied tokens: from place 0 two
    #  right         1 . . 0 1 . .    copied, at 3 nothing to copy, at 4 the draft, at 6 one of
    #  copied        2 . . - 0 . 1    those that are copied
    arrivals = [Arrival(0.0, 1, 9)]
    served = replace(
        system(linear(1.0, 0.1), rates=[0.5]), drafts=chains(1, [3]), copied=[[0.5, 0.5, 0.5]]
    )
    right = [recorded([[1, 9, 9, 0, 1, 9, 0, 0]])]
    copied = recorded([[Copy(1, 2), LONG, LONG, Copy(), Copy(1, 0), LONG, Copy(1, 1), Copy()]])
    steps = simulate(served, arrivals, right, 3, copied).steps
    whole = 1.2 + 0.1 + 0.01
    assert [one.seconds for one in steps] == pytest.approx(
        [whole + 0.3, whole, whole + 0.3, whole + 0.3]
    )
    # without the head's drafts position 4 gives one token, and position 5 all its copies
    alone = simulate(served, arrivals, right, 2, copied).steps
    assert [one.seconds for one in alone] == pytest.approx([1.4, 1.1, 1.4, 1.4])


def test_goodput_learns_whether_copies_are_right():
    arrivals = [Arrival(0.0, 5, 300)]
    served = replace(
        system(linear(1.0, 0.1), rates=[0.1]),
        drafts=chains(1, [4]),
        copied=[[0.5, 0.5, 0.5, 0.5]],
    )
    right = simulate(served, arrivals, [recorded([[0]])], None, recorded([[Copy(1, 4)]]))
    assert len(right.steps) == 60
    wrong = simulate(served, arrivals, [recorded([[0]])], None, recorded([[Copy(1, 0)]]))
    alone = [one.seconds < 1.15 for one in wrong.steps]
    assert not any(alone[:3])
    assert sum(alone[100:]) > 0.5 * len(alone[100:])
    with pytest.raises(ValueError, match="a rate for each depth and copied token"):
        simulate(replace(served, copied=[[0.5]]), arrivals, [recorded([[0]])])


def test_each_tree_has_its_own_accepted_lengths():
    #  one row uses the tree, whose drafts are all right; two rows use the base alone
    served = replace(
        system(linear(1.0, 0.2), 2, rates=[0.1]),
        rates=[[0.1], [0.9, 0.9]],
        drafts=[*chains(1), Draft(2, 4, tree=1)],
    )
    arrivals = [Arrival(0.0, 1, 7), Arrival(0.0, 1, 4)]
    right = [recorded([[0]]), recorded([[2]])]
    alone = simulate(served, arrivals[:1], right)
    assert [(one.depth, one.seconds) for one in alone.steps] == [(2, pytest.approx(2.06))] * 2
    with pytest.raises(ValueError, match=r"of every tree a rate for each depth .*, got \[1\]"):
        simulate(served, arrivals, right[:1])


def test_goodput_uses_the_match_length():
    """Copies after a match of one token are wrong, after three tokens right."""
    places = [[Copy(1, 0), Copy(), Copy(3, 4), LONG, LONG, LONG, LONG]]
    served = replace(
        system(linear(1.0, 0.3), rates=[0.0]),
        drafts=chains(1, [2, 4]),
        copied=[[0.1] * 4, [0.5] * 4, [0.9] * 4],
    )
    found = simulate(served, [Arrival(0.0, 5, 71)], [recorded([[0]])], None, recorded(places))
    #  two steps alone, then five tokens from five nodes
    assert [one.seconds for one in found.steps] == pytest.approx([1.3, 1.3, 2.5] * 10)


def test_sampled_copies_have_the_measured_rates():
    matches = [MatchRates(share=0.2, rates=[0.3, 0.5]), MatchRates(share=0.5, rates=[0.8, 0.9])]
    texts = [sampled_copies(matches, seed=1)(number, 500) for number in range(40)]
    each = [one for text in texts for one in text]
    for number, one in enumerate(matches, start=1):
        found = [copy.right for copy in each if copy.matched == number]
        assert len(found) / len(each) == pytest.approx(one.share, abs=0.01)
        assert rates_of([found], 2) == pytest.approx(one.rates, abs=0.02)
    assert {copy.right for copy in each if not copy.matched} == {0}
    assert sampled_copies([])(3, 2) == [Copy(), Copy()]


def test_sampled_lengths_have_their_rates():
    texts = [sampled_lengths(RATES, seed=2)(number, 500) for number in range(40)]
    assert rates_of(texts, 4) == pytest.approx(RATES, abs=0.02)
    assert sampled_lengths(RATES, seed=2)(3, 50) == sampled_lengths(RATES, seed=2)(3, 50)
    assert sampled_lengths(RATES, seed=2)(3, 50) != sampled_lengths(RATES, seed=3)(3, 50)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(one, marks=pytest.mark.slow) for one in (1, 2))]
)
def test_goodput_beats_every_fixed_depth_under_varying_load(seed):
    # a draft is cheap for one row; for 16 rows each node costs about a whole step
    cost = linear(0.02, 1.5e-3, 1e-7)
    parts = (0.2, 2.0, 0.2, 1.5)
    arrivals = poisson(5.0, 1000, prompt_tokens=50, new_tokens=48, parts=parts, seed=seed)
    served = system(cost, 16, prefill=2e-5)

    def run(depth: int | None) -> tuple[float, float]:
        row = summarise("", "", simulate(served, arrivals, [sampled_lengths(RATES, seed)], depth))
        return row.latency.mean, row.tokens_per_second

    latency, speed = run(None)
    fixed = [run(depth) for depth in range(5)]
    assert latency < min(one for one, _ in fixed)
    assert speed >= 0.999 * max(one for _, one in fixed)


def test_goodput_with_wrong_drafts_is_the_base_alone():
    arrivals = poisson(3.0, 200, prompt_tokens=20, new_tokens=30)
    never = [0.0] * 3
    served = system(linear(0.02, 1e-3), 8, rates=never)
    goodput = simulate(served, arrivals, [sampled_lengths(never)])
    alone = simulate(served, arrivals, [sampled_lengths(never)], 0)
    assert [one.finished for one in goodput.served] == [one.finished for one in alone.served]
    assert {one.depth for one in goodput.steps} == {0}


def test_goodput_adapts_to_easy_requests():
    arrivals = [Arrival(0.0, 5, 300)]
    # a level takes a tenth of a base step: a rate of 0.3 pays for one level, a rate of 1 for all
    served = system(linear(0.02), rates=[0.3, 0.3, 0.3])
    depths = [one.depth for one in simulate(served, arrivals, [recorded([[3]])]).steps]
    assert depths[0] == 1
    assert depths[-5] == 3


def test_arrivals_follow_from_the_seed():
    def times(seed: int) -> list[float]:
        return [one.seconds for one in poisson(2.0, 50, prompt_tokens=1, new_tokens=1, seed=seed)]

    assert times(1) == times(1)
    assert times(1) != times(2)


def test_arrivals_have_the_rate_of_each_part():
    arrivals = poisson(10.0, 60_000, prompt_tokens=1, new_tokens=1, parts=(0.0, 1.0, 3.0), seed=4)
    times = np.array([one.seconds for one in arrivals])
    part = 60_000 / 10 / 4
    counts = [int(((times >= k * part) & (times < (k + 1) * part)).sum()) for k in range(3)]
    assert counts[0] == 0
    assert counts[1] == pytest.approx(15_000, rel=0.03)
    assert counts[2] == pytest.approx(45_000, rel=0.03)
    assert (np.diff(times) >= 0).all()


def test_recorded_files_are_read_and_errors_name_the_line(tmp_path: Path):
    file = tmp_path / "load.jsonl"
    late, early = {"seconds": 2, "prompt_tokens": 3, "new_tokens": 4}, {"seconds": 0.5}
    file.write_text("\n".join(map(json.dumps, [late, late | early])))
    assert read_arrivals(file) == [Arrival(0.5, 3, 4), Arrival(2.0, 3, 4)]
    file.write_text(json.dumps(early))
    with pytest.raises(ValueError, match=r"line 1 of .* must have seconds, prompt_tokens and"):
        read_arrivals(file)
    file.write_text(json.dumps(late | {"new_tokens": 0}))
    with pytest.raises(ValueError, match="prompt and new tokens of at least 1"):
        read_arrivals(file)
    file.write_text('{"accepted": [1, 0]}\n{"accepted": [2]}\n')
    assert read_accepted(file) == [[1, 0], [2]]
    file.write_text('{"accepted": [1.5]}')
    with pytest.raises(ValueError, match="a list of whole numbers"):
        read_accepted(file)


@pytest.mark.parametrize(
    ("rate", "parts"), [(0.0, (1.0,)), (1.0, ()), (1.0, (0.0,)), (1.0, (-1.0, 2.0))]
)
def test_loads_without_arrivals_raise(rate, parts):
    with pytest.raises(ValueError, match="a load needs a rate above 0"):
        poisson(rate, 10, prompt_tokens=1, new_tokens=1, parts=parts)


def test_unknown_depth_raises():
    with pytest.raises(ValueError, match="one of 5 drafts, got 1 and 5"):
        simulate(system(linear(1.0)), [Arrival(0.0, 1, 1)], [sampled_lengths(RATES)], 5)


def test_figures_of_a_load_add_up():
    arrivals = poisson(1.0, 300, prompt_tokens=10, new_tokens=11)
    row = summarise(
        "1", "none", simulate(system(linear(0.01), 4), arrivals, [sampled_lengths(RATES)], 0)
    )
    assert row.latency.mean >= 0.1
    assert row.latency.p50 <= row.latency.p90 <= row.latency.p99
    assert row.first_token.mean < row.latency.mean
    # eleven tokens each: the first comes with the prompt, the others take 10 ms
    span = arrivals[-1].seconds - arrivals[0].seconds
    assert row.tokens_per_second == pytest.approx(300 * 11 / span, rel=0.01)
    assert row.busy == pytest.approx(300 * 0.1 / span / row.mean_batch, rel=0.01)
    load = LoadResults(
        times="computed for an abacus",
        computed=True,
        acceptance="made up",
        rates=RATES,
        max_batch=4,
        seed=0,
        rows=[row],
    )
    assert draw(load).startswith(b"\x89PNG")
    assert "computed for an abacus" in table(load).title


# --- machines that one does not have -------------------------------------------------------------

A100 = Roofline(bandwidth=2.0e12, flops=312e12)
LLAMA = ForwardSize(parameters=8 * 10**9, weight_bytes=16 * 10**9, position_bytes=131072)

TINY = ForwardSize(parameters=1_100_000_000, weight_bytes=2_200_000_000, position_bytes=22528)


def streaming(window: float = 512.0) -> ComputedCost:
    """Return the cost of Llama-3.1-8B that drafts for itself with a window."""
    return ComputedCost(machine=A100, base=LLAMA, draft=LLAMA, window=window)


def ratio(cost: ComputedCost, batch: int, context: int, depth: int = 3) -> float:
    """Return the time of a step over that of the base alone."""
    alone = cost.seconds(batch, context, 1, 0)
    return cost.seconds(batch, context, depth + 1, depth) / alone


def test_forward_time_is_the_longer_of_memory_and_arithmetic():
    cost = streaming()
    assert cost.forward(LLAMA, 1, 0) == pytest.approx(16e9 / 2e12)
    assert cost.forward(LLAMA, 1, 1e6) == pytest.approx((16e9 + 131072e6) / 2e12)
    assert cost.forward(LLAMA, 10_000, 0) == pytest.approx(16e9 * 10_000 / 312e12)


def test_context_of_rows_of_different_lengths():
    """Rows are read in spans up to the longest; with paged attention each by its own length."""
    lengths = [300, 200, 900, 250, 100]
    measured = linear(1.0, context=1.0, share=0.0)
    assert measured.context(lengths) == (2 * 300 + 900 + 2 * 250) / 5
    assert streaming().context(lengths) == 350
    # 5 rows, their first token from their prompts and one more from a step
    arrivals = [Arrival(0.0, length - 1, 2) for length in lengths]
    found = simulate(system(measured, 5), arrivals, [sampled_lengths([0.0])], 0)
    ordered = sorted(lengths)
    assert found.steps[0].seconds == 1.0 + 5 * measured.context(ordered)


def test_window_as_long_as_the_text_costs_as_much_as_the_base():
    cost = streaming(math.inf)
    alone = cost.seconds(4, 1000, 1, 0)
    assert cost.seconds(4, 1000, 3, 2) == pytest.approx(3 * alone)
    assert streaming(1000.0).seconds(4, 1000, 3, 2) == cost.seconds(4, 1000, 3, 2)


def test_block_costs_one_forward_at_any_depth():
    small = ForwardSize(parameters=10**9, weight_bytes=2 * 10**9, position_bytes=0)
    cost = ComputedCost(machine=A100, base=LLAMA, draft=small, levels=7)
    drafts = [
        cost.seconds(1, 100, nodes, depth) - cost.seconds(1, 100, nodes, 0)
        for nodes, depth in ((2, 1), (8, 7), (30, 7))
    ]
    assert drafts == pytest.approx([2e9 / 2e12] * 3)
    # with many rows arithmetic dominates, over all slots of every block
    many = cost.seconds(512, 100, 2, 1) - cost.seconds(512, 100, 2, 0)
    assert many == pytest.approx(2e9 * 512 * 7 / 312e12)


@pytest.mark.parametrize("kind", ["dflash", "dspark", "medusa"])
def test_sizes_count_own_parameters_once(kind: str):
    base = tiny.base()
    head = build_for({"kind": kind, "depth": 3}, base)
    sizes, own = Sizes.of(base, head), sum(one.numel() for one in head.parameters())
    lent = tiny.VOCAB * base.width
    whole = {"medusa": own // 3}.get(kind, own + lent)
    assert (sizes.draft_parameters, sizes.draft_levels) == (whole, 1 if kind == "medusa" else 3)


def test_windowed_drafts_gain_from_batches_only_in_long_texts():
    cost = streaming()
    long, short = ([ratio(cost, batch, at) for batch in (32, 64, 128)] for at in (32_000, 100))
    assert long[0] > long[1] > long[2]
    assert short[0] <= short[1] <= short[2]


def test_verification_of_long_texts_costs_one_base_step():
    cost = ComputedCost(machine=A100, base=LLAMA, draft=LLAMA, window=0.0)
    base = cost.seconds(64, 100_000, 1, 0)
    assert cost.forward(LLAMA, 64 * 4, 64 * 100_000) / base == pytest.approx(1.0)


@pytest.mark.parametrize("draft", [LLAMA, TINY], ids=["itself", "a small model"])
def test_break_even_context_is_monotonic_in_the_batch_size(draft):
    # a drafter with all weights needs keys to outweigh them, and a batch has more keys; a small
    # model pays at once for few rows, and for many rows only if verification is memory-bound
    cost = ComputedCost(machine=A100, base=LLAMA, draft=draft, window=512.0)
    tokens = 1 + 0.8 + 0.8**2 + 0.8**3

    def first(batch: int) -> int:
        return next(at for at in range(0, 400_000, 50) if ratio(cost, batch, at) < tokens)

    found = [first(batch) for batch in (1, 4, 16, 64, 128, 256)]
    assert found == sorted(found, reverse=draft is LLAMA)
    assert found[0] != found[-1]

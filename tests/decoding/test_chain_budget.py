"""The budget of an engine that verifies chains."""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import mul

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specheads.decoding.calibration import Curve
from specheads.decoding.chain_budget import ChainBudget, num_verified
from specheads.decoding.cost import FollowedCost, ForwardCost, StepCost
from tests.slow import slow_except

LINE = Curve(probs=[0.0, 1.0], accepted=[0.0, 1.0])


def budget(token: float = 0.0, draft: float = 0.0, depth: int = 3) -> ChainBudget:
    verify = ForwardCost(fixed=1.0, token=token, context=0.0)
    cost = StepCost(verify=verify, draft=ForwardCost(fixed=draft, token=0.0, context=0.0))
    return ChainBudget(cost, [0.5] * depth, [LINE] * depth)


def logits(*probs: float) -> torch.Tensor:
    """Return logits of two tokens, of which the first has these probabilities."""
    first = torch.tensor(probs, dtype=torch.float64)
    return torch.stack([first, 1 - first], dim=-1).log()[:, None]


def step(
    chains: ChainBudget, sampled: list[int], prob: float, drafted: int = 2
) -> list[int] | None:
    """Run a step of one request and one level; return the verified draft, None without a draft."""
    chains.observe(["a"], [sampled])
    if not chains.should_draft(1):
        return None
    chains.update_level([0], 0, logits(prob))
    return chains.cut_chains([[drafted]], 0)[0]


@pytest.mark.parametrize(("ragged", "equal"), [(0.0, False), (0.05, False), (1.0, True)])
def test_the_chains_that_survive_best_are_verified(ragged, equal):
    chains = budget(token=0.25)
    chains.ragged = ragged / 3
    chains.observe(["a", "b", "c"], [[1], [1], [1]])
    for level, probs in enumerate([(0.9, 0.55, 0.8), (0.5, 0.9, 0.9), (0.99, 0.5, 0.9)]):
        chains.update_level([0, 1, 2], level, logits(*probs))
    counts = [len(chain) for chain in chains.cut_chains([[1, 2, 3], [4, 5, 6], [7, 8, 9]], 0)]
    survivals = np.array([[0.9, 0.45, 0.4455], [0.55, 0.495, 0.2475], [0.8, 0.72, 0.648]])
    # brute force over all ways to cut the three chains
    cuts = [(a, b, c) for a in range(4) for b in range(4) for c in range(4)]

    def goodput(cut: tuple[int, ...]) -> float:
        tokens = 3 + sum(row[:count].sum() for row, count in zip(survivals, cut, strict=True))
        return tokens / (1 + 0.25 * (3 + sum(cut)) + ragged * (len({*cut}) > 1))

    assert tuple(counts) == max(cuts, key=goodput)
    assert (len({*counts}) == 1) == equal


def test_quick_steps_of_unequal_drafts_do_not_make_a_drafted_level_useless():
    chains = budget(token=0.25)
    for _ in range(50):
        chains.follow_verify([0, 0, 0, 0], 0, 2.0)
        chains.follow_verify([1, 1, 1, 1], 0, 3.0)
        chains.follow_verify([1, 0, 0, 0], 0, 0.5)
    chains.observe([*"abcd"], [[1]] * 4)
    chains.update_level([0, 1, 2, 3], 0, logits(0.9, 0.9, 0.9, 0.9))
    assert any(chains.cut_chains([[1], [2], [3], [4]], 0))


def test_drafts_that_are_never_right_are_no_longer_verified_and_tried_again():
    chains = budget(token=0.1, draft=0.05)
    drafts = [step(chains, [1], 0.8) for _ in range(600)]
    assert drafts[0] == [2]
    # trials show whether drafts pay again; each costs a twentieth of a step
    assert 0 < 400 - drafts[200:].count(None) <= 40


def test_drafts_pay_again_once_they_are_right():
    chains = budget(token=0.1, draft=0.05)
    for _ in range(100):
        step(chains, [1], 0.8)
    drafts = [step(chains, [2], 0.8) for _ in range(600)]
    assert drafts[0] is None
    assert drafts[-50:].count([2]) >= 49


def test_rates_follow_the_tokens_up_to_the_first_wrong_one():
    chains = budget()
    chains.observe(["a"], [[1]])
    chains.cut_chains([[2, 3, 4]], 0)
    chains.observe(["a"], [[2, 9, 4]])
    assert chains.rates[0] > 0.5 > chains.rates[1]
    assert chains.rates[2] == 0.5


@pytest.mark.parametrize(("prob", "pays"), [(0.9, True), (0.5, False)])
def test_another_level_is_drafted_if_it_pays(prob, pays):
    chains = budget(token=0.25, draft=0.02)
    chains.observe(["a"], [[1]])
    chains.update_level([0], 0, logits(prob))
    assert chains.should_draft_level([0], 1, 0) == pays


def follow(followed: FollowedCost, measured: ForwardCost, tokens: int, seconds: float) -> None:
    followed.follow(tokens, tokens, measured.seconds(tokens, 0), seconds)


def corrected(followed: FollowedCost, measured: ForwardCost, tokens: int, shape: int = -1) -> float:
    return followed.seconds(tokens, shape, measured.seconds(tokens, 0))


def test_cost_follows_a_server_whose_tokens_take_longer():
    measured = ForwardCost(fixed=0.03, token=0.0005, context=0.0)
    real = replace(measured, token=0.001)
    followed = FollowedCost(0.034, 0.03, 0.0005)
    for turn in range(200):
        tokens = 8 + 5 * (turn % 7)
        follow(followed, measured, tokens, real.seconds(tokens, 0))
    # also of numbers of tokens that were not run
    for tokens in 7, 16, 45:
        expected = pytest.approx(real.seconds(tokens, 0), rel=0.03)
        assert corrected(followed, measured, tokens) == expected


def test_cost_of_a_batch_that_never_changes_keeps_the_measured_price_of_a_token():
    measured = ForwardCost(fixed=0.03, token=0.0005, context=0.0)
    followed = FollowedCost(0.034, 0.03, 0.0005)
    for _ in range(500):
        follow(followed, measured, 8, 0.05)
    assert corrected(followed, measured, 8, shape=8) == pytest.approx(0.05, rel=0.03)
    assert followed.slope == pytest.approx(0.0, abs=0.2 * 0.0005)


def test_a_step_that_is_seldom_run_is_not_forgotten():
    measured = ForwardCost(fixed=0.03, token=0.0005, context=0.0)
    followed = FollowedCost(0.034, 0.03, 0.0005)
    for turn in range(500):
        tokens, seconds = (8, 0.06) if turn < 3 else (16, 0.07)
        follow(followed, measured, tokens, seconds)
    assert corrected(followed, measured, 8, shape=8) == pytest.approx(0.06, rel=0.03)


def test_a_stalled_step_changes_the_cost_little():
    measured = ForwardCost(fixed=0.03, token=0.0005, context=0.0)
    followed = FollowedCost(0.034, 0.03, 0.0005)
    for turn in range(100):
        follow(followed, measured, 8 + turn % 8, measured.seconds(8 + turn % 8, 0))
    follow(followed, measured, 8, 60.0)
    assert corrected(followed, measured, 12) == pytest.approx(measured.seconds(12, 0), rel=0.05)


FORWARDS = st.builds(
    ForwardCost,
    fixed=st.floats(1e-4, 1e-1),
    token=st.floats(1e-6, 1e-3),
    context=st.floats(0, 1e-6),
)


@st.composite
def drafted_trees(draw: st.DrawFn) -> list[list[tuple[int, float]]]:
    """Return each row's tree: the parent and the survival of every node."""
    trees = []
    for _ in range(draw(st.integers(1, 3))):
        tree = [(-1, 1.0)]
        for node in range(1, draw(st.integers(1, 4)) + 1):
            parent = draw(st.integers(0, node - 1))
            tree.append((parent, tree[parent][1] * draw(st.floats(0, 1))))
        trees.append(tree[1:])
    return trees


@given(trees=drafted_trees(), cost=FORWARDS)
def test_the_best_nodes_of_all_rows_are_the_best_subset(trees, cost):
    def seconds(tokens):
        return cost.seconds(tokens, 100 * len(trees))

    nodes = sorted((-value for tree in trees for _, value in tree))
    number, goodput = num_verified([-value for value in nodes], len(trees), seconds)
    expected = len(trees) - sum(nodes[:number])
    assert goodput == pytest.approx(expected / seconds(len(trees) + number))
    everything = [(row, node) for row, tree in enumerate(trees) for node in range(1, len(tree) + 1)]
    best = 0.0
    for count in range(len(everything) + 1):
        for chosen in itertools.combinations(everything, count):
            # only sets that contain the parents are trees
            if all(trees[r][n - 1][0] in (0, *(m for q, m in chosen if q == r)) for r, n in chosen):
                tokens = len(trees) + sum(trees[row][node - 1][1] for row, node in chosen)
                best = max(best, tokens / seconds(len(trees) + count))
    assert goodput == pytest.approx(best)


def test_free_verification_takes_every_node_and_dear_verification_none():
    survivals = [0.9, 0.5, 0.01]
    assert num_verified(survivals, 2, lambda _: 1.0)[0] == 3
    assert num_verified(survivals, 2, lambda tokens: tokens)[0] == 0
    assert num_verified([], 2, lambda tokens: tokens) == (0, 1.0)


# --- a simulated server --------------------------------------------------------------------------

SERVERS = {
    # seconds of a forward, of a token, and of a drafted level, like those of SmolLM2 on two cores
    "drafts pay": (10.8e-3, 0.46e-3, 1.5e-3),
    "drafts pay for few": (10e-3, 3e-3, 1.5e-3),
}
SURE_DEPTH = 5
Clock = Callable[[random.Random], float]


def server_cost(fixed: float, token: float, level: float) -> StepCost:
    verify = ForwardCost(fixed=fixed, token=token, context=0.0)
    draft = ForwardCost(fixed=level, token=level / 30, context=0.0)
    return StepCost(verify=verify, draft=draft)


def draw_chances(generator: random.Random) -> list[float]:
    """Return the probability that each token of a chain is accepted, which the head knows."""
    return [min(generator.betavariate(2.0, 1.0), 0.99) for _ in range(SURE_DEPTH)]


CHANCE = 0.665
"""Mean of `draw_chances`."""


def serve(
    chains: ChainBudget, cost: StepCost, loads: Sequence[int], steps: int, clock: Clock
) -> list[float]:
    """Run steps, of 75 steps each load in turn; compare the second half with fixed lengths.

    `clock` is the ratio of the seconds that the budget sees to the real ones.

    Returns:
        Tokens per second, without any drafts, and with the best length for each load.
    """
    generator = random.Random(0)
    sampled: list[list[int]] = []
    tokens, seconds = 0, [0.0, 0.0, 0.0]
    for step in range(steps):
        rows = loads[step // 75 % len(loads)]
        requests = [*range(rows)]
        if len(sampled) != rows:
            sampled = [[0]] * rows
        chains.observe([*map(str, requests)], sampled)
        drafts, num_right, levels = [list[int]() for _ in requests], [0] * rows, 0
        if chains.should_draft(rows):
            chances = [draw_chances(generator) for _ in requests]
            while levels < SURE_DEPTH:
                for row in requests:
                    chains._chances[row][levels] = chances[row][levels]
                levels += 1
                if levels == SURE_DEPTH or not chains.should_draft_level(requests, levels, 0):
                    break
            for row in requests:
                wrong = (generator.random() >= chance for chance in chances[row])
                num_right[row] = next((k for k, is_wrong in enumerate(wrong) if is_wrong), levels)
            drafts = chains.cut_chains([[1] * levels] * rows, 0)
        counts = [*map(len, drafts)]
        draft_seconds = levels * cost.draft.seconds(rows, 0)
        verify_seconds = cost.verify.seconds(rows + sum(counts), 0)
        if levels:
            chains.follow_draft(rows, levels, 0, draft_seconds * clock(generator))
        chains.follow_verify(counts, 0, verify_seconds * clock(generator))
        sampled = [
            [1] * min(right, count) + [int(min(right, levels) > count)]
            for right, count in zip(num_right, counts, strict=True)
        ]
        if step >= steps // 2:
            num_new = sum(map(len, sampled))
            speeds = [fixed_speed(cost, rows, level) for level in range(SURE_DEPTH + 1)]
            tokens += num_new
            taken = draft_seconds + verify_seconds, num_new / speeds[0], num_new / max(speeds)
            seconds = [*map(sum, zip(seconds, taken, strict=True))]
    return [tokens / total for total in seconds]


def fixed_speed(cost: StepCost, rows: int, levels: int) -> float:
    """Return the tokens per second of chains of a length."""
    tokens = rows * sum(CHANCE**level for level in range(levels + 1))
    return tokens / cost.seconds(rows, 0, 1 + levels, levels)


def quiet(_: random.Random) -> float:
    return 1.0


def noisy(generator: random.Random) -> float:
    """Vary by a fifth, and stall in one step of a hundred."""
    return generator.lognormvariate(-0.02, 0.2) * (6 if generator.random() < 0.01 else 1)


LOADS = {"8": (8,), "1, 8, 2, 12": (1, 8, 2, 12)}


ERRORS = [(2.0, 2.0, 2.0), (2.0, 0.5, 0.5), (0.5, 2.0, 2.0), (1.0, 0.5, 2.0)]
CASES = [*itertools.product(ERRORS, SERVERS, (quiet, noisy), LOADS.values())]


@pytest.mark.parametrize(
    ("errors", "name", "clock", "rows"),
    slow_except([case for case in CASES if case[2:] == (noisy, LOADS["1, 8, 2, 12"])], CASES),
)
def test_a_budget_with_wrong_costs_ends_as_fast_as_the_best_length(errors, name, clock, rows):
    cost = server_cost(*SERVERS[name])
    wrong = server_cost(*map(mul, SERVERS[name], errors))
    chains = ChainBudget(wrong, [CHANCE] * SURE_DEPTH, [LINE] * SURE_DEPTH)
    speed, alone, best = serve(chains, cost, rows, 1200, clock)
    assert speed > 0.99 * alone
    assert speed > 0.95 * best

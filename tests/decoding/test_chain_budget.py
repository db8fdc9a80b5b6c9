"""The budget of an engine that verifies chains."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specheads.decoding.calibration import Curve
from specheads.decoding.chain_budget import RETRY, ChainBudget, num_verified
from specheads.decoding.cost import FollowedCost, ForwardCost, StepCost

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


def test_drafts_that_are_never_right_are_no_longer_verified_and_tried_again():
    chains = budget(token=0.1, draft=0.05)
    drafts = [step(chains, [1], 0.8) for _ in range(300)]
    assert drafts[0] == [2]
    later = drafts[100:]
    assert [2] not in later
    # some steps draft without a gain, to see whether drafts pay again
    assert 0 < 200 - later.count(None) <= 200 // RETRY + 1


def test_drafts_pay_again_once_they_are_right():
    chains = budget(token=0.1, draft=0.05)
    for _ in range(100):
        step(chains, [1], 0.8)
    drafts = [step(chains, [2], 0.8) for _ in range(600)]
    assert drafts[0] is None
    assert drafts[-50:] == [[2]] * 50


@pytest.mark.parametrize(("token", "is_right"), [(2, True), (3, False)])
def test_tokens_that_were_cut_are_observed(token, is_right):
    chains = budget(token=10.0)
    assert step(chains, [1], 0.6) == []
    chains.observe(["a", "b"], [[token], [1]])
    factors = chains._factors
    assert (factors[0] > 1.0) == is_right
    # a new request has the usual rates
    assert chains._chances[1] == chains.rates
    # a draft is observed once
    chains.observe(["a", "b"], [[token], [1]])
    assert chains._factors == factors


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


def test_cost_follows_a_server_whose_tokens_take_longer():
    followed = FollowedCost(ForwardCost(fixed=0.03, token=0.0005, context=1e-6))
    real = ForwardCost(fixed=0.03, token=0.001, context=1e-6)
    for turn in range(200):
        tokens, positions = 8 + 5 * (turn % 7), 1000 + turn
        followed.follow(tokens, positions, real.seconds(float(tokens), positions))
    for tokens in 8.0, 16.0, 40.0:
        assert followed.current.seconds(tokens, 500) == pytest.approx(
            real.seconds(tokens, 500), rel=0.03
        )


def test_cost_of_a_batch_that_never_changes_keeps_the_measured_price_of_a_token():
    followed = FollowedCost(ForwardCost(fixed=0.03, token=0.0005, context=0.0))
    for _ in range(500):
        followed.follow(8, 0, 0.05)
    assert followed.current.seconds(8.0, 0) == pytest.approx(0.05, rel=0.03)
    assert followed.current.token == pytest.approx(0.0005, rel=0.2)


def test_a_stalled_step_changes_the_cost_little():
    measured = ForwardCost(fixed=0.03, token=0.0005, context=0.0)
    followed = FollowedCost(measured)
    for turn in range(100):
        followed.follow(8 + turn % 8, 0, measured.seconds(8.0 + turn % 8, 0))
    followed.follow(8, 0, 60.0)
    assert followed.current.seconds(12.0, 0) == pytest.approx(measured.seconds(12.0, 0), rel=0.05)


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

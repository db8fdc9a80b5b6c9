"""Goodput chooses copied text together with drafts, alone, or not at all."""

from itertools import takewhile
from operator import eq
from typing import Any

import pytest

from specheads.core.features import Committed
from specheads.decoding.cost import StepCost
from specheads.decoding.engine import Engine
from specheads.decoding.goodput import (
    Draft,
    Goodput,
    MovingRates,
    RequestRates,
    best_draft,
    drafted_levels,
    step_tokens,
)
from specheads.decoding.loop import DecodingStep, StepTimes
from specheads.decoding.prompt_lookup import LookupIndex, PromptLookup
from specheads.decoding.request import Request
from specheads.decoding.sampling import SamplingState
from specheads.decoding.trees import policies
from specheads.decoding.trees.hybrid import Hybrid, HybridTree, join_copied
from tests import tiny
from tests.decoding.test_goodput import (
    Standing,
    Switching,
    alone,
    chains,
    head,
    linear,
    serve,
    served,
)
from tests.tuned import MATCH, tuned
from tests.tuned import tree as tuned_tree

FREE = linear(1.0, 0.05, 0.0)
"""A level takes 0.1 + 0.005 a node, the base 1 + 0.05 a node."""

DEAR = linear(1.0, 0.4, 0.0)

COPIED = [[0.5, 0.5, 0.5], [0.5, 1.0, 1.0]]
"""After a match of one token each copied token is right with probability 0.5; after a match of two
only the first may be wrong."""


def choose(cost: StepCost, batch: int, rate: float, matched: int = 2) -> Draft:
    known = []
    for _ in range(batch):
        one = RequestRates([MovingRates([rate])], [*map(MovingRates, COPIED)])
        one.match = one.copied[matched - 1] if matched else None
        known.append((Standing(100), one))
    drafts = chains(1, [0, 1, 3])
    return drafts[best_draft(cost, drafts, known)]


def test_copied_text_is_drafted_alone_with_the_heads_own_or_not_at_all():
    #               rate 0.5                                rate 0.9
    #  none         1 / 1.05                      = 0.95    the same
    #  depth 1      1.5 / (1.1 + 0.105)           = 1.24    1.9 / 1.205                  = 1.58
    #  copies       (1 + 1.5) / (1.05 + 0.15)     = 2.08    the same
    #  1 + copies   (1.5 + 1.5 - 0.25) / 1.355    = 2.03    (1.9 + 1.5 - 0.45) / 1.355   = 2.18
    assert choose(FREE, 1, 0.5) == Draft(0, 1, 3)
    assert choose(FREE, 1, 0.9) == Draft(1, 2, 3)
    # nothing stood before: of equals the first
    assert choose(FREE, 1, 0.9, matched=0) == Draft(1, 2)


def test_as_much_is_copied_as_pays_after_so_many_tokens_that_stood_before():
    #          after one token                  after two
    #  1       1.5 / (1.2 + 0.2)       = 1.07   the same
    #  3       1.875 / (1.2 + 3 0.2)   = 1.04   2.5 / 1.8 = 1.39
    cost = linear(1.0, 0.2, 0.0)
    assert choose(cost, 1, 0.0, matched=1) == Draft(0, 1, 1)
    assert choose(cost, 1, 0.0, matched=2) == Draft(0, 1, 3)


def test_copied_text_is_not_drafted_where_its_nodes_are_dear_for_many():
    #  alone   2.5 / (1.4 + 1.2)     = 0.96   none   1 / 1.4  = 0.71
    #  of 16   40 / (7.4 + 19.2)     = 1.50   none   16 / 7.4 = 2.16
    assert choose(DEAR, 1, 0.0).copied == 3
    assert choose(DEAR, 16, 0.0) == Draft(0, 1)


def test_copied_nodes_are_verified_and_not_drafted():
    assert FREE.seconds(1, 0, 2, 1, copied=3) == pytest.approx(1.1 + 0.105 + 0.15)


def test_tokens_of_both_are_those_of_either_and_as_many_as_there_is_room_for():
    known = RequestRates([MovingRates([0.5, 0.5])], [MovingRates([0.4, 0.5, 0.5])])

    def tokens(draft: Draft, room: int) -> float:
        return step_tokens([draft], [(Standing(100, room), known)])[0]

    assert tokens(Draft(2, 3, 3), 9) == tokens(Draft(2, 3), 9)
    known.match = known.copied[0]
    own, copied = [0.5, 0.25, 0.0], [0.4, 0.2, 0.1]
    either = [1 - (1 - a) * (1 - b) for a, b in zip(own, copied, strict=True)]
    assert tokens(Draft(2, 3, 3), 9) == pytest.approx(1 + sum(either))
    assert tokens(Draft(2, 3, 3), 2) == pytest.approx(1 + either[0])
    assert tokens(Draft(1, 2, 3), 9) == pytest.approx(1 + either[0] + 0.2 + 0.1)
    assert tokens(Draft(0, 1, 3), 9) == pytest.approx(1.7)
    assert tokens(Draft(2, 3, 0), 9) == pytest.approx(1.75)
    assert tokens(Draft(2, 3, 3), 1) == tokens(Draft(2, 3, 3), 0) == 1.0


def step(path: list[int], parents: list[int], num_copied: int) -> DecodingStep:
    numbers = list(range(len(parents)))
    return DecodingStep(path, path, numbers, parents, StepTimes(0.0, 0.0, 0.0), num_copied)


@pytest.mark.parametrize(
    ("path", "copied", "own"),
    [
        # 0 - 1 - 2, of which 1 is copied too, and 3, 4 below it
        ([0, 1, 3], [1, 3], 1),
        ([0, 1, 3, 4], [1, 3], 1),
        ([0, 1, 2], [1, 3], 2),
        ([0], [1, 3], 0),
        # the head's own nodes are not copied; one node of an untrimmed tree is not copied either
        ([0, 3], [0, -1], 0),
        # nothing to copy, trimmed or not
        ([0, 1], [], 1),
        ([0, 1, 2], [-1, -1], 2),
    ],
)
def test_a_step_gives_the_accepted_levels_of_the_head_s_own_tree(
    path: list[int], copied: list[int], own: int
):
    assert drafted_levels(step(path, [-1, 0, 1, *copied], len(copied))) == own


# --- in an engine --------------------------------------------------------------------------------


class Recorded(Goodput):
    """Goodput that records its choices."""

    def of_step(self, requests: Any) -> Any:
        chosen = super().of_step(requests)
        self.chosen = [*getattr(self, "chosen", []), chosen]
        return chosen


@pytest.mark.parametrize(("token", "copies"), [(0.01, True), (5.0, False)])
def test_goodput_learns_how_often_copied_text_is_right_whether_it_copies_or_not(
    token: float, copies: bool
):
    prompt, rates = [1, 2, 3, 4, 5, 6, 7] * 3, [[0.5] * 4] * 3
    policy = Goodput(linear(1.0, token, 0.0), [0.4] * 2, rates)
    engine = Engine(tiny.base(), head("eagle3"), tree=policy, max_batch=1, max_length=80)
    stream = engine.submit(Request(prompt=prompt, max_new_tokens=30, eos_ids=()))
    engine.run()
    assert any(step.num_copied for step in stream.steps) == copies
    expected = [MovingRates(one) for one in rates]
    text = stream.all_tokens[: len(prompt) + 1]
    # the observations of the last step are not needed
    for said in [step.tokens for step in stream.steps[:-1]]:
        matched, copied = LookupIndex(text).find(policy.copied)
        right = sum(takewhile(bool, map(eq, copied, said)))
        if matched:
            refused = right < min(len(copied), len(said))
            expected[matched - 1].note(right, refused=refused)
        text = text + said
    assert text == stream.all_tokens[: len(text)]
    known = policy._rates[stream]
    assert [one.rates for one in known.copied] == [one.rates for one in expected]
    assert known.copied[2].rates != rates[2]


def both(kind: str = "eagle3", copied: int = 3) -> Hybrid:
    return Hybrid(head(kind), PromptLookup(tiny.VOCAB, copied + 3))


def test_text_is_the_bases_own_whatever_goodput_chooses():
    # one alone copies and drafts, three together do less of it, and averages move
    cost = linear(1.0, 0.11, 0.0, share=0.02)
    others = [(policies.BestFirst(6, 3, 2, 2), [0.7] * 3)]
    policy = Recorded(cost, [0.4] * 3, [[0.5, 0.8, 0.8]] * 3, others)
    assert serve(Engine(tiny.base(), head("eagle3"), tree=policy, max_batch=3)) == alone()
    ways = {(one.own_depth > 0, one.copied > one.own_depth) for one in policy.chosen}
    assert len(ways) == 4, ways
    assert {one.name for one in policy.chosen} >= {"best_first+lookup", "chain+lookup"}


class Eager(HybridTree):
    """Copied text alone, and a head that reads in every step."""

    @property
    def own_depth(self) -> int:
        return 1

    def grow(
        self, drafter: Any, committed: Committed, memory: Any, rows: SamplingState | None = None
    ) -> Any:
        drafter.head.read(committed, memory.head)
        copied = drafter.lookup.copy(committed, memory.text)
        root = self.inner.grow(drafter.head, committed, None, rows)
        return join_copied(root, copied, self.size, trim=True)


@pytest.mark.parametrize(("kind", "unread"), [("eagle3", 2), ("hydra_heads", 32)])
def test_drafts_after_copied_text_alone_are_those_of_a_head_that_read_all(kind: str, unread: int):
    whole, plain = HybridTree(policies.chain(3), 3), HybridTree(policies.chain(3), 0)
    nothing = HybridTree(policies.NOTHING, 0)

    def drafted(copies: policies.TreePolicy) -> list[list[list[int]]]:
        drafter = both(kind)
        drafter.most_unread = unread
        policy = Switching([whole, copies, copies, nothing, plain, copies, whole])
        engine = Engine(tiny.base(), drafter, tree=policy, max_batch=3, max_length=90)
        streams = served(engine)
        assert [stream.tokens for stream in streams] == alone()
        return [[one.drafted for one in stream.steps] for stream in streams]

    lazy = drafted(HybridTree(policies.NOTHING, 3, trim=True))
    assert lazy == drafted(Eager(policies.NOTHING, 3))
    assert any(len(one) > 1 for steps in lazy for one in steps)


def test_an_engine_copies_for_few_and_not_for_many():
    cost = linear(1.0, 0.4, 0.0, share=5.0)
    policy = Goodput(cost, [0.1], [[0.7] * 4] * 3)
    prompt = [1, 2, 3, 4, 5, 6, 7] * 3
    engine = Engine(tiny.base(), head("eagle3"), tree=policy, max_batch=8, max_length=80)
    single = engine.submit(Request(prompt=prompt, max_new_tokens=12, eos_ids=()))
    engine.run()
    assert any(one.num_copied for one in single.steps)
    many = [engine.submit(Request(prompt=prompt, max_new_tokens=12, eos_ids=())) for _ in range(8)]
    engine.run()
    assert {one.num_copied for stream in many for one in stream.steps} == {0}
    assert {tuple(stream.tokens) for stream in many} == {tuple(single.tokens)}


def test_goodput_of_a_tuned_head_copies_where_that_was_measured():
    plain = Goodput.of(tuned())
    assert (plain.depth, plain.copied) == (2, 0)
    found = tuned(tuned_tree(copied=4))
    assert Goodput.of(found).copied == 0
    found.acceptance.matches[:] = [MATCH] * 3
    policy = Goodput.of(found)
    assert (policy.own_depth, policy.depth, policy.num_nodes) == (2, 12, 13)
    assert [(one.depth, one.copied) for one in policy.drafts] == [
        (depth, size) for size in (0, 2, 4, 7, 10) for depth in (0, 1, 2)
    ]
    assert [tree.copied - tree.own_depth for tree in policy.trees] == [
        one.copied for one in policy.drafts
    ]


def test_goodput_of_a_tuned_head_drafts_its_wide_trees_too_each_once():
    wide = tuned_tree(rates=[0.7])
    best = tuned_tree(
        2, kind="best_first", num_nodes=5, depth=2, beam=2, branch=2, rates=[0.8, 0.6]
    )
    chain = tuned_tree(8, paths=[[0]], num_nodes=2, rates=[0.5])
    stops = tuned_tree(9, confidence=0.3, rates=[0.6])
    found = tuned(wide, best, tuned_tree(4, rates=[0.9]), tuned_tree(16), chain, stops)
    policy = Goodput.of(found)
    assert policy.rates == [[0.5, 0.4], [0.7], [0.8, 0.6]]
    assert policy.drafts == [*chains(2), Draft(1, 3, tree=1), Draft(2, 5, tree=2)]
    assert [tree.num_nodes for tree in policy.trees] == [1, 2, 3, 3, 5]
    found.acceptance.matches[:] = [MATCH] * 3
    found.trees.append(tuned_tree(copied=4, rates=[0.7]))
    copying = Goodput.of(found)
    assert copying.rates == policy.rates
    assert [tree.num_nodes for tree in copying.trees] == [
        nodes + size for size in (0, 2, 4, 7, 10) for nodes in (1, 2, 3, 3, 5)
    ]


def test_a_chain_deeper_than_the_head_is_refused():
    deep = Goodput(FREE, [0.5] * 9, [[0.5] * 2])
    with pytest.raises(ValueError, match="the tree has 9 levels but the head drafts 3"):
        Engine(tiny.base(), head("eagle3"), tree=deep)

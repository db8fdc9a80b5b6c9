"""Copied text among what goodput chooses: beside the head's own drafts, alone, or not at all."""

from typing import Any

import pytest

from specheads.baselines import PromptLookup
from specheads.core.features import Committed
from specheads.decoding.acceptance.sampling import Rows
from specheads.decoding.cost import StepCost
from specheads.decoding.engine import Engine
from specheads.decoding.goodput import Goodput, seen
from specheads.decoding.loop import Step, Times
from specheads.decoding.payoff import Acceptance, Draft, Known, best_draft, chains
from specheads.decoding.request import Request
from specheads.decoding.trees import policies
from specheads.decoding.trees.hybrid import Hybrid, HybridTree, join_copied
from tests import tiny
from tests.decoding.test_goodput import Standing, Switching, alone, head, linear, serve, served
from tests.tuned import tree as tuned_tree
from tests.tuned import tuned

FREE = linear(1.0, 0.05, 0.0)
"""A level takes 0.1 + 0.005 a node, the base 1 + 0.05 a node."""

DEAR = linear(1.0, 0.4, 0.0)

COPIED = [0.5, 1.0, 1.0, 1.0]
"""In every second step there is something to copy, and then it is right to its end."""


def choose(cost: StepCost, batch: int, rate: float) -> Draft:
    known = [(Standing(100), Known([Acceptance([rate])], Acceptance(COPIED))) for _ in range(batch)]
    drafts = chains(1, 3)
    return drafts[best_draft(cost, drafts, known)]


def test_copied_text_is_drafted_alone_with_the_heads_own_or_not_at_all():
    #               rate 0.5                                rate 0.9
    #  none         1 / 1.05                      = 0.95    the same
    #  depth 1      1.5 / (1.1 + 0.105)           = 1.24    1.9 / 1.205                 = 1.58
    #  copies       (1 + 1.5) / (1.05 + 0.5 0.15) = 2.22    the same
    #  1 + copies   (1.5 + 1.5 - 0.25) / 1.28     = 2.15    (1.9 + 1.5 - 0.45) / 1.28   = 2.30
    assert choose(FREE, 1, 0.5) == Draft(0, 1, 3)
    assert choose(FREE, 1, 0.9) == Draft(1, 2, 3)


def test_copied_text_is_not_drafted_where_its_nodes_are_dear_for_many():
    #  alone   2.5 / (1.4 + 0.5 1.2) = 1.25   beside   1 / 1.4 = 0.71
    #  of 16   40 / (7.4 + 19.2)     = 1.50   beside   16 / 7.4 = 2.16
    assert choose(DEAR, 1, 0.5).copied == 3
    assert choose(DEAR, 16, 0.5) == Draft(0, 1)


def test_copied_nodes_cost_what_they_cost_on_average_unless_every_step_has_them():
    trimmed, whole = Draft(1, 2, 3), Draft(1, 2, 3, trim=False)
    assert trimmed.seconds(FREE, 1, 0, 0.5) == pytest.approx(1.1 + 0.105 + 0.5 * 0.15)
    assert whole.seconds(FREE, 1, 0, 0.5) == pytest.approx(1.1 + 0.105 + 0.15)
    assert trimmed.seconds(FREE, 2, 0, 0.0) == FREE.seconds(2, 0, 2, 1)


def test_tokens_of_both_are_those_of_either_and_as_many_as_there_is_room_for():
    known = Known([Acceptance([0.5, 0.5])], Acceptance([0.8, 0.5, 0.5, 0.5]))
    own, copied = [0.5, 0.25, 0.0], [0.4, 0.2, 0.1]
    either = [1 - (1 - a) * (1 - b) for a, b in zip(own, copied, strict=True)]
    assert known.tokens(Draft(2, 3, 3), 9) == pytest.approx(1 + sum(either))
    assert known.tokens(Draft(2, 3, 3), 2) == pytest.approx(1 + either[0])
    assert known.tokens(Draft(1, 2, 3), 9) == pytest.approx(1 + either[0] + 0.2 + 0.1)
    assert known.tokens(Draft(0, 1, 3), 9) == pytest.approx(1.7)
    assert known.tokens(Draft(2, 3, 0), 9) == pytest.approx(1.75)
    assert known.tokens(Draft(2, 3, 3), 1) == known.tokens(Draft(2, 3, 3), 0) == 1.0


def step(path: list[int], parents: list[int], num_copied: int) -> Step:
    numbers = list(range(len(parents)))
    return Step(0, path, path, numbers, parents, Times(0.0, 0.0, 0.0), num_copied)


@pytest.mark.parametrize(
    ("path", "copied", "own", "other"),
    [
        # 0 - 1 - 2, of which 1 is copied too, and 3, 4 below it
        ([0, 1, 3], [1, 3], (1, True), (3, True)),
        ([0, 1, 3, 4], [1, 3], (1, True), (4, False)),
        ([0, 1, 2], [1, 3], (2, False), (2, True)),
        ([0], [1, 3], (0, True), (1, True)),
        # nothing of the head's own is copied, of a tree that is not trimmed one node is no copy
        ([0, 3], [0, -1], (0, True), (2, False)),
        # nothing to copy, trimmed or not
        ([0, 1], [], (1, True), (0, True)),
        ([0, 1, 2], [-1, -1], (2, False), (0, True)),
    ],
)
def test_a_step_tells_what_was_right_of_the_heads_own_and_of_what_was_copied(
    path: list[int], copied: list[int], own: tuple[int, bool], other: tuple[int, bool]
):
    taken = step(path, [-1, 0, 1, *copied], len(copied))
    assert seen(taken, Draft(2, 3, 4)) == (own, other)


def test_a_step_that_looked_for_nothing_to_copy_says_nothing_of_it():
    assert seen(step([0, 1], [-1, 0, 1], 0), Draft(2, 3)) == ((1, True), (0, False))


def test_a_level_that_was_not_drafted_is_as_wrong_as_one_that_was():
    # 1 and 2 below the root, 3 below 1 alone
    leaf = step([0, 2], [-1, 0, 0, 1], 0)
    assert seen(leaf, Draft(2, 4)) == ((1, True), (0, False))
    assert seen(step([0, 1, 3], [-1, 0, 0, 1], 0), Draft(2, 4)) == ((2, False), (0, False))


def test_averages_follow_what_is_copied_and_return_where_nothing_was():
    known = Known([Acceptance([0.5])], Acceptance([0.4, 0.6]))
    known.note((1, False), (1, True))
    # there was something to copy, and it was wrong
    assert known.copied.rates == pytest.approx([0.4 + 0.05 * 0.6, 0.6 - 0.05 * 0.6])
    assert known.own[0].rates == pytest.approx([0.525])
    assert known.both[0][1] == pytest.approx(0.525 * 0.43 * 0.57)
    known.note((0, True))
    assert known.copied.rates == pytest.approx([0.43 - 0.01 * 0.03, 0.57 + 0.01 * 0.03])
    known.note((0, False), (0, True))
    assert known.copying == pytest.approx(0.4297 * 0.95)


# --- in an engine --------------------------------------------------------------------------------


class Recorded(Goodput):
    """Goodput that remembers what it chose."""

    def of_step(self, requests: Any) -> Any:
        chosen = super().of_step(requests)
        self.chosen = [*getattr(self, "chosen", []), chosen]
        return chosen


def both(kind: str = "eagle3", copied: int = 3) -> Hybrid:
    return Hybrid(head(kind), PromptLookup(tiny.VOCAB, copied + 3))


def test_text_is_the_bases_own_whatever_goodput_chooses():
    # one alone copies and drafts, three together do less of it, and averages move
    cost = linear(1.0, 0.11, 0.0, share=0.02)
    policy = Recorded(
        cost, [0.4] * 3, HybridTree(policies.chain(3), 3), copied=[0.6, 0.5, 0.8, 0.8]
    )
    assert serve(Engine(tiny.base(), head("eagle3"), tree=policy, max_batch=3)) == alone()
    ways = {(one.own_depth > 0, one.copied > one.own_depth) for one in policy.chosen}
    assert len(ways) == 4, ways


class Eager(HybridTree):
    """Copied text alone, and a head that reads in every step."""

    @property
    def own_depth(self) -> int:
        return 1

    def grow(
        self, drafter: Any, committed: Committed, memory: Any, rows: Rows | None = None
    ) -> Any:
        drafter.head.read(committed, memory.head)
        copied = drafter.lookup.copy(committed, memory.text)
        root = self.inner.grow(drafter.head, committed, None, rows)
        return join_copied(root, copied, self.size, trim=True)


@pytest.mark.parametrize("unread", [2, 32])
@pytest.mark.parametrize("kind", ["eagle3", "hydra_heads"])
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
    # the nodes are there whether there is anything to copy or not
    tree = HybridTree(policies.chain(1), 4, trim=False)
    policy = Goodput(cost, [0.1], tree, copied=[0.9] * 5)
    prompt = [1, 2, 3, 4, 5, 6, 7] * 3
    engine = Engine(tiny.base(), head("eagle3"), tree=policy, max_batch=8, max_length=80)
    single = engine.submit(Request(prompt=prompt, max_new_tokens=12, eos_ids=()))
    engine.run()
    assert single.steps[0].num_copied == 4
    many = [engine.submit(Request(prompt=prompt, max_new_tokens=12, eos_ids=())) for _ in range(8)]
    engine.run()
    assert {one.num_copied for stream in many for one in stream.steps} == {0}
    assert {tuple(stream.tokens) for stream in many} == {tuple(single.tokens)}


def test_goodput_of_a_tuned_head_copies_where_that_was_tuned_and_measured():
    plain = Goodput.of(tuned())
    assert (plain.depth, plain.copied) == (2, 0)
    found = tuned(tuned_tree(copied=4))
    assert Goodput.of(found).copied == 0
    found.acceptance.copied[:] = [0.5] * 11
    policy = Goodput.of(found)
    assert (policy.own_depth, policy.depth, policy.num_nodes) == (2, 6, 7)
    assert [(one.depth, one.copied) for one in policy.drafts] == [
        (0, 0), (1, 0), (2, 0), (0, 4), (1, 4), (2, 4)
    ]  # fmt: skip


def test_goodput_of_a_tuned_head_drafts_its_wide_trees_too_each_once():
    wide = tuned_tree(rates=[0.7])
    best = tuned_tree(
        2, kind="best_first", num_nodes=5, depth=2, beam=2, branch=2, rates=[0.8, 0.6]
    )
    chain = tuned_tree(8, paths=[[0]], num_nodes=2, rates=[0.5])
    stops = tuned_tree(9, confidence=0.3, rates=[0.6])
    found = tuned(wide, best, tuned_tree(4, rates=[0.9]), tuned_tree(16), chain, stops)
    policy = Goodput.of(found)
    assert policy.rates == [(0.5, 0.4), (0.7,), (0.8, 0.6)]
    assert policy.drafts == [*chains(2), Draft(1, 3, tree=1), Draft(2, 5, tree=2)]
    assert [tree.num_nodes for tree in policy.trees] == [1, 2, 3, 3, 5]
    found.acceptance.copied[:] = [0.5] * 11
    found.trees.append(tuned_tree(copied=4, rates=[0.7]))
    copying = Goodput.of(found)
    assert copying.rates == policy.rates
    assert [tree.num_nodes for tree in copying.trees] == [1, 2, 3, 3, 5, 5, 6, 7, 7, 9]


def test_text_is_the_bases_own_with_wide_trees_and_copied_text_in_turns():
    cost = linear(1.0, 0.11, 0.0, share=0.02)
    policy = Recorded(
        cost,
        [0.4] * 3,
        HybridTree(policies.chain(3), 3),
        copied=[0.6, 0.5, 0.8, 0.8],
        others=[(policies.BestFirst(6, 3, 2, 2), [0.7] * 3)],
    )
    assert serve(Engine(tiny.base(), head("eagle3"), tree=policy, max_batch=3)) == alone()
    assert {one.name for one in policy.chosen} >= {"best_first+lookup", "chain+lookup"}


def test_what_goodput_cannot_cut_or_judge_is_refused():
    chain = policies.chain(1)
    with pytest.raises(ValueError, match="cuts chains and static trees, got best_first"):
        Goodput(FREE, [0.5, 0.5], HybridTree(policies.BestFirst(3, 2), 2), copied=[0.5] * 3)
    with pytest.raises(ValueError, match="needs 3 rates to copy 2 tokens"):
        Goodput(FREE, [0.5], HybridTree(chain, 2), copied=[0.5, 0.5])
    deep = Goodput(FREE, [0.5] * 9, HybridTree(policies.chain(9), 2), [0.5] * 3)
    with pytest.raises(ValueError, match="the tree has 9 levels but the head drafts 3"):
        Engine(tiny.base(), head("eagle3"), tree=deep)

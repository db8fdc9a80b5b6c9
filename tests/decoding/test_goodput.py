"""Goodput chooses the levels to draft and the tokens to copy; the text stays the base's own."""

import functools
import gc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specheads.base.paged import BlockPool
from specheads.core.drafter import Drafter
from specheads.decoding.cost import (
    ForwardCost,
    MovingRates,
    RequestRates,
    RowLoad,
    StepCost,
    StepLoad,
)
from specheads.decoding.draft_model import DraftModel, Streaming
from specheads.decoding.engine import Engine, Stream
from specheads.decoding.goodput import (
    Goodput,
    best_draft,
)
from specheads.decoding.loop import DecodingStep, StepTimes
from specheads.decoding.request import Request
from specheads.decoding.suffix_decoding import LookupText, common_prefix_length
from specheads.decoding.trees import policies
from specheads.decoding.trees.hybrid import HybridTree, lookup_tree
from specheads.heads.load import kinds
from tests import tiny
from tests.decoding.test_engine import alone, head, requests
from tests.oracle import Oracle
from tests.slow import SOME_KINDS, slow_except
from tests.tuned import MATCH, tuned

CHAINS = [(depth, 0) for depth in range(12)]


def linear(fixed: float, token: float, context: float = 0.0, share: float = 0.1) -> StepCost:
    """Return a base's cost, and of one level of drafting that share of it."""
    drafted = ForwardCost(fixed=share * fixed, token=share * token, context=share * context)
    return StepCost(verify=ForwardCost(fixed=fixed, token=token, context=context), draft=drafted)


def goodput(cost: StepCost, load: StepLoad, depth: int) -> float:
    """Return the tokens of all rows over the seconds of their step, computed independently."""
    tokens = sum(
        1 + sum(math.prod(row.rates.drafted.rates[:k]) for k in range(1, depth + 1))
        for row in load.rows
    )
    return tokens / cost.seconds(load.batch, load.mean_context, depth + 1, depth)


def rows(batch: int, *rates: float, context: int = 1000, room: int = 1000) -> StepLoad:
    copied = [*map(MovingRates, COPIED)]
    row = RowLoad(context, room, RequestRates(MovingRates(rates), copied))
    return StepLoad([row] * batch)


COPIED = [[0.5, 0.5, 0.5], [0.5, 1.0, 1.0]]
"""After a match of one token each copied token is right with probability 0.5; after a match of two
only the first may be wrong."""

TOY = linear(12e-3, 6e-5, 2e-8)


@pytest.mark.parametrize(
    ("rate", "depths"), [(0.5, [2, 2, 1, 1, 0]), (0.7, [4, 3, 2, 1, 1]), (0.9, [8, 8, 6, 4, 3])]
)
def test_depths_are_those_that_the_reference_computes_by_batch(rate, depths):
    batches = 1, 8, 32, 128, 256
    assert [best_draft(TOY, CHAINS[:9], rows(batch, *[rate] * 8)) for batch in batches] == depths


COSTS = st.builds(
    linear, st.floats(1e-4, 1e-1), st.floats(1e-6, 1e-3), st.floats(0, 1e-6), st.floats(0.01, 0.9)
)
RATES = st.lists(st.floats(0, 0.99), min_size=3, max_size=3)


@given(cost=COSTS, batch=st.integers(1, 300), rates=st.one_of(st.just([0.0] * 3), RATES))
def test_no_other_depth_has_a_higher_goodput(cost, batch, rates):
    load = rows(batch, *rates, context=100)
    best = best_draft(cost, CHAINS[:4], load)
    expected = max(goodput(cost, load, depth) for depth in range(4))
    assert goodput(cost, load, best) == pytest.approx(expected)
    assert best == 0 or rates[0] > 0


def test_a_request_that_takes_one_more_token_is_not_drafted_for():
    assert best_draft(TOY, CHAINS[:9], rows(1, *[0.9] * 8, room=1)) == 0
    assert best_draft(TOY, CHAINS[:9], rows(1, *[0.9] * 8, room=4)) == 3


def test_averages_follow_acceptance_and_return_to_the_seed_without_observations():
    moving = MovingRates([0.5, 0.5, 0.5])
    for _ in range(200):
        moving.update(1, refused=True)
    assert moving.rates[0] > 0.99
    assert moving.rates[1] < 0.01
    assert moving.rates[2] == 0.5
    for _ in range(400):
        moving.update(0, refused=False)
    assert moving.rates == pytest.approx([0.5, 0.5, 0.5], abs=0.02)


# --- copied text ---------------------------------------------------------------------------------

FREE, DEAR = linear(1.0, 0.05), linear(1.0, 0.4)
"""A level takes a tenth of the base's forward, 1 + 0.05 a node or 1 + 0.4 a node."""


@pytest.mark.parametrize(
    ("cost", "batch", "rate", "matched", "best"),
    [
        #               rate 0.5                                rate 0.9
        #  none         1 / 1.05                      = 0.95    the same
        #  depth 1      1.5 / (1.1 + 0.105)           = 1.24    1.9 / 1.205                  = 1.58
        #  copies       (1 + 1.5) / (1.05 + 0.15)     = 2.08    the same
        #  1 + copies   (1.5 + 1.5 - 0.25) / 1.355    = 2.03    (1.9 + 1.5 - 0.45) / 1.355   = 2.18
        (FREE, 1, 0.5, 2, (0, 3)),
        (FREE, 1, 0.9, 2, (1, 3)),
        (FREE, 1, 0.9, 0, (1, 0)),
        #          after one token                  after two
        #  1       1.5 / (1.2 + 0.2)       = 1.07   the same
        #  3       1.875 / (1.2 + 3 0.2)   = 1.04   2.5 / 1.8 = 1.39
        (linear(1.0, 0.2), 1, 0.0, 1, (0, 1)),
        (linear(1.0, 0.2), 1, 0.0, 2, (0, 3)),
        #  alone   2.5 / (1.4 + 1.2)     = 0.96   none   1 / 1.4  = 0.71
        #  of 16   40 / (7.4 + 19.2)     = 1.50   none   16 / 7.4 = 2.16
        (DEAR, 1, 0.0, 2, (0, 3)),
        (DEAR, 16, 0.0, 2, (0, 0)),
    ],
)
def test_as_much_is_copied_and_drafted_as_pays(cost, batch, rate, matched, best):
    load = rows(batch, rate)
    for row in load.rows:
        row.rates.match = row.rates.copied[matched - 1] if matched else None
    drafts = [(depth, size) for size in (0, 1, 3) for depth in (0, 1)]
    assert drafts[best_draft(cost, drafts, load)] == best


@pytest.mark.parametrize(
    ("path", "copied", "num_accepted"),
    [
        # 0 - 1 - 2, of which 1 is copied too, and 3, 4 below it
        ([0, 1, 3, 4], [1, 3], 1),
        ([0, 1, 2], [1, 3], 2),
        ([0], [1, 3], 0),
        # the head's own nodes are not copied; one node of an untrimmed tree is not copied either
        ([0, 3], [0, -1], 0),
        ([0, 1], [], 1),
    ],
)
def test_a_step_gives_the_accepted_levels_of_the_heads_own_tree(path, copied, num_accepted):
    parents = [-1, 0, 1, *copied]
    nodes, never = list(range(len(parents))), StepTimes(0.0, 0.0)
    step = DecodingStep(path, path, nodes, parents, never, len(copied))
    assert step.num_accepted == num_accepted
    assert step.num_drafted == 2


# --- in an engine --------------------------------------------------------------------------------


@dataclass
class Switching(policies.TreePolicy):
    """Another tree in every step, some without levels."""

    trees: Sequence[policies.TreePolicy]
    turns: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        largest = max(self.trees, key=lambda tree: tree.num_nodes)
        self.name, self.num_nodes = "switching", largest.num_nodes
        self.depth = max(tree.depth for tree in self.trees)
        self.num_guesses = max(tree.num_guesses for tree in self.trees)

    @property
    def draft_depth(self) -> int:
        return max(tree.draft_depth for tree in self.trees)

    def choose_policy(self, load: StepLoad) -> policies.TreePolicy:
        del load
        self.turns.append(len(self.turns) % len(self.trees))
        return self.trees[self.turns[-1]]


TREE = policies.Static([(0,), (1,), (0, 0), (0, 0, 0)])
TREES: list[policies.TreePolicy] = [
    TREE,
    policies.NOTHING,
    policies.chain(1),
    policies.NOTHING,
    policies.NOTHING,
]
DRAFTERS: dict[str, Callable[[], tuple[Drafter | None, list[policies.TreePolicy]]]] = {
    **{kind: functools.partial(lambda kind: (head(kind), TREES), kind) for kind in kinds()},
    "hydra_heads, prefix": lambda: (head("hydra_heads", prefix=True), TREES),
    "draft model": lambda: (DraftModel(tiny.base(), 3, tiny.base()), TREES),
    "window": lambda: (Streaming(tiny.base(), 3, sinks=2, window=9, max_nodes=16), TREES),
    "lookup": lambda: (None, [lookup_tree(4), policies.NOTHING]),
    "hybrid": lambda: (
        head("eagle3"),
        [HybridTree(policies.chain(3), 3), policies.NOTHING, policies.NOTHING],
    ),
}


def serve_requests(drafter: Drafter | None, tree: policies.TreePolicy) -> list[Stream]:
    """Let requests come while others are decoded, and check their texts."""
    engine = Engine(tiny.base(), drafter, tree=tree, max_batch=3, max_length=90)
    late, streams = requests(6), []
    while late or engine.step():
        if late:
            streams.append(engine.submit(late.pop(0)))
        engine.step()
        engine.step()
    expected = [text.tokens[0] for text in alone("base alone")]
    assert [stream.tokens for stream in streams] == expected
    return streams


@pytest.mark.parametrize(
    "name", slow_except([*SOME_KINDS, "draft model", "window", "lookup", "hybrid"], DRAFTERS)
)
def test_text_is_the_bases_own_whatever_tree_each_step_takes(name):
    drafter, trees = DRAFTERS[name]()
    policy = Switching(trees)
    serve_requests(drafter, policy)
    assert set(policy.turns) == set(range(len(trees)))


def test_an_engine_drafts_deep_for_few_and_not_at_all_for_many():
    # drafting pays for one row; of eight rows every drafted token costs more than it brings
    policy = Goodput(linear(1.0, 0.4, share=0.2), [0.9] * 3)
    engine = Engine(tiny.base(), tiny.oracle(3), tree=policy, max_batch=8, max_length=80)
    single = engine.submit(Request(prompt=tiny.prompts()[0], max_new_tokens=8))
    engine.run()
    assert len(single.steps[0].drafted) == 4
    assert len(single.steps[-1].drafted) < 4
    batch = [engine.submit(Request(prompt=tiny.prompts()[1], max_new_tokens=30)) for _ in range(8)]
    engine.run()
    assert {len(step.drafted) for stream in batch for step in stream.steps} == {1}
    expected = tiny.continuations()
    assert single.tokens == expected[0][:8]
    assert [stream.tokens for stream in batch] == [expected[1][:30]] * 8


def test_an_engine_gives_up_drafts_that_are_refused_and_tries_them_again():
    policy = Goodput(linear(1.0, 0.0), [0.3])
    wrong = Oracle([tiny.prompts()[0] + [0] * 110], 1, tiny.VOCAB, rate=0.0)
    engine = Engine(tiny.base(), wrong, tree=policy, max_length=128)
    stream = engine.submit(Request(prompt=tiny.prompts()[0], max_new_tokens=100))
    engine.run()
    drafted = [len(step.drafted) - 1 for step in stream.steps]
    assert drafted[0] == 1
    assert 1 in drafted[drafted.index(0) :]


@pytest.mark.parametrize(("token", "copies"), [(0.01, True), (5.0, False)])
def test_goodput_learns_how_often_copied_text_is_right_whether_it_copies_or_not(token, copies):
    prompt, rates = [1, 2, 3, 4, 5, 6, 7] * 3, [[0.5] * 4] * 3
    policy = Goodput(linear(1.0, token), [0.4] * 2, rates)
    engine = Engine(tiny.base(), head("eagle3"), tree=policy, max_batch=1, max_length=80)
    stream = engine.submit(Request(prompt=prompt, max_new_tokens=30, eos_ids=()))
    engine.run()
    assert any(step.num_copied for step in stream.steps) == copies
    expected = [MovingRates(start) for start in rates]
    text = prompt + stream.tokens[:1]
    for tokens in [step.tokens for step in stream.steps]:
        matched, copied = LookupText(text).find(policy.lookup_length)
        right = common_prefix_length(copied, tokens)
        if matched:
            expected[matched - 1].update(right, refused=right < min(len(copied), len(tokens)))
        text = text + tokens
    copied = stream.rates.copied
    assert [moving.rates for moving in copied] == [moving.rates for moving in expected]
    assert copied[1].rates != rates[1]


def test_goodput_of_a_tuned_head_copies_where_that_was_measured():
    measured = tuned()
    plain = Goodput.of(measured)
    assert (plain.depth, plain.lookup_length) == (2, 0)
    measured.acceptance.matches[:] = [MATCH] * 3
    policy = Goodput.of(measured)
    assert (policy.draft_depth, policy.depth, policy.num_nodes) == (2, 12, 13)
    assert policy.drafts == [(depth, size) for size in (0, 2, 4, 7, 10) for depth in (0, 1, 2)]
    assert [tree.depth for tree in policy.trees] == [sum(draft) for draft in policy.drafts]


USUAL = ("hybrid", True), ("window", False)
EVERY = [(name, pooled) for name in [*DRAFTERS, ""] for pooled in (True, False)]


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Disable the collection of cycles, and ignore objects that existed before."""
    gc.disable()
    gc.freeze()
    yield
    gc.enable()


def count_new_tensors(act: Callable[[], object]) -> int:
    """Return how many tensors are alive afterwards that were not before, once all is warm."""
    act()
    gc.collect()
    # ignore the objects that exist now
    gc.freeze()
    act()
    # asking an object for its class wakes some that warn
    return sum(issubclass(type(tensor), torch.Tensor) for tensor in gc.get_objects())


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize(
    ("name", "pooled"),
    slow_except(USUAL, EVERY),
)
def test_requests_that_join_and_leave_free_all_tensors(name: str, pooled: bool):
    drafter, (tree, *_) = DRAFTERS[name]() if name else (None, (policies.NOTHING,))
    pool: BlockPool | None = tiny.base().pool(40) if pooled else None
    engine = Engine(tiny.base(), drafter, tree=tree, max_batch=3, max_length=60, pool=pool)

    def serve() -> None:
        for index in range(6):
            prompt = tiny.prompts()[index % 2][:20]
            engine.submit(Request(prompt=prompt, max_new_tokens=4 + 3 * index, eos_ids=()))
            engine.step()
        engine.run()

    assert count_new_tensors(serve) == 0

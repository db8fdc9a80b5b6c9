"""The depth with the most tokens per second: SmartSpec's and MagicDec's figures, and an engine."""

import functools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specheads.core.drafter import Drafter
from specheads.decoding.cost import ForwardCost, StepCost
from specheads.decoding.draft_model import DraftModel, Streaming
from specheads.decoding.engine import Engine
from specheads.decoding.generate import generate
from specheads.decoding.goodput import (
    Draft,
    Goodput,
    MovingRates,
    RequestRates,
    best_draft,
    step_tokens,
)
from specheads.decoding.prompt_lookup import PromptLookup
from specheads.decoding.request import Request, Stream
from specheads.decoding.sampling import Sampling
from specheads.decoding.trees import policies
from specheads.decoding.trees.hybrid import Hybrid, HybridTree, Lookup
from specheads.heads.load import build_for, kinds
from tests import tiny
from tests.oracle import Oracle


def chains(depth: int, copied: Sequence[int] = (0,)) -> list[Draft]:
    """Return chains of every depth from zero on, with each number of copied tokens."""
    return [Draft(one, one + 1, size) for size in copied for one in range(depth + 1)]


CHAIN = chains(8)


@dataclass(frozen=True)
class Standing:
    """A request as goodput sees it."""

    length: int
    room: int = 1000


def linear(fixed: float, token: float, context: float, share: float = 0.1) -> StepCost:
    """Return a base's cost, and of one level of drafting that share of it."""
    drafted = ForwardCost(fixed=share * fixed, token=share * token, context=share * context)
    return StepCost(verify=ForwardCost(fixed=fixed, token=token, context=context), draft=drafted)


def goodput(cost: StepCost, group: list[Any], depth: int) -> float:
    """Return the tokens of all rows over the seconds of their step, computed independently."""
    context = sum(row.length for row, _ in group) / len(group)
    tokens = sum(
        1 + sum(math.prod(known.own[0].rates[:k]) for k in range(1, depth + 1))
        for _, known in group
    )
    return tokens / cost.seconds(len(group), context, depth + 1, depth)


def rows(batch: int, rate: float, context: int = 1000, depth: int = 8) -> list[Any]:
    return [(Standing(context), RequestRates([MovingRates([rate] * depth)])) for _ in range(batch)]


TOY = linear(12e-3, 6e-5, 2e-8)


@pytest.mark.parametrize(
    ("rate", "depths"), [(0.5, [2, 2, 1, 1, 0]), (0.7, [4, 3, 2, 1, 1]), (0.9, [8, 8, 6, 4, 3])]
)
def test_depths_are_those_that_the_reference_computes_by_batch(rate, depths):
    batches = 1, 8, 32, 128, 256
    assert [best_draft(TOY, CHAIN, rows(batch, rate)) for batch in batches] == depths


@pytest.mark.parametrize(
    ("rate", "share", "speed", "depth"),
    [
        (0.8, 0.05, 2.99, 8),
        (0.8, 0.1, 2.39, 6),
        (0.8, 0.2, 1.82, 4),
        (0.8, 0.4, 1.32, 2),
        (0.9, 0.05, 4.48, 11),
        (0.9, 0.1, 3.35, 10),
        (0.9, 0.2, 2.32, 7),
        (0.9, 0.4, 1.55, 4),
    ],
)
def test_best_speeds_are_those_of_magicdec(rate, share, speed, depth):
    # a base's forward over one token takes 1, over a chain of any length 1.05, and a draft `share`
    cost = StepCost(
        verify=ForwardCost(fixed=1.05, token=0.0, context=0.0),
        draft=ForwardCost(fixed=share, token=0.0, context=0.0),
    )
    chain, taken = chains(11), rows(1, rate, depth=11)
    best = best_draft(cost, chain, taken)
    assert round(goodput(cost, taken, best), 2) == speed
    assert best == depth


RATE = st.floats(0, 0.99)
COSTS = st.builds(
    linear, st.floats(1e-4, 1e-1), st.floats(1e-6, 1e-3), st.floats(0, 1e-6), st.floats(0.01, 0.9)
)


@given(cost=COSTS, batch=st.integers(1, 300), context=st.integers(1, 10_000))
def test_drafts_that_are_never_right_are_not_made(cost, batch, context):
    assert best_draft(cost, CHAIN, rows(batch, 0.0, context)) == 0


@given(cost=COSTS, batch=st.integers(1, 300), rates=st.lists(RATE, min_size=3, max_size=3))
def test_no_other_depth_has_a_higher_goodput(cost, batch, rates):
    group = [(Standing(100), RequestRates([MovingRates(rates)])) for _ in range(batch)]
    found = goodput(cost, group, best_draft(cost, CHAIN[:4], group))
    assert found == pytest.approx(max(goodput(cost, group, one) for one in range(4)))


def test_a_request_that_takes_one_more_token_is_not_drafted_for():
    known = RequestRates([MovingRates([0.9] * 8)])
    assert best_draft(TOY, CHAIN, [(Standing(10, room=1), known)]) == 0
    assert best_draft(TOY, CHAIN, [(Standing(10, room=4), known)]) == 3


WIDE = Draft(2, 6, tree=1)
"""A tree of six nodes in addition to chains."""


def known(rate: float, wide: float, depth: int = 2) -> RequestRates:
    return RequestRates([MovingRates([rate] * depth), MovingRates([wide] * depth)])


def test_a_wide_tree_is_drafted_for_few_and_a_chain_for_many():
    #  one row   chain of 2  1.96 / (1.3 + 0.22)  = 1.29    wide  2.44 / (1.6 + 0.25)  = 1.32
    #  of eight  a chain of 1  12.8 / (2.6 + 0.18) = 4.60    none  8 / 1.8 = 4.44    wide  3.05
    drafts, cost = [*chains(2), WIDE], linear(1.0, 0.1, 0.0)
    group = [(Standing(10), known(0.6, 0.8))]
    assert drafts[best_draft(cost, drafts, group)] == WIDE
    assert drafts[best_draft(cost, drafts, 8 * group)] == Draft(1, 2)


def test_only_the_rates_of_the_drafted_tree_are_updated():
    one = known(0.4, 0.8)
    one.last = WIDE
    one.note(0, refused=True)
    assert [each.rates for each in one.own] == [[0.4, 0.4], pytest.approx([0.76, 0.8])]
    assert step_tokens([WIDE], [(Standing(100), one)]) == [pytest.approx(1 + 0.76 + 0.76 * 0.8)]
    one.last = Draft(2, 3)
    one.note(1, refused=True)
    assert one.own[0].rates == pytest.approx([0.43, 0.38])
    assert one.own[1].rates == pytest.approx([0.76 + 0.01 * 0.04, 0.8])


def test_averages_follow_acceptance_and_return_to_the_seed_without_observations():
    known = MovingRates([0.5, 0.5, 0.5])
    for _ in range(200):
        known.note(1, refused=True)
    assert known.rates[0] > 0.99
    assert known.rates[1] < 0.01
    assert known.rates[2] == 0.5
    for _ in range(400):
        known.note(0, refused=False)
    assert known.rates == pytest.approx([0.5, 0.5, 0.5], abs=0.02)


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

    def of_step(self, requests: Sequence[Any]) -> policies.TreePolicy:
        del requests
        self.turns.append(len(self.turns) % len(self.trees))
        return self.trees[self.turns[-1]]

    def grow(self, drafter: Any, committed: Any, memory: Any, rows: Any = None) -> Any:
        return self.trees[0].grow(drafter, committed, memory, rows)


def head(kind: str, **settings: Any) -> Drafter:
    """Return an untrained head, right about as often as chance has it."""
    torch.manual_seed(1)
    made = build_for({"kind": kind, "depth": 3, **settings}, tiny.base()).double().eval()
    for parameter in made.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return made


TREE = policies.Static([(0,), (1,), (0, 0), (0, 0, 0)])
TREES: list[policies.TreePolicy] = [
    TREE,
    policies.NOTHING,
    policies.chain(1),
    policies.NOTHING,
    policies.NOTHING,
]
DRAFTERS: dict[str, Callable[[], tuple[Drafter, list[policies.TreePolicy]]]] = {
    **{kind: functools.partial(lambda kind: (head(kind), TREES), kind) for kind in kinds()},
    "hydra_heads, prefix": lambda: (head("hydra_heads", prefix=True), TREES),
    "draft model": lambda: (DraftModel(tiny.base(), 3, tiny.base()), TREES),
    "window": lambda: (Streaming(tiny.base(), 3, sinks=2, window=9, max_nodes=16), TREES),
    "lookup": lambda: (PromptLookup(tiny.VOCAB, 4), [Lookup(4), policies.NOTHING]),
    "hybrid": lambda: (
        Hybrid(head("eagle3"), PromptLookup(tiny.VOCAB, 4)),
        [HybridTree(policies.chain(3), 3), policies.NOTHING, policies.NOTHING],
    ),
}


def requests() -> list[Request]:
    generator = random.Random(6)
    return [
        Request(
            prompt=[generator.randrange(tiny.VOCAB) for _ in range(generator.randint(1, 40))],
            max_new_tokens=generator.randint(20, 45),
            sampling=Sampling(temperature=generator.choice([0.0, 0.7]), seed=place),
        )
        for place in range(5)
    ]


@functools.cache
def alone() -> list[list[int]]:
    return [
        generate(
            tiny.base(),
            None,
            [one.prompt],
            max_new_tokens=one.max_new_tokens,
            sampling=[one.sampling],
        ).tokens[0]
        for one in requests()
    ]


def served(engine: Engine) -> list[Stream]:
    """Let requests come while others are decoded."""
    late, streams = requests(), []
    while late or engine.step():
        if late:
            streams.append(engine.submit(late.pop(0)))
        engine.step()
        engine.step()
    return streams


def serve(engine: Engine) -> list[list[int]]:
    return [stream.tokens for stream in served(engine)]


@pytest.mark.parametrize("name", DRAFTERS)
def test_text_is_the_bases_own_whatever_tree_each_step_takes(name):
    drafter, trees = DRAFTERS[name]()
    policy = Switching(trees)
    assert serve(Engine(tiny.base(), drafter, tree=policy, max_batch=3, max_length=90)) == alone()
    assert set(policy.turns) == set(range(len(trees)))


def test_an_engine_drafts_deep_for_few_and_not_at_all_for_many():
    # drafting pays for one row; of eight rows every drafted token costs more than it brings
    cost = linear(1.0, 0.4, 0.0, share=0.2)
    policy = Goodput(cost, [0.9] * 3)
    assert best_draft(cost, chains(3), rows(1, 0.9, depth=3)) == 3
    engine = Engine(tiny.base(), tiny.oracle(3), tree=policy, max_batch=8, max_length=80)
    single = engine.submit(Request(prompt=tiny.prompts()[0], max_new_tokens=8))
    engine.run()
    assert len(single.steps[0].drafted) == 4
    assert len(single.steps[-1].drafted) < 4
    many = [engine.submit(Request(prompt=tiny.prompts()[1], max_new_tokens=30)) for _ in range(8)]
    engine.run()
    assert {len(step.drafted) for stream in many for step in stream.steps} == {1}
    said = tiny.continuations()
    assert single.tokens == said[0][:8]
    assert [stream.tokens for stream in many] == [said[1][:30]] * 8


def test_an_engine_gives_up_drafts_that_are_refused_and_tries_them_again():
    policy = Goodput(linear(1.0, 0.0, 0.0, share=0.1), [0.3])
    wrong = Oracle([tiny.prompts()[0] + [0] * 110], 1, tiny.VOCAB, rate=0.0)
    engine = Engine(tiny.base(), wrong, tree=policy, max_length=128)
    stream = engine.submit(Request(prompt=tiny.prompts()[0], max_new_tokens=100))
    engine.run()
    drafted = [len(step.drafted) - 1 for step in stream.steps]
    assert drafted[0] == 1
    first_rest = drafted.index(0)
    assert 1 in drafted[first_rest:]


def test_an_engine_drafts_a_wide_tree_for_one_and_a_chain_for_many():
    cost = linear(1.0, 0.1, 0.0, share=0.02)
    wide = policies.BestFirst(8, 3, 3, 3)
    policy = Goodput(cost, [0.4] * 3, others=[(wide, [0.9] * 3)])
    assert (policy.num_nodes, policy.depth, policy.num_guesses) == (8, 3, wide.num_guesses)
    engine = Engine(tiny.base(), head("eagle3"), tree=policy, max_batch=5, max_length=90)
    streams = served(engine)
    assert [stream.tokens for stream in streams] == alone()
    assert len(streams[0].steps[0].drafted) == 8
    together = served(Engine(tiny.base(), head("eagle3"), tree=policy, max_batch=5))
    sizes = {len(step.drafted) for stream in together for step in stream.steps}
    assert sizes >= {2, 8}

"""The steps give the origin of each token, and distinguish copied from drafted tokens."""

from dataclasses import replace
from itertools import chain
from typing import Any

import pytest

from specheads.core.drafter import Drafter
from specheads.core.features import Committed
from specheads.core.tree import TokenTree
from specheads.decoding.generate import generate
from specheads.decoding.loop import (
    BASE_ORIGIN,
    DecodingStep,
    Origin,
    StepTimes,
    node_origins,
    step_origins,
)
from specheads.decoding.prompt_lookup import PromptLookup
from specheads.decoding.sampling import SamplingState
from specheads.decoding.trees import policies
from specheads.decoding.trees.hybrid import Hybrid, HybridTree, Lookup
from tests import tiny

NEVER = StepTimes(0.0, 0.0, 0.0)


def test_depths_are_edges_below_the_root_and_the_last_nodes_are_copied():
    #        0                nodes 1 to 3 are the head's; 4 and 5 were copied below node 1,
    #      1   2              and node 6 is padding
    #    3   4
    #        5
    origins = node_origins([-1, 0, 0, 1, 1, 4, -1], num_copied=3)
    assert origins[:6] == [
        BASE_ORIGIN,
        Origin("drafted", 1),
        Origin("drafted", 1),
        Origin("drafted", 2),
        Origin("copied", 2),
        Origin("copied", 3),
    ]
    step = DecodingStep(
        0, [11, 14, 15, 9], [0, 1, 4, 5], [0, *range(11, 17)], [-1, 0, 0, 1, 1, 4, -1], NEVER, 3
    )
    assert list(map(str, step_origins(step))) == [
        "drafted at depth 1", "copied at depth 2", "copied at depth 3", "the base's own",
    ]  # fmt: skip


def told(steps: list[DecodingStep]) -> list[str]:
    """Return the origin of each token of a text; the first one, from the prefill, is the base's."""
    return [str(origin) for origin in [BASE_ORIGIN, *chain.from_iterable(map(step_origins, steps))]]


class LastCopied(policies.TreePolicy):
    """A chain of four whose last two nodes count as copied."""

    name, num_nodes, depth = "last copied", 5, 4

    def grow(
        self, drafter: Drafter, committed: Committed, memory: Any, rows: SamplingState | None = None
    ) -> TokenTree:
        grown = policies.chain(4).grow(drafter, committed, memory, rows)
        return replace(grown, num_copied=2)


def test_each_token_of_a_text_has_its_origin():
    # the oracle is always right: each step has four drafts and then the base's own token
    found = generate(
        tiny.base(), tiny.oracle(4), tiny.prompts(), max_new_tokens=23, tree=LastCopied()
    )
    for steps in found.steps:
        drafted, copied = ("drafted at depth 1", "drafted at depth 2"), "copied at depth"
        once = [*drafted, f"{copied} 3", f"{copied} 4"]
        wanted = ["the base's own", *[*once, "the base's own"] * len(steps)]
        assert told(steps) == wanted


@pytest.mark.parametrize("trim", [False, True])
def test_a_hybrid_marks_copied_nodes(trim: bool):
    base, prompt = tiny.base(), tiny.prompts()[0] * 3
    lookup = PromptLookup(tiny.VOCAB, 8, device=base.device)
    both = Hybrid(tiny.oracle(2), lookup)
    tree = HybridTree(policies.chain(2), 4, trim=trim)
    steps = generate(base, both, [prompt], max_new_tokens=12, tree=tree).steps[0]
    assert {len(step.drafted) - step.num_copied for step in steps} == {3}
    if not trim:
        assert {step.num_copied for step in steps} == {4}
    alone = generate(base, lookup, [prompt], max_new_tokens=12, tree=Lookup(8)).steps[0]
    assert all(step.num_copied == len(step.drafted) - 1 for step in alone)
    assert any(step.num_copied for step in alone)


def test_the_base_alone_gives_nothing_but_its_own():
    found = generate(tiny.base(), None, tiny.prompts(), max_new_tokens=6)
    for tokens, steps in zip(found.tokens, found.steps, strict=True):
        assert told(steps) == [str(BASE_ORIGIN)] * len(tokens)

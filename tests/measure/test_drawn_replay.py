"""Replay above temperature zero gives the loop's integers, with and without coupling."""

import functools
from dataclasses import replace

import pytest
import torch

from specheads.core.drafter import Head
from specheads.decoding.sampling import Sampling, each_prompt
from specheads.decoding.trees import policies
from specheads.heads.load import kinds
from specheads.measure.counts import DepthCounts
from specheads.measure.generation import GenerationSettings, decode_prompts, write_alone
from specheads.measure.offline import guess_ranks, replay
from tests import tiny
from tests.heads.test_heads import make
from tests.measure.test_measure import Habit

DEPTH = 3
TREE = policies.Static([(0,), (1,), (2,), (3,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1)])
ASKED = {
    "greedy": Sampling(),
    "cool": Sampling(temperature=0.6, seed=3),
    "warm": Sampling(temperature=1.0, seed=3),
    "cut and penalised": Sampling(
        temperature=3.0, top_k=30, top_p=0.95, min_p=1e-3, repetition_penalty=1.3, seed=3
    ),
}
HABITS = ["habit", "habit of few tokens"]
CASES = [
    *((name, asked, True) for name in HABITS for asked in ASKED),
    *((name, "warm", True) for name in kinds()),
    *(("habit", asked, False) for asked in ASKED),
]
"""Head, sampling, and whether drafts are coupled."""
MORE = [
    *((name, asked, True) for name in kinds() for asked in ASKED if asked != "warm"),
    *((name, "warm", False) for name in [*kinds(), HABITS[1]]),
]


@functools.cache
def head(name: str) -> Head:
    """Return a head that is right in some positions."""
    if name == "habit":
        return Habit(1.0, DEPTH)
    torch.manual_seed(1)
    if name == "habit of few tokens":
        return FewTokens()
    return make({"kind": name, "depth": DEPTH}, tiny.base())


class FewTokens(Habit):
    """A habit that drafts half of the vocabulary."""

    def __init__(self) -> None:
        super().__init__(1.0, DEPTH)
        self.draft_ids = torch.arange(0, tiny.VOCAB, 2)
        self.drafted_size = len(self.draft_ids)

    def logits(self, state, level):
        return super().logits(state, level)[..., self.draft_ids]

    def begin(self, committed, memory):
        logits, state = super().begin(committed, memory)
        return logits[..., self.draft_ids], state

    def extend(self, state, tokens, parents):
        logits, state = super().extend(state, tokens, parents)
        return logits[..., self.draft_ids], state


@functools.cache
def written(asked: str) -> list[list[int]]:
    """Return the text of the base alone."""
    return write_alone(tiny.base(), tiny.prompts(), how(asked))


def how(
    asked: str, *, coupled: bool = True, tree: policies.TreePolicy | None = None
) -> GenerationSettings:
    return GenerationSettings(
        max_new_tokens=24, sampling=ASKED[asked], coupled=coupled, tree=tree, batch_size=3
    )


def replayed(
    name: str, sampling: Sampling, texts: list[list[int]], tree: policies.Static, *, coupled: bool
) -> list[DepthCounts]:
    each = each_prompt(sampling, len(texts))
    ranks = [
        guess_ranks(tiny.base(), head(name), *text, width=4, sampling=one, coupled=coupled)
        for *text, one in zip(tiny.prompts(), texts, each, strict=True)
    ]
    return [replay(one, tree) for one in ranks]


@pytest.mark.parametrize(
    ("name", "asked", "coupled"),
    [*CASES, *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE)],
)
def test_replay_gives_the_loops_integers(name: str, asked: str, coupled: bool):
    for tree in (policies.chain(DEPTH), TREE):
        decoded = decode_prompts(
            tiny.base(), head(name), tiny.prompts(), how(asked, coupled=coupled, tree=tree)
        )
        assert [one.tokens for one in decoded] == written(asked)
        found = replayed(name, ASKED[asked], written(asked), tree, coupled=coupled)
        assert found == [one.counts for one in decoded]
        total = DepthCounts.total(found, DEPTH)
        if name.startswith("habit"):
            assert 0 < sum(total.accepted) < sum(total.offered), "some right and some wrong"


@pytest.mark.parametrize("asked", ["cool", "warm"])
def test_other_seed_gives_other_integers(asked: str):
    right, wrong = (
        replayed("habit", sampling, written(asked), TREE, coupled=True)
        for sampling in (ASKED[asked], replace(ASKED[asked], seed=4))
    )
    assert right != wrong
    # the noise of another seed gives fewer accepted drafts
    right, wrong = (DepthCounts.total(one, DEPTH) for one in (right, wrong))
    assert right.tokens_per_forward > wrong.tokens_per_forward

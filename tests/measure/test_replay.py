"""Replay gives the integers of decoding: with prompt lookup, and above temperature zero."""

import functools
from itertools import product
from typing import Any

import pytest
import torch

from specheads.core.drafter import Drafter, Head
from specheads.decoding.sampling import Sampling, expand_sampling
from specheads.decoding.trees import policies
from specheads.decoding.trees.hybrid import HybridTree, lookup_tree
from specheads.heads.load import kinds
from specheads.measure.counts import DepthCounts
from specheads.measure.generation import (
    BaseTexts,
    GenerationSettings,
    continue_prompts,
    decode_prompts,
)
from specheads.measure.offline import guess_ranks, measure_offline, replay
from specheads.measure.online import measure_online
from specheads.measure.tune_trees import best_paths
from tests import recurrent, tiny
from tests.heads.test_heads import make
from tests.measure.test_measure import Habit
from tests.slow import SOME_KINDS, slow_except

DEPTH = 3
CHAIN = policies.chain(DEPTH)
TREE = policies.Static([(0,), (1,), (2,), (3,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1)])
SIZE = 4
NEW_TOKENS = 20


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
def head(name: str) -> Head:
    """Return a head that is right in some positions."""
    if name.startswith("habit"):
        return FewTokens() if "few" in name else Habit(1.0, DEPTH)
    return make({"kind": name, "depth": DEPTH}, tiny.base())


def prompts() -> list[list[int]]:
    """Return prompts that repeat themselves, for prompt lookup."""
    pairs = zip(tiny.prompts(), tiny.continuations(), strict=True)
    return [prompt + text[:9] + prompt for prompt, text in pairs]


@functools.cache
def base_texts() -> list[list[int]]:
    return continue_prompts(tiny.base(), prompts(), GenerationSettings(max_new_tokens=NEW_TOKENS))


def count_decoding(drafter: Drafter | None, tree: policies.TreePolicy) -> list[DepthCounts]:
    generation = GenerationSettings(max_new_tokens=NEW_TOKENS, tree=tree, batch_size=3)
    decoded = decode_prompts(tiny.base(), drafter, prompts(), generation)
    assert [text.tokens for text in decoded] == base_texts()
    return [text.counts for text in decoded]


def replay_hybrid(ranks: list[torch.Tensor], tree: policies.Static) -> list[DepthCounts]:
    return [
        replay(rows, HybridTree(tree, SIZE), text=(prompt, text))
        for rows, prompt, text in zip(ranks, prompts(), base_texts(), strict=True)
    ]


@pytest.mark.parametrize(
    ("name", "tree"),
    slow_except(
        [*((name, TREE) for name in [*SOME_KINDS, "habit"]), ("habit", CHAIN)],
        product([*kinds(), "habit"], (TREE, CHAIN)),
    ),
    ids=lambda value: getattr(value, "name", value),
)
def test_replay_of_trees_and_hybrids_gives_the_loops_integers(name: str, tree: policies.Static):
    drafter = head(name)
    ranks = [
        guess_ranks(tiny.base(), drafter, prompt, text, width=4)
        for prompt, text in zip(prompts(), base_texts(), strict=True)
    ]
    plain = [replay(rows, tree) for rows in ranks]
    assert plain == count_decoding(drafter, tree)
    hybrid = replay_hybrid(ranks, tree)
    for trim in (False, True):
        assert hybrid == count_decoding(drafter, HybridTree(tree, SIZE, trim=trim))
    if name == "habit":
        totals = [DepthCounts.total(counts, len(counts[0].offered)) for counts in (hybrid, plain)]
        assert totals[0].tokens_per_forward > totals[1].tokens_per_forward > 1


@pytest.mark.parametrize(
    "architecture", slow_except(["qwen3_5_text"], ["qwen3_5_text", "granitemoehybrid", "falcon_h1"])
)
def test_replay_over_a_base_with_states_gives_the_loops_integers(architecture: str):
    base, prompts = recurrent.base(architecture), recurrent.prompts(9, 21)
    drafter = make({"kind": "eagle3", "depth": DEPTH}, base)
    generation = GenerationSettings(max_new_tokens=NEW_TOKENS, tree=CHAIN, batch_size=2)
    texts = continue_prompts(base, prompts, generation)
    # wrong drafts, which are rolled back, are most of them
    decoded = decode_prompts(base, drafter, prompts, generation)
    assert [text.tokens for text in decoded] == texts
    replayed = [
        replay(guess_ranks(base, drafter, prompt, text, width=1), CHAIN)
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    assert replayed == [text.counts for text in decoded]


def test_replay_of_prompt_lookup_gives_the_loops_integers():
    ranks = [torch.zeros(len(text) - 1, 0, dtype=torch.long) for text in base_texts()]
    counts = replay_hybrid(ranks, policies.NOTHING)
    assert counts == count_decoding(None, lookup_tree(SIZE))
    assert sum(sum(prompt.accepted) for prompt in counts) > 0


# --- above temperature zero, with and without coupling -------------------------------------------

SAMPLINGS = {
    "greedy": Sampling(),
    "cool": Sampling(temperature=0.6, seed=3),
    "warm": Sampling(temperature=1.0, seed=3),
    "cut and penalised": Sampling(
        temperature=3.0, top_k=30, top_p=0.95, min_p=1e-3, repetition_penalty=1.3, seed=3
    ),
}
HABITS = ["habit", "habit of few tokens"]
FAST = [
    *(("habit", sampling, True) for sampling in SAMPLINGS),
    *((name, "warm", True) for name in [HABITS[1], *SOME_KINDS]),
    *(("habit", sampling, False) for sampling in ("warm", "cut and penalised")),
]
"""Head, sampling, and whether drafts are coupled."""


@functools.cache
def sampled_texts(name: str) -> list[list[int]]:
    """Return the texts of the base alone with the sampling of this name."""
    return continue_prompts(tiny.base(), tiny.prompts(), settings(name))


def settings(
    name: str, *, coupled: bool = True, tree: policies.TreePolicy | None = None
) -> GenerationSettings:
    return GenerationSettings(
        max_new_tokens=24, sampling=SAMPLINGS[name], coupled=coupled, tree=tree, batch_size=3
    )


def replay_samples(
    name: str, sampling: Sampling, texts: list[list[int]], tree: policies.Static, *, coupled: bool
) -> list[DepthCounts]:
    rows = zip(tiny.prompts(), texts, expand_sampling(sampling, len(texts)), strict=True)
    ranks = [
        guess_ranks(tiny.base(), head(name), *text, width=4, sampling=seeded, coupled=coupled)
        for *text, seeded in rows
    ]
    return [replay(prompt_ranks, tree) for prompt_ranks in ranks]


@pytest.mark.parametrize(
    ("name", "sampling", "coupled"),
    slow_except(FAST, product([*HABITS, *kinds()], SAMPLINGS, (True, False))),
)
def test_replay_of_samples_gives_the_loops_integers(name: str, sampling: str, coupled: bool):
    texts = sampled_texts(sampling)
    for tree in (policies.chain(DEPTH), TREE):
        generation = settings(sampling, coupled=coupled, tree=tree)
        decoded = decode_prompts(tiny.base(), head(name), tiny.prompts(), generation)
        assert [text.tokens for text in decoded] == texts
        counts = replay_samples(name, SAMPLINGS[sampling], texts, tree, coupled=coupled)
        assert counts == [text.counts for text in decoded]
        total = DepthCounts.total(counts, DEPTH)
        if name.startswith("habit"):
            assert 0 < sum(total.accepted) < sum(total.offered), "some right and some wrong"


# --- a planted wrong drafter -------------------------------------------------------------------


class Shifted(Habit):
    """Drafts the token after the right one: an off-by-one error."""

    def __init__(self, *, online: bool = True, offline: bool = True) -> None:
        super().__init__(0.0, DEPTH)
        self.online, self.offline = online, offline
        self.best = self.habits.argmax(-1)

    def states(self, features: Any, tokens: Any, anchors: Any = None):
        del features, anchors
        for level in range(self.depth):
            last = tokens.roll(-1 - level, dims=1)
            yield self.habits[self.best[last] if self.offline else last]

    def begin(self, committed, memory):
        logits, state = super().begin(committed, memory)
        root = committed.root()
        return (self.habits[self.best[root]] if self.online else logits), state

    def extend(self, state, tokens, parents):
        logits, state = super().extend(state, tokens, parents)
        return (self.habits[self.best[tokens]] if self.online else logits), state


@functools.cache
def measure(shifted: str):
    """Return what is measured of a head that is shifted nowhere, offline, online, or in both."""
    head = Shifted(online="online" in shifted, offline="offline" in shifted)
    base, generation = tiny.base(), GenerationSettings(max_new_tokens=30, tree=CHAIN)
    texts = BaseTexts(tiny.prompts(), [text[:30] for text in tiny.continuations()])
    offline = measure_offline(base, head, texts, generation)
    return offline, *measure_online(base, head, texts, generation)


def test_shifted_drafts_lower_every_rate_and_change_no_text():
    right, wrong = measure("nowhere"), measure("online, offline")
    for good, bad in ((right[0], wrong[0]), (right[1], wrong[1])):
        assert bad.tokens_per_forward < 0.8 * good.tokens_per_forward
        assert bad.conditional_acceptance[0].rate < 0.5 * good.conditional_acceptance[0].rate
        assert bad.conditional_acceptance[0].interval[1] < good.conditional_acceptance[0].rate
    assert wrong[0].top_k_accuracy[0][0] < 0.5 * right[0].top_k_accuracy[0][0]
    assert wrong[1].tokens_per_forward_without_bonus < 0.3
    # a bad drafter costs time and never changes a token
    assert right[2].verdict == wrong[2].verdict == "identical"


@pytest.mark.parametrize("side", ["online", "offline"])
def test_replay_differs_if_only_one_side_is_shifted(side: str):
    offline, online, *_ = measure(side)
    assert offline.per_depth != online.per_depth
    assert offline.forwards != online.forwards
    offline, online, *_ = measure("online, offline")
    assert (offline.forwards, offline.per_depth) == (online.forwards, online.per_depth)


# --- figures that papers print -----------------------------------------------------------------

MEDUSA = (
    (0.5604, 0.6717, 0.7271, 0.7599, 0.7799), (0.3164, 0.4236, 0.4851, 0.5282, 0.5625),
    (0.2010, 0.2879, 0.3475, 0.3834, 0.4169), (0.1474, 0.2250, 0.2737, 0.3109, 0.3397),
    (0.1175, 0.1866, 0.2346, 0.2721, 0.2998),
)  # fmt: skip
"""Top-1 to top-5 accuracy of each head for 7B: assets/medusa_acc.csv of FasterDecoding/Medusa."""


@pytest.mark.parametrize(
    ("nodes", "length"), [(1, 1.560), (2, 1.738), (8, 2.070), (63, 2.385), (256, 2.454)]
)
def test_medusa_trees_have_their_published_length(nodes, length):
    within = torch.tensor(MEDUSA, dtype=torch.float64)
    rates = within.diff(dim=1, prepend=torch.zeros(5, 1, dtype=torch.float64))
    level, worth = {(): 1.0}, dict[tuple[int, ...], float]()
    for row in rates.tolist():
        level = {
            (*path, rank): value * chance
            for path, value in level.items()
            for rank, chance in enumerate(row)
        }
        worth |= level
    best = best_paths(worth, [0.0] * rates.shape[1], nodes + 1, 5)
    assert len({*best}) == nodes
    assert 1.0 + sum(worth[path] for path in best) == pytest.approx(length, abs=1e-3)

"""Replay equals decoding: in integers also with prompt lookup, in distribution for rejection."""

import functools
from typing import Any

import pytest
import torch

from specheads.base.model import FrozenBase
from specheads.core.drafter import Drafter, Head
from specheads.decoding.coupling import over_vocabulary
from specheads.decoding.sampling import Sampling, SamplingState, each_prompt
from specheads.decoding.trees import policies
from specheads.decoding.trees.hybrid import HybridTree, lookup_tree
from specheads.decoding.trees.policies import Sampled
from specheads.heads.load import kinds
from specheads.measure.counts import DepthCounts, paired_gain
from specheads.measure.generation import (
    Continuations,
    GenerationSettings,
    decode_prompts,
    write_alone,
)
from specheads.measure.offline import anchor_mask, guess_ranks, measure_offline, replay
from specheads.measure.online import measure_online
from specheads.measure.tune_trees import most_followed
from tests import tiny
from tests.heads.test_heads import make
from tests.measure.test_measure import Habit

DEPTH = 3
CHAIN = policies.chain(DEPTH)
TREE = policies.Static([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1)])
SIZE = 4
NEW_TOKENS = 20


@functools.cache
def head(name: str) -> Head:
    """Return a head that is right in some positions."""
    if name == "habit":
        return Habit(1.0, DEPTH)
    return make({"kind": name, "depth": DEPTH}, tiny.base())


def prompts() -> list[list[int]]:
    """Return prompts that repeat themselves, for prompt lookup."""
    pairs = zip(tiny.prompts(), tiny.continuations(), strict=True)
    return [prompt + text[:9] + prompt for prompt, text in pairs]


@functools.cache
def alone() -> list[list[int]]:
    return write_alone(tiny.base(), prompts(), GenerationSettings(max_new_tokens=NEW_TOKENS))


def decoded(drafter: Drafter | None, tree: policies.TreePolicy) -> list[DepthCounts]:
    how = GenerationSettings(max_new_tokens=NEW_TOKENS, tree=tree, batch_size=3)
    found = decode_prompts(tiny.base(), drafter, prompts(), how)
    assert [one.tokens for one in found] == alone()
    return [one.counts for one in found]


def replayed(ranks: list[torch.Tensor], tree: policies.Static) -> list[DepthCounts]:
    return [
        replay(rows, HybridTree(tree, SIZE), text=(prompt, text))
        for rows, prompt, text in zip(ranks, prompts(), alone(), strict=True)
    ]


@pytest.mark.parametrize("tree", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("name", [*kinds(), "habit"])
def test_replay_of_trees_and_hybrids_gives_the_loops_integers(name: str, tree: policies.Static):
    drafter = head(name)
    ranks = [
        guess_ranks(tiny.base(), drafter, prompt, text, width=3)
        for prompt, text in zip(prompts(), alone(), strict=True)
    ]
    plain = [replay(rows, tree) for rows in ranks]
    assert plain == decoded(drafter, tree)
    found = replayed(ranks, tree)
    for trim in (False, True):
        assert found == decoded(drafter, HybridTree(tree, SIZE, trim=trim))
    if name == "habit":
        both, one = (DepthCounts.total(some, len(some[0].offered)) for some in (found, plain))
        assert both.tokens_per_forward > one.tokens_per_forward > 1


def test_replay_of_prompt_lookup_gives_the_loops_integers():
    ranks = [torch.zeros(len(text) - 1, 0, dtype=torch.long) for text in alone()]
    found = replayed(ranks, policies.NOTHING)
    assert found == decoded(None, lookup_tree(SIZE))
    assert sum(sum(one.accepted) for one in found) > 0


# --- rejection, in distribution ----------------------------------------------------------------


def many_prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(tiny.VOCAB, (count, 6), generator=generator).tolist()


@torch.inference_mode()
def drawn_ranks(
    base: FrozenBase, head: Head, prompt: list[int], continuation: list[int], sampling: Sampling
) -> torch.Tensor:
    """Return 0 if rejection would accept the stored token as a draft of the head, else 1.

    The continuation is a sample of p, the base's distribution, and a draft is a sample of q, the
    head's. Given that the text has x, a draft was accepted there with probability
    min(1, q(x) / p(x)). One coin is tossed for each position and depth, so that `replay` of a chain
    has the distribution of the loop's counts. Rows and columns are as in `guess_ranks`.

    Source: min(p, q) = p min(1, q / p), of Leviathan et al. 2023, arXiv:2211.17192.
    """
    if len(continuation) < 2:
        return torch.empty(0, head.depth, dtype=torch.long)
    text = torch.tensor([prompt + continuation], device=base.device)
    num_roots, first = len(continuation) - 1, len(prompt) - 1
    features = base.read(text, head.aux_layers)
    ranks = torch.full((num_roots, head.depth), -1)
    coins = torch.Generator().manual_seed(sampling.seed)
    anchors = anchor_mask(text, first, num_roots)
    for level, state in zip(range(num_roots), head.states(features, text, anchors), strict=False):
        num_known = num_roots - level
        before = torch.arange(first + 1 + level, text.shape[1] - 1, device=base.device)
        each = text.expand(num_known, -1)
        rows = SamplingState([sampling] * num_known, before, each, base.vocab_size)
        logits = head.logits(state[0, first : first + num_known], level)[:, None]
        paths, wanted = text[0, before][:, None, None], text[0, before + 1][:, None]
        draft = rows.probs(over_vocabulary(head, logits, base.vocab_size), paths)[:, 0]
        real = rows.probs(base.logits_of(features.hidden[0, before])[:, None], paths)[:, 0]
        kept = draft.gather(1, wanted) / real.gather(1, wanted)
        tossed = torch.rand(num_known, generator=coins, dtype=torch.float64)
        ranks[:num_known, level] = (tossed >= kept[:, 0].double().cpu()).long()
    return ranks


@pytest.mark.slow
@pytest.mark.parametrize("name", ["habit", "mlp_speculator"])
def test_replay_of_rejection_has_the_loops_rate_on_2000_prompts(name: str):
    base, texts = tiny.base(), many_prompts(2000)
    drafter = Habit(0.2, DEPTH) if name == "habit" else head(name)
    how = GenerationSettings(
        max_new_tokens=10,
        sampling=Sampling(temperature=1.0, seed=5),
        batch_size=250,
        coupled=False,
        acceptance="rejection",
        tree=Sampled((1,) * DEPTH),
    )
    written = write_alone(base, texts, how)
    real = [one.counts for one in decode_prompts(base, drafter, texts, how)]
    each = each_prompt(how.sampling, len(texts))
    ranks = [drawn_ranks(base, drafter, *text) for text in zip(texts, written, each, strict=True)]
    offline = [replay(rows, CHAIN) for rows in ranks]
    gain = paired_gain(offline, real)
    assert gain.interval[0] <= 1.0 <= gain.interval[1]
    assert gain.interval[1] - gain.interval[0] < 0.05
    total = DepthCounts.total(offline, DEPTH)
    assert 0.05 < total.accepted[0] / total.offered[0] < 0.95
    # drafts shifted by one have other rates
    shifted = [replay(rows.roll(1, dims=1), CHAIN) for rows in ranks]
    wrong = paired_gain(shifted, real)
    assert not wrong.interval[0] <= 1.0 <= wrong.interval[1] or name != "habit"


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
            read = tokens.roll(-1 - level, dims=1)
            yield self.habits[self.best[read] if self.offline else read]

    def begin(self, committed, memory):
        logits, state = super().begin(committed, memory)
        root = committed.root()
        return (self.habits[self.best[root]] if self.online else logits), state

    def extend(self, state, tokens, parents):
        logits, state = super().extend(state, tokens, parents)
        return (self.habits[self.best[tokens]] if self.online else logits), state


def measured(drafter: Head):
    base, how = tiny.base(), GenerationSettings(max_new_tokens=30, tree=CHAIN)
    texts = Continuations(tiny.prompts(), write_alone(base, tiny.prompts(), how))
    return measure_offline(base, drafter, texts, how), *measure_online(base, drafter, texts, how)


def test_shifted_drafts_lower_every_rate_and_change_no_text():
    right, wrong = measured(Habit(0.0, DEPTH)), measured(Shifted())
    for good, bad in ((right[0], wrong[0]), (right[1], wrong[1])):
        assert bad.tokens_per_forward < 0.8 * good.tokens_per_forward
        assert bad.conditional_acceptance[0].rate < 0.5 * good.conditional_acceptance[0].rate
        assert bad.conditional_acceptance[0].interval[1] < good.conditional_acceptance[0].rate
    assert wrong[0].top_k_accuracy[0][0] < 0.5 * right[0].top_k_accuracy[0][0]
    assert wrong[1].tokens_per_forward_without_bonus < 0.3
    # a bad drafter costs time and never changes a token
    assert right[2].verdict == wrong[2].verdict == "identical"


@pytest.mark.parametrize("where", ["online", "offline"])
def test_replay_differs_if_only_one_side_is_shifted(where: str):
    offline, online, *_ = measured(Shifted(online=where == "online", offline=where == "offline"))
    assert offline.per_depth != online.per_depth
    assert offline.forwards != online.forwards
    offline, online, *_ = measured(Shifted())
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
    best = most_followed(worth, [0.0] * rates.shape[1], nodes + 1, 5)
    assert len({*best}) == nodes
    assert 1.0 + sum(worth[path] for path in best) == pytest.approx(length, abs=1e-3)

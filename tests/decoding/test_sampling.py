"""Sampling in the real loop: the laws of transformers, and the same tokens as the base alone."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from specheads.base.model import FrozenBase
from specheads.base.paged import BlockPool
from specheads.core.drafter import Drafter
from specheads.core.tree import TokenTree
from specheads.decoding import accept, noise
from specheads.decoding.generate import Decoding, generate
from specheads.decoding.sampling import GREEDY, Sampling, SamplingState
from specheads.decoding.trees import policies
from specheads.decoding.trees.policies import Product, Sampled
from tests import tiny
from tests.decoding.markov import Markov, grow
from tests.decoding.test_exact import RandomTrees
from tests.decoding.test_noise import FAR as MOST
from tests.decoding.test_noise import chi_square
from tests.oracle import Oracle
from tests.slow import slow_except

SETTINGS = {
    "plain": Sampling(temperature=0.9),
    "cut": Sampling(temperature=1.3, top_k=20, top_p=0.9, min_p=0.02),
    "penalty": Sampling(temperature=0.7, top_p=0.8, repetition_penalty=1.4),
    "greedy penalty": Sampling(repetition_penalty=1.5),
}


def ragged() -> list[list[int]]:
    """Return seven prompts of different lengths."""
    return [prompt[:length] for prompt in tiny.prompts() for length in (5, 3, 9)][:7]


def rows(settings: list[Sampling], texts: Tensor, vocab: int = tiny.VOCAB) -> SamplingState:
    lengths = torch.full((len(settings),), texts.shape[1] - 1)
    return SamplingState(settings, lengths, texts, vocab)


@pytest.mark.parametrize("name", ["plain", "cut", "penalty"])
def test_laws_are_those_that_transformers_samples_from(name):
    chosen = SETTINGS[name]
    model: Any = tiny.base("llama", "eager").model
    prompt = torch.tensor([tiny.prompts()[2]])
    out = model.generate(
        prompt, do_sample=True, max_new_tokens=8, use_cache=False, temperature=chosen.temperature,
        top_k=chosen.top_k, top_p=chosen.top_p, min_p=chosen.min_p or None,
        repetition_penalty=chosen.repetition_penalty, return_dict_in_generate=True,
        output_scores=True, output_logits=True, pad_token_id=0,
    )  # fmt: skip
    expected = torch.stack(out.scores, dim=1).softmax(-1)
    logits = torch.stack(out.logits, dim=1)
    # the new tokens as a chain below the prompt's last token
    new = out.sequences[:, prompt.shape[1] - 1 : -1]
    paths = torch.where(torch.ones(8, 8, dtype=torch.bool).tril(), new[:, None], new[:, :1, None])
    law = rows([chosen], prompt).probs(logits, paths)
    torch.testing.assert_close(law, expected, atol=1e-6, rtol=1e-5)
    assert (law == 0).any() == (name != "plain")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_samples_do_not_depend_on_drafts_or_on_other_rows(dtype):
    chosen = [Sampling(temperature=1.0, seed=seed) for seed in range(6)]
    chosen[2] = GREEDY
    #  a root with two children, and a grandchild
    tree = TokenTree(
        torch.tensor([0, 7, 9, 4]).expand(6, -1), torch.tensor([-1, 0, 0, 1]).expand(6, -1)
    )
    logits = torch.randn(6, 4, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    plain, with_noise = (
        replace(rows(chosen, torch.zeros(6, 8, dtype=torch.long), 256), dtype=dtype)
        for _ in range(2)
    )
    with_noise.level_noise(1)
    samples = plain.choose(tree, logits, tree.ancestors())
    assert torch.equal(samples, with_noise.choose(tree, logits, tree.ancestors()))
    positions = plain.lengths[:, None] + torch.tensor([1, 2, 2, 3])
    precise = torch.promote_types(dtype, torch.float32)
    gumbels = noise.gumbel(noise.bits(plain.seeds[:, None], positions, noise.TOKEN), 256, precise)
    expected = (logits.to(precise) + gumbels * plain.is_sampled[:, None, None]).argmax(-1)
    assert torch.equal(samples, expected)
    single_tree = TokenTree(tree.tokens[:1], tree.parents[:1])
    alone = plain.keep([4]).choose(single_tree, logits[4:5], single_tree.ancestors())
    assert torch.equal(samples[4:5], alone)


# --- the base alone ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETTINGS)
def test_the_base_alone_draws_by_the_noise_of_each_position(name):
    chosen = SETTINGS[name]
    base, prompt = tiny.base(), tiny.prompts()[1]
    tokens = generate(base, None, [prompt], max_new_tokens=12, sampling=[chosen]).tokens[0]
    text = list(prompt)
    for token in tokens:
        logits = base.model(input_ids=torch.tensor([text]), use_cache=False).logits[:, -1:]
        law = rows([chosen], torch.tensor([text])).probs(logits, torch.tensor([[[text[-1]]]]))[0, 0]
        seed, position = torch.tensor([chosen.seed, len(text)])
        gumbels = noise.gumbel(noise.bits(seed, position, noise.TOKEN), tiny.VOCAB)
        assert token == int((law.log() + gumbels).argmax())
        text.append(token)


def test_equal_prompts_are_answered_differently_and_again_the_same():
    laws = [Sampling(temperature=1.0, seed=seed) for seed in (3, 3, 4)]
    first, again, other_seed = (
        generate(tiny.base(), None, [[5, 9]] * 4, max_new_tokens=8, sampling=law).tokens
        for law in laws
    )
    assert first == again
    assert len({*map(tuple, first)}) == 4
    assert not {*map(tuple, first)} & {*map(tuple, other_seed)}


# --- sample and match ----------------------------------------------------------------------------

SHAPES: dict[str, Callable[[], policies.TreePolicy]] = {
    "random": RandomTrees,
    "chain": lambda: policies.chain(5),
    "stopping chain": lambda: policies.chain(5, confidence=0.03),
    "static": lambda: policies.Static([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]),
    "best first": lambda: policies.BestFirst(12, 4),
    "beam": lambda: policies.Beam(3, 4),
    "product": lambda: Product((2, 2, 1), 8),
    "sampled": lambda: Sampled((3, 2, 1)),
}
CACHES: dict[str, Callable[[FrozenBase], BlockPool | None]] = {
    "contiguous": lambda _: None,
    "paged": lambda base: base.pool(80, block_size=4),
}
MIXED = [
    SETTINGS["cut"],
    SETTINGS["plain"],
    Sampling(temperature=1.1, top_k=7),
    SETTINGS["penalty"],
    Sampling(temperature=0.8, top_p=0.6),
    SETTINGS["greedy penalty"],
    GREEDY,
]
EVERYTHING = [*itertools.product(tiny.ARCHITECTURES, SHAPES, CACHES, (1, 7))]
# every architecture with every cache, every shape with every cache and both batches
SOME = [
    (architecture, [*SHAPES][(index + 3 * turn) % 8], cache, (1, 7)[(index + turn) % 2])
    for index, architecture in enumerate(tiny.ARCHITECTURES)
    for turn, cache in enumerate(CACHES)
]


@functools.cache
def samples_alone(architecture: str, batch: int) -> Decoding:
    """Return what the base alone says to this many prompts, each with settings of its own."""
    chosen = [sampling.of_prompt(index) for index, sampling in enumerate(MIXED[:batch])]
    return generate(
        tiny.base(architecture), None, ragged()[:batch], max_new_tokens=16, sampling=chosen
    )


def match(
    architecture: str,
    shape: str,
    cache: str,
    batch: int,
    acceptance: str | accept.AcceptanceRule = "match",
    **settings: Any,
) -> tuple[Decoding, Decoding]:
    """Return what a drafter that knows most of the text helps to say, and what the base says."""
    base, policy, prompts = tiny.base(architecture), SHAPES[shape](), ragged()[:batch]
    alone = samples_alone(architecture, batch)
    texts = [prompt + tokens for prompt, tokens in zip(prompts, alone.tokens, strict=True)]
    chosen = [sampling.of_prompt(index) for index, sampling in enumerate(MIXED[:batch])]
    decoding = generate(
        base,
        Oracle(texts, policy.depth, tiny.VOCAB, rate=0.8),
        prompts,
        max_new_tokens=16,
        sampling=chosen,
        tree=policy,
        acceptance=acceptance,
        pool=CACHES[cache](base),
        **settings,
    )
    return decoding, alone


@pytest.mark.parametrize(
    ("architecture", "shape", "cache", "batch"),
    slow_except(SOME, EVERYTHING),
)
def test_sample_and_match_gives_the_base_s_samples(architecture, shape, cache, batch):
    decoding, alone = match(architecture, shape, cache, batch)
    assert decoding.tokens == alone.tokens
    if architecture == "llama":
        assert match(architecture, shape, cache, batch, coupled=False)[0].tokens == alone.tokens
    # what a sampled tree holds is luck, and so is what of it agrees
    assert shape == "sampled" or sum(decoding.forwards) < 0.8 * sum(alone.forwards)


def a_draw_for_each_node(
    tree: TokenTree, logits: Tensor, ancestors: Tensor, rows: SamplingState
) -> accept.Verdict:
    """Draw after every node with a number of its own: the law is right, the tokens are others."""
    nodes = torch.arange(tree.tokens.shape[1])
    samples = accept.draw(
        rows.tree_probs(tree, logits, ancestors), noise.uniform(rows.lengths[:, None], nodes)
    )
    return accept.match(tree, samples, ancestors)


@pytest.mark.parametrize("acceptance", ["typical", a_draw_for_each_node])
def test_a_rule_that_is_not_sample_and_match_is_caught(acceptance):
    decoding, alone = match("llama", "static", "contiguous", 7, acceptance)
    assert decoding.tokens != alone.tokens


# --- a toy model, counted ------------------------------------------------------------------------


class CountingDrafter(Markov):
    """A Markov drafter that counts how often it is asked."""

    calls = 0

    def extend(self, state: None, tokens: Tensor, parents: Tensor) -> tuple[Tensor, None]:
        self.calls += 1
        return super().extend(state, tokens, parents)


def draft_tree(
    policy: policies.TreePolicy,
    drafter: Drafter,
    roots: list[int],
    chosen: Sampling,
    *,
    coupled: bool = True,
) -> TokenTree:
    texts = torch.tensor(roots)[:, None]
    samplings = [chosen.of_prompt(row) for row in range(len(roots))]
    sampling = replace(rows(samplings, texts, VOCAB), coupled=coupled)
    return grow(policy, drafter, roots, sampling)


def test_drafting_stops_below_a_doubted_token_and_saves_the_calls():
    policy = policies.chain(3, confidence=0.6)
    #  0 -> 1 -> 2 -> 3 surely, and after 3 and 4 any token may follow
    table = torch.zeros(5, 5)
    table[[0, 1, 2], [1, 2, 3]] = 50.0
    sure, doubting = (
        draft_tree(policy, drafter, roots, Sampling(temperature=1.0), coupled=False)
        for drafter, roots in (
            (CountingDrafter(table, 3), [0, 2]),
            (CountingDrafter(table, 3), [3, 4]),
        )
    )
    # row 0 is sure all the way; row 1 draws 3 surely, then doubts and is done
    assert sure.parents.tolist() == [[-1, 0, 1, 2], [-1, 0, 1, -1]]
    assert sure.tokens[0].tolist() == [0, 1, 2, 3]
    # where every row doubts its first token it is all there is to verify
    assert doubting.parents.tolist() == [[-1, 0], [-1, 0]]
    counting = CountingDrafter(table, 3)
    draft_tree(policy, counting, [3, 4], Sampling(temperature=1.0), coupled=False)
    assert counting.calls == 0


def test_drawn_children_are_distinct_and_follow_the_law_without_replacement():
    table = torch.randn(5, 5, generator=torch.Generator().manual_seed(0)).double()
    chosen = Sampling(temperature=0.7, top_k=4)
    tree = draft_tree(Sampled((2, 1)), Markov(table, 2), [3] * 20_000, chosen)
    assert tree.branch_sampling is not None
    law = (table[3] / 0.7).masked_fill(table[3] == table[3].min(), -torch.inf).softmax(-1)
    torch.testing.assert_close(tree.branch_sampling.probs[0, 0], law)
    first, second = tree.tokens[:, 1], tree.tokens[:, 2]
    counts = torch.zeros(5, 5).index_put_((first, second), torch.ones(()), accumulate=True)
    expected_law = law[:, None] * law / (1 - law)[:, None]
    expected_law.fill_diagonal_(0.0)
    torch.testing.assert_close(counts.double() / 20_000, expected_law, atol=0.015, rtol=0.0)


def test_greedy_rows_get_the_best_guesses_and_small_draft_vocabularies_their_tokens():
    class Small(Markov):
        def to_tokens(self, drafted: Tensor) -> Tensor:
            return drafted + 2

    table = torch.tensor([[0.0, 2.0, 1.0]]).expand(5, -1)
    tree = draft_tree(Sampled((2, 1)), Small(table, 2), [1], GREEDY)
    assert tree.tokens.tolist() == [[1, 3, 4, 3, 3]]
    tree = draft_tree(Sampled((3,)), Small(table, 1), [1], Sampling(temperature=1.0))
    assert sorted(tree.tokens[0, 1:].tolist()) == [2, 3, 4]
    assert tree.branch_sampling is not None
    assert tree.branch_sampling.probs[0, 0, :2].tolist() == [0.0, 0.0]


VOCAB, NEW, BATCH = 5, 3, 4_000
CHOSEN = Sampling(temperature=0.8, repetition_penalty=1.3, seed=11)


@functools.cache
def toy() -> FrozenBase:
    torch.manual_seed(1)
    config = tiny.config(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1)
    base = FrozenBase(AutoModelForCausalLM.from_config(config))
    for parameter in base.model.parameters():
        parameter.data.mul_(6.0)
    return base


@functools.cache
def expected() -> Tensor:
    """Return the law of the first new tokens, from whole forwards over every text."""
    texts, law = torch.tensor([[2, 0]]), torch.ones(1)
    for _ in range(NEW):
        logits = toy().model(input_ids=texts, use_cache=False).logits[:, -1:]
        chances = rows([CHOSEN] * len(texts), texts, VOCAB).probs(logits, texts[:, None, -1:])[:, 0]
        law = (law[:, None] * chances).flatten()
        following = torch.arange(VOCAB).repeat(len(texts))[:, None]
        texts = torch.cat([texts.repeat_interleave(VOCAB, dim=0), following], dim=1)
    return law


def guesser(seed: int, spread: float) -> Markov:
    generator = torch.Generator().manual_seed(seed)
    return Markov(spread * torch.randn(VOCAB, VOCAB, generator=generator), 2)


NEAR, FAR = guesser(2, 1.0), guesser(24, 2.0)
"""Drafters with which a dropped token, and a second sibling, matter most."""


def deviation(
    acceptance: str | accept.AcceptanceRule,
    tree: policies.TreePolicy,
    drafter: Drafter,
    batches: int = 1,
) -> float:
    """Return how far the counts of many texts are from their law, in standard deviations."""
    counts = torch.zeros(VOCAB**NEW)
    settings: dict[str, Any] = {"max_new_tokens": NEW, "acceptance": acceptance, "tree": tree}
    for batch in range(batches):
        samplings = [CHOSEN.of_prompt(batch * BATCH + row) for row in range(BATCH)]
        tokens = generate(toy(), drafter, [[2, 0]] * BATCH, sampling=samplings, **settings).tokens
        texts = torch.tensor(tokens) @ (VOCAB ** torch.arange(NEW - 1, -1, -1))
        counts += torch.bincount(texts, minlength=VOCAB**NEW)
    law = batches * BATCH * expected()
    # texts that are expected less than five times count as one
    rare = law < 5
    return chi_square(
        *(torch.cat([weights[~rare], weights[rare].sum()[None]]) for weights in (counts, law))
    )


COUNTED: dict[str, tuple[str, policies.TreePolicy, Drafter]] = {
    "match": ("match", policies.Static([(0,), (1,), (0, 0)]), NEAR),
    "rejection": ("rejection", Sampled((2, 1)), FAR),
}


@pytest.mark.parametrize("batches", [1, pytest.param(25, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", COUNTED)
def test_many_texts_of_a_toy_model_have_its_law(name, batches):
    assert deviation(*COUNTED[name], batches) < MOST

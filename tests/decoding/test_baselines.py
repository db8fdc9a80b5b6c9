"""Drafters without training: their drafts, and that the decoded text stays the same."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

from specheads.base.model import FrozenBase
from specheads.core.drafter import Drafter
from specheads.core.features import Committed
from specheads.core.tree import TokenTree
from specheads.decoding import suffix_decoding
from specheads.decoding.draft_model import DraftModel, Streaming
from specheads.decoding.generate import generate
from specheads.decoding.suffix_decoding import (
    MAX_MATCH,
    MIN_PROBABILITY,
    LookupText,
    SuffixAutomaton,
)
from specheads.decoding.trees import policies
from specheads.decoding.trees.hybrid import HybridTree, join_copied, lookup_tree
from tests import tiny
from tests.slow import slow_except

TREE = policies.Static([(0,), (1,), (0, 0), (1, 0)])
ARMS = (
    "lookup", "draft model, chain", "draft model, tree", "short window",
    "window, tree", "hybrid", "hybrid, trimmed",
)  # fmt: skip


def stranger(base: FrozenBase) -> FrozenBase:
    """Return another architecture of the same vocabulary."""
    return tiny.base("gpt2" if base.name != "tiny-gpt2" else "llama")


def arm(name: str, architecture: str) -> tuple[Drafter | None, policies.TreePolicy | None]:
    base = tiny.base(architecture)
    match name:
        case "lookup":
            # single tokens match often in random text, and mostly wrongly
            return None, lookup_tree(6)
        case "draft model, chain":
            return DraftModel(stranger(base), 3, base), None
        case "draft model, tree":
            return DraftModel(base, 3, base), policies.BestFirst(9, 3)
        case "short window":
            return Streaming(base, 3, sinks=2, window=6), None
        case "window, tree":
            return Streaming(base, 2, sinks=3, window=12, max_nodes=16), TREE
        case _:
            tree = HybridTree(TREE, 4, trim=name == "hybrid, trimmed")
            return tiny.oracle(2, architecture), tree


EVERYWHERE = ("lookup", "draft model, tree", "window, tree", "hybrid, trimmed")
CASES = [
    (architecture, name)
    for architecture in tiny.ARCHITECTURES
    for name in (ARMS if architecture == "llama" else EVERYWHERE)
]


@pytest.mark.parametrize(
    ("architecture", "name"),
    # every way over one base, and every base with one
    slow_except(
        [
            *(("llama", name) for name in ARMS),
            *zip(tiny.ARCHITECTURES, EVERYWHERE * 2, strict=True),
        ],
        CASES,
    ),
)
def test_every_baseline_decodes_the_base_s_text(architecture, name):
    drafter, policy = arm(name, architecture)
    out = generate(tiny.base(architecture), drafter, tiny.prompts(), max_new_tokens=14, tree=policy)
    assert out.tokens == [tokens[:14] for tokens in tiny.continuations(architecture)]


# --- prompt lookup -----------------------------------------------------------------------------


Read = list[tuple[int, int]]
"""A text, each token with the time at which it was read."""


def followers(texts: list[Read], suffix: list[int]) -> dict[int, list[int]]:
    """Return the tokens that follow a suffix anywhere, each with the times of its places."""
    times: dict[int, list[int]] = {}
    for text in texts:
        tokens = [token for token, _ in text]
        for end in range(len(suffix), len(text)):
            if tokens[end - len(suffix) : end] == suffix:
                token, time = text[end]
                times.setdefault(token, []).append(time)
    return times


def naive(texts: list[Read], text: Read, copied: int) -> tuple[int, list[int]]:
    """Return the match and the copy by loops over suffixes and places."""
    suffix, copy, probability, match = [token for token, _ in text], [], 1.0, 0
    while len(copy) < copied:
        while suffix and not followers(texts, suffix):
            suffix = suffix[1:]
        times = followers(texts, suffix)
        match = match or len(suffix)
        if not suffix:
            break
        token = max(times, key=lambda token: (len(times[token]), max(times[token])))
        probability *= len(times[token]) / sum(map(len, times.values()))
        if probability < MIN_PROBABILITY:
            break
        copy.append(token)
        suffix = [*suffix, token]
    return (min(match, MAX_MATCH), copy) if copy else (0, [])


@given(
    tokens=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=30),
    copied=st.integers(1, 8),
    shared=st.booleans(),
)
def test_suffix_decoding_equals_a_search_by_loops(
    tokens: list[tuple[int, int]], copied: int, shared: bool
):
    memory = SuffixAutomaton() if shared else None
    # three texts grow in turns, as the rows of a batch do
    lookups, texts = [LookupText((), memory) for _ in range(3)], [[], [], []]
    for time, (row, token) in enumerate(tokens):
        lookups[row].extend([token])
        texts[row].append((token, time))
        expected = naive(texts if shared else [texts[row]], texts[row], copied)
        assert lookups[row].find(copied) == expected


def test_memory_that_is_full_starts_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(suffix_decoding, "MAX_TOKENS", 12)
    memory = SuffixAutomaton()
    first, second = LookupText([1, 2, 3, 4, 5, 6], memory), LookupText([7, 2, 3], memory)
    assert first.find(2) == (0, [])
    assert second.find(2) == (2, [4, 5])
    first.extend([9] * 6)
    # the next search forgets both texts and reads its own
    assert first.find(1) == (3, [9])
    assert second.find(2) == (0, [])
    assert memory.num_resets == 1


def test_running_texts_longer_than_a_memory_are_not_read_at_every_step(monkeypatch: Any):
    monkeypatch.setattr(suffix_decoding, "MAX_TOKENS", 12)
    memory = SuffixAutomaton()
    texts = [LookupText(range(20 * row, 20 * row + 8), memory) for row in range(3)]
    for token in range(10):
        for text in texts:
            text.find(1)
            text.extend([token])
    # one reset before all are read, and one after every 12 of the 30 new tokens
    assert memory.num_resets <= 4


def test_text_that_repeats_itself_takes_bounded_time_per_token():
    memory = SuffixAutomaton()
    assert LookupText([5] * 1000, memory).find(4) == (MAX_MATCH, [5] * 4)
    assert sum(state.count for state in memory.states) <= 1000 * suffix_decoding.MAX_COUNTED


def test_answers_so_far_are_copied_in_the_next_request():
    base, prompt, memory = tiny.base(), tiny.prompts()[0], SuffixAutomaton()
    outs = [
        generate(base, None, [prompt], max_new_tokens=20, tree=lookup_tree(4), memory=memory)
        for _ in range(2)
    ]
    assert outs[0].tokens == outs[1].tokens
    # the second time every token is known, so each step accepts four
    assert outs[1].forwards == [4] < outs[0].forwards


def test_a_step_of_prompt_lookup_drafts_the_longest_match_alone():
    out = generate(tiny.base(), None, [[1, 2, 3, 1]], tree=lookup_tree(4), max_new_tokens=30)
    text, sizes = [1, 2, 3, 1, out.tokens[0][0]], []
    for step in out.steps[0]:
        sizes.append(len(LookupText(text).find(4)[1]))
        assert len(step.drafted) == 1 + sizes[-1]
        text += step.tokens
    assert min(sizes) == 0 < max(sizes)


# --- draft models ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "depth"),
    slow_except(
        [("gpt2", 4), ("gemma3", 4), ("llama", 1)],
        [*((architecture, 4) for architecture in tiny.ARCHITECTURES), ("llama", 1)],
    ),
)
def test_a_base_that_drafts_for_itself_is_always_right(architecture, depth):
    base = tiny.base(architecture)
    whole_window = Streaming(base, depth, window=base.max_length)
    for drafter in (DraftModel(base, depth, base), whole_window):
        out = generate(base, drafter, tiny.prompts(), max_new_tokens=tiny.NEW_TOKENS)
        assert out.forwards == [-(-(tiny.NEW_TOKENS - 1) // (depth + 1))] * 3


def test_a_tree_of_a_draft_model_follows_each_path():
    base = tiny.base()
    drafter = DraftModel(base, 3, base)
    prompt = torch.tensor([tiny.prompts()[0]])
    features, following = base.read(prompt), torch.tensor([[*tiny.prompts()[0][1:], 30]])
    logits, state = drafter.begin(
        Committed(features, following, torch.tensor([prompt.shape[1]])), drafter.memory(1, 40)
    )
    level = torch.tensor([[3, 4]])
    _, state = drafter.extend(state, level, torch.zeros_like(level))
    below = torch.tensor([[5, 6, 7]])
    logits, _ = drafter.extend(state, below, torch.tensor([[1, 0, 1]]))
    for index, path in enumerate(([4, 5], [3, 6], [4, 7])):
        plain = base.model(torch.tensor([[*prompt[0].tolist(), 30, *path]])).logits[0, -1]
        torch.testing.assert_close(logits[0, index], plain)


def test_a_draft_model_of_another_vocabulary_is_refused_in_one_line():
    model = FrozenBase(AutoModelForCausalLM.from_config(tiny.config(vocab_size=50)), name="other")
    with pytest.raises(ValueError, match="'other' has 50 tokens, 'tiny-llama' has 61"):
        DraftModel(model, 2, tiny.base())


def test_a_draft_model_with_fewer_padding_rows_reads_every_token_of_the_base(monkeypatch):
    base, small = tiny.base(), tiny.own_base(vocab_size=tiny.VOCAB - 20)
    # as if both had the tokenizer of the first tokens
    monkeypatch.setattr("specheads.decoding.draft_model.refuse_vocabulary", lambda *_: None)
    alone = generate(base, None, tiny.prompts(), max_new_tokens=20).tokens
    assert max(map(max, alone)) >= small.vocab_size
    drafter = DraftModel(small, 2, base)
    assert generate(base, drafter, tiny.prompts(), max_new_tokens=20).tokens == alone


# --- streaming ---------------------------------------------------------------------------------


def test_a_text_beyond_the_context_of_the_draft_model_is_refused():
    base, short = tiny.base(), tiny.own_base(max_position_embeddings=24)
    chosen: dict[str, Any] = {"head": DraftModel(short, 2, base), "tree": policies.chain(2)}
    assert len(generate(base, prompts=[[1, 2, 3]], max_new_tokens=21, **chosen).tokens[0]) == 21
    with pytest.raises(ValueError, match=r"draft model: 3 \+ 22 exceed 24; choose another"):
        generate(base, prompts=[[1, 2, 3]], max_new_tokens=22, **chosen)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mistral", "gemma3"])
def test_a_window_decodes_as_if_it_had_read_sinks_and_recent_text_at_their_places(architecture):
    base, sinks, window = tiny.base(architecture), 2, 8
    drafter = Streaming(base, 2, sinks=sinks, window=window)
    memory = drafter.memory(2, 99)
    text = tiny.prompts()[1]
    short = text[:3]
    # a long row and one that fits, side by side
    reading = torch.tensor([text, short + [0] * (len(text) - 3)])
    following = torch.cat([reading[:, 1:], reading[:, :1]], dim=1)
    following[:, -1], following[1, 2] = 33, 34
    logits, _ = drafter.begin(
        Committed(base.read(reading), following, torch.tensor([len(text), 3])), memory
    )
    # the plain model over the same tokens at the same positions, the long gap left out
    window_text = [*text, 33]
    positions = [*range(sinks), *range(len(window_text) - window, len(window_text))]
    plain = base.model(
        torch.tensor([[window_text[position] for position in positions]]),
        position_ids=torch.tensor([positions]),
        attention_mask=dense_mask(base, positions),
    )
    torch.testing.assert_close(logits[0, 0], plain.logits[0, -1])
    plain = base.model(torch.tensor([[*short, 34]]))
    torch.testing.assert_close(logits[1, 0], plain.logits[0, -1])


def dense_mask(base: FrozenBase, positions: list[int]):
    """Return causal masks that count a sliding window in positions, by kind of layer."""
    at = torch.tensor(positions)
    masks = {}
    for kind, window in base.windows.items():
        visible = at[:, None] >= at
        if window is not None:
            visible = visible & (at > at[:, None] - window)
        zero = torch.zeros(visible.shape, dtype=base.dtype)
        masks[kind] = zero.masked_fill(~visible, torch.finfo(base.dtype).min)[None, None]
    return masks if len(masks) > 1 else next(iter(masks.values()))


def test_a_window_shorter_than_the_copied_text_reads_all_of_it():
    window = Streaming(tiny.base(), 2, sinks=2, window=4)
    prompts = [[7, 3, 11, 5, 2, 9, 7, 3, 11] * 3, [4, 8] * 5]
    settings: dict[str, Any] = {"max_new_tokens": 60}
    out = generate(tiny.base(), window, prompts, tree=HybridTree(policies.chain(2), 10), **settings)
    assert max(len(step.tokens) for row in out.steps for step in row) > 5
    assert out.tokens == generate(tiny.base(), None, prompts, **settings).tokens


# --- grafting ----------------------------------------------------------------------------------


@given(st.integers(0, 2**31), st.integers(1, 6), st.integers(1, 6))
def test_a_grafted_tree_is_the_union_of_the_tree_and_the_copied_path(seed, copied, size):
    generator = torch.Generator().manual_seed(seed)
    batch, num_nodes = 3, 7
    tokens, parents = random_trees(batch, num_nodes, generator)
    path = torch.randint(3, (batch, copied), generator=generator)
    ends = torch.randint(copied + 1, (batch, 1), generator=generator)
    path = torch.where(torch.arange(copied) < ends, path, -1)
    out = join_copied(TokenTree(tokens, parents), path, size)
    plain = TokenTree(out.tokens, out.parents).ancestors()
    present = (out.parents >= 0) | (torch.arange(num_nodes + size) == 0)
    reach = out.ancestors()
    assert torch.equal(reach[present], plain[present])
    for row in range(batch):
        old = paths(tokens[row].tolist(), parents[row].tolist())
        new = paths(out.tokens[row].tolist(), out.parents[row].tolist())
        assert len(set(new)) == len(new), "a (parent, token) pair occurs once"
        copied_path = [token for token in path[row].tolist() if token >= 0]
        shared = max(len(p) for p in old if list(p) == copied_path[: len(p)])
        expected = {
            tuple(copied_path[:end]) for end in range(min(len(copied_path), shared + size) + 1)
        }
        assert set(new) == set(old) | expected


def random_trees(batch: int, num_nodes: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    rows = []
    for _ in range(batch):
        tokens, parents = [0], [-1]
        while len(tokens) < num_nodes:
            parent = int(torch.randint(len(tokens), (1,), generator=generator))
            token = int(torch.randint(3, (1,), generator=generator))
            if (parent, token) not in zip(parents, tokens, strict=True):
                tokens.append(token)
                parents.append(parent)
        rows.append((tokens, parents))
    return torch.tensor([row[0] for row in rows]), torch.tensor([row[1] for row in rows])


def paths(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    """Return the path to each node that is present."""
    paths: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(1, len(tokens)):
        if parents[node] >= 0:
            paths[node] = (*paths[parents[node]], tokens[node])
    return list(paths.values())

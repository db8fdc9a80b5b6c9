"""Bases whose layers keep states: chains, joins, prompts, refusals and features."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from specheads.base.ends import ServedBase
from specheads.base.model import FrozenBase
from specheads.base.recurrent import RecurrentLayer
from specheads.core.errors import InputError
from specheads.core.tree import TokenTree, chain
from specheads.decoding.draft_model import DraftModel, Streaming
from specheads.decoding.engine import Engine, default_tree
from specheads.decoding.generate import generate
from specheads.decoding.request import Request
from specheads.decoding.sampling import Sampling
from specheads.decoding.trees import policies
from specheads.decoding.trees.hybrid import HybridTree, lookup_tree
from specheads.measure.online import first_divergence
from tests import recurrent, tiny
from tests.oracle import Oracle
from tests.slow import slow_except

DEPTH = 4
LENGTHS = (5, 40, 115, 9)
ALL = [
    pytest.param(kind, dtype, 70, marks=pytest.mark.slow)
    for dtype in (torch.float64, torch.float32)
    for kind in recurrent.CONFIGS
]
DEFAULT = [(kind, torch.float64, 16) for kind in recurrent.FAMILIES]


def decode(base: FrozenBase, drafter: Any, prompts: list[list[int]], **settings: Any) -> Any:
    """Return what `generate` returns, without an end at an end-of-text token."""
    return generate(base, drafter, prompts, stop_at_eos=False, **settings)


def oracle(base: FrozenBase, texts: list[list[int]]) -> Oracle:
    """Return a drafter that is always right, right at random, always wrong, and right, by row."""
    drafter = Oracle(texts, DEPTH, base.vocab_size)
    wrong = torch.rand(drafter.guesses.shape, generator=torch.Generator().manual_seed(1))
    limits = torch.tensor([0.0, 0.5, 1.0, 0.0])[: len(texts), None]
    drafter.guesses = (drafter.guesses + (wrong < limits)) % base.vocab_size
    return drafter


@pytest.mark.parametrize(("kind", "dtype", "count"), [*DEFAULT, *ALL])
def test_chains_give_the_text_of_greedy_decoding(kind: str, dtype: torch.dtype, count: int):
    # rows leave and join: three are decoded together, and texts exceed every chunk
    base, prompts = recurrent.base(kind, dtype), recurrent.prompts(*LENGTHS)
    texts = [recurrent.greedy(base.model, prompt, count) for prompt in prompts]
    assert all(len({*text}) > 2 for text in texts)
    drafter = oracle(base, [p + t for p, t in zip(prompts, texts, strict=True)])
    decoded = decode(base, drafter, prompts, max_new_tokens=count, max_batch=3)
    assert decoded.tokens == texts
    assert decoded.forwards[0] == decoded.forwards[3] == -(-(count - 1) // (DEPTH + 1))
    assert decoded.forwards[0] < decoded.forwards[1] < decoded.forwards[2] == count - 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", recurrent.CONFIGS)
def test_in_bfloat16_the_first_difference_is_a_tie(kind: str):
    base, prompts = recurrent.base(kind, torch.bfloat16), recurrent.prompts(30, 5, 21)
    alone = decode(base, None, prompts, max_new_tokens=40).tokens
    texts = [prompt + text for prompt, text in zip(prompts, alone, strict=True)]
    drafted = decode(base, oracle(base, texts), prompts, max_new_tokens=40).tokens
    own = [recurrent.greedy(base.model, prompt, 40) for prompt in prompts]
    for prompt, text, others in zip(prompts, alone, zip(drafted, own, strict=True), strict=True):
        for other in others:
            if other != text:
                _, steps, _ = first_divergence(base, prompt, other, text, Sampling())
                assert abs(steps) <= 2


def test_without_a_rollback_the_text_differs(monkeypatch):
    base, prompts = recurrent.base("qwen3_5_text"), recurrent.prompts(9)
    text = recurrent.greedy(base.model, prompts[0], 20)
    drafter = Oracle([prompts[0] + text], DEPTH, base.vocab_size, rate=0.5)
    assert decode(base, drafter, prompts, max_new_tokens=20).tokens == [text]
    monkeypatch.setattr(RecurrentLayer, "commit", lambda layer, _: setattr(layer, "call", None))
    drafter = Oracle([prompts[0] + text], DEPTH, base.vocab_size, rate=0.5)
    assert decode(base, drafter, prompts, max_new_tokens=20).tokens != [text]


@pytest.mark.parametrize(
    "kind", slow_except(("qwen3_5_text", "granitemoehybrid", "mamba"), recurrent.CONFIGS)
)
def test_paged_rows_sample_the_text_of_the_base_alone(kind: str):
    base, prompts = recurrent.base(kind), recurrent.prompts(21, 5, 9)
    settings: dict[str, Any] = {"max_new_tokens": 16, "sampling": Sampling(temperature=1.0, seed=3)}
    alone = decode(base, None, prompts, **settings).tokens
    texts = [prompt + text for prompt, text in zip(prompts, alone, strict=True)]
    # drafts that do not see the noise are those of the oracle
    pool = {"max_batch": 2, "pool": base.pool(24, 4), "coupled": False}
    drafted = decode(base, oracle(base, texts), prompts, **settings, **pool)
    assert drafted.tokens == alone
    assert drafted.forwards[0] == 3 < drafted.forwards[2]
    lookup = decode(base, None, prompts, **settings, tree=lookup_tree(3))
    assert lookup.tokens == alone


@pytest.mark.parametrize("kind", ["kimi_linear", "mamba", "zamba"])
def test_prompts_of_different_lengths_are_read_in_pieces(kind: str):
    base, prompts = recurrent.base(kind), recurrent.prompts(40, 7, 16)
    lengths = [len(prompt) for prompt in prompts]
    padded = torch.tensor([prompt + [0] * (40 - len(prompt)) for prompt in prompts])
    cache = base.cache(3, 64)
    logits, features = base.prefill(padded, cache, lengths, chunk=16)
    verified = base.verify(chain(logits.argmax(-1)[:, None]), cache).logits[:, 0]
    for row, prompt in enumerate(prompts):
        text = torch.tensor([[*prompt, int(logits[row].argmax())]])
        hidden = base.read(text).hidden[0]
        bound = 1e-4 * hidden.abs().max()
        assert (features.hidden[row, : len(prompt)] - hidden[:-1]).abs().max() < bound
        assert (verified[row] - base.logits_of(hidden[-1])).abs().max() < 1e-3


def test_a_draft_model_with_states_forgets_its_drafts():
    base, prompts = recurrent.base("lfm2"), recurrent.prompts(9, 5)
    alone = decode(base, None, prompts, max_new_tokens=20)
    drafted = decode(base, DraftModel(base, 3, base), prompts, max_new_tokens=20)
    assert drafted.tokens == alone.tokens
    # the base drafts for itself, so that everything is accepted
    assert drafted.forwards == [5, 5]


@pytest.mark.parametrize("lengths", [(9, 1), (1, 9)])
def test_rows_that_a_draft_model_has_not_read_join_others(lengths):
    base, prompts = recurrent.base("falcon_h1"), recurrent.prompts(*lengths)
    alone = [decode(base, None, [prompt], max_new_tokens=20).tokens[0] for prompt in prompts]
    engine = Engine(base, DraftModel(base, 3, base), max_batch=2, max_length=40)
    streams = []
    for prompt in prompts:
        streams.append(engine.submit(Request(prompt=prompt, max_new_tokens=20, eos_ids=())))
        engine.step()
    engine.run()
    assert [stream.tokens for stream in streams] == alone
    # the base drafts for itself, so that everything is accepted
    assert [len(stream.steps) for stream in streams] == [5, 5]


def test_a_cache_is_freed_at_once_after_a_draft_that_was_not_committed():
    base = recurrent.base("falcon_h1")
    cache = base.cache(1, 9)
    base.verify(chain(torch.tensor([[3, 4, 5]])), cache)
    reference = weakref.ref(cache)
    gc.disable()
    try:
        del cache
        assert reference() is None
    finally:
        gc.enable()


def test_a_draft_model_with_states_refuses_branches():
    base, prompts = recurrent.base("lfm2"), recurrent.prompts(9)
    other = tiny.own_base("llama", vocab_size=base.vocab_size)
    drafter = DraftModel(base, 2, other)
    with pytest.raises(InputError, match=r"drafts chains only, .* got 2 nodes in a level"):
        decode(other, drafter, prompts, max_new_tokens=4, tree=policies.Beam(2, 2))


def test_trees_with_branches_are_refused_in_one_line():
    base, prompts = recurrent.base("lfm2"), recurrent.prompts(9)
    drafter = Oracle([prompts[0] * 9], DEPTH, base.vocab_size)
    for tree in (
        policies.Static([(0,), (1,)]),
        policies.Beam(2, 2),
        policies.BestFirst(4, 3),
        policies.Product([2, 1], 4),
        HybridTree(policies.chain(2), 2),
    ):
        with pytest.raises(InputError, match=r"verifies chains only: .* take a tree without"):
            Engine(base, drafter, tree=tree)
    for tree in (policies.NOTHING, policies.Beam(1, 2), policies.Sampled([1, 1])):
        Engine(base, drafter, tree=tree)
    cache = base.cache(1, 9)
    base.verify(TokenTree(torch.tensor([[3, 4, 5]]), torch.tensor([[-1, 0, 0]])), cache)
    with pytest.raises(InputError, match="verifies chains only"):
        cache.commit([[0, 2]])


def test_what_needs_keys_and_values_is_refused_by_name():
    model = recurrent.model("lfm2")
    with pytest.raises(InputError, match=r"compile=true needs .* 'lfm2' keep states"):
        FrozenBase(model, compile=True)
    with pytest.raises(InputError, match=r"exact=true needs .* 'lfm2' keep states"):
        FrozenBase(model, exact=True)
    with pytest.raises(InputError, match=r"streaming needs .* 'lfm2' do"):
        Streaming(recurrent.base("lfm2"), 2)


@pytest.mark.parametrize("kind", ["minimax", "recurrent_gemma"])
def test_caches_of_their_own_are_refused_by_name(kind: str):
    with pytest.raises(InputError, match=f"keep their states in the cache .*'{kind}'"):
        FrozenBase(recurrent.model(kind))


def test_states_count_in_the_rows_that_fit(monkeypatch):
    base = recurrent.base("falcon_h1")
    cache = base.cache(2, 9)
    base.prefill(torch.zeros(2, 3, dtype=torch.long), cache, [3, 3])
    states = [state for layer in cache.recurrent for state in layer.states().values()]
    assert base.state_bytes == 3 * sum(state.nbytes for state in states) // 2
    row = 2 * 42 * base.slot_bytes + base.state_bytes + (40 + 1 + base.vocab_size) * 8 + 1
    monkeypatch.setattr("specheads.decoding.engine.device_bytes", lambda _: 3.5 * row)
    assert Engine(base, None, max_batch=5, max_length=40).max_batch == 3


@pytest.mark.parametrize(
    "kind", slow_except(["qwen3_5_text", "zaya"], ["qwen3_5_text", "mamba2", "mamba", "zaya"])
)
def test_packed_documents_do_not_see_each_other(kind: str):
    base, lengths = recurrent.base(kind), (3, 20, 9)
    layers = (0, 1, base.num_layers)
    documents = [torch.tensor([prompt]) for prompt in recurrent.prompts(*lengths)]
    alone = [base.read(document, layers) for document in documents]
    order = [0, 1, 2, 2, 0, 1]
    ids = torch.tensor([number for i in order for number in [i] * lengths[i]]).view(2, -1)
    tokens = torch.cat([documents[i] for i in order], 1).view(2, -1)
    packed = base.read(tokens, layers, ids)
    for name in ("hidden", "aux"):
        expected = torch.cat([getattr(alone[i], name) for i in order], 1)
        assert torch.allclose(getattr(packed, name).view_as(expected), expected, atol=1e-5)


@pytest.mark.parametrize(
    "kind", slow_except(["falcon_h1", "mamba"], ["falcon_h1", "mamba", "mamba2", "lfm2"])
)
def test_aux_layers_are_the_streams_between_layers(kind: str):
    base, tokens = recurrent.base(kind), torch.tensor(recurrent.prompts(9))
    streams: list[torch.Tensor] = []
    layers: Any = base.model.base_model.layers
    hooks = [
        layer.register_forward_pre_hook(
            lambda _, args, settings: streams.append((*args, *settings.values())[0]),
            with_kwargs=True,
        )
        for layer in layers
    ]
    hooks.append(base.final_norm.register_forward_pre_hook(lambda _, args: streams.append(args[0])))
    aux = base.read(tokens, tuple(range(base.num_layers + 1))).aux
    for hook in hooks:
        hook.remove()
    assert aux is not None
    assert torch.equal(aux, torch.cat(streams, -1))


def test_a_tuned_tree_with_branches_becomes_a_chain():
    base, drafter = recurrent.base("lfm2"), Oracle([[1, 2]], DEPTH, recurrent.VOCAB)
    assert default_tree(drafter, base).is_chain


def test_hidden_states_of_servers_are_refused_where_vllm_has_none(tmp_path: Path):
    with pytest.raises(InputError, match=r"features=vllm needs .*, got 'lfm2'; leave"):
        ServedBase.load(recurrent.saved(tmp_path, "lfm2"))
    assert ServedBase.load(recurrent.saved(tmp_path, "qwen3_5_text")).num_layers == 4

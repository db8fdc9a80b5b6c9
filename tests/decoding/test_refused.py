"""Prompts, settings, trees and sizes that cannot be used are refused before anything is built."""

import array
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import jaxtyping
import numpy as np
import pytest
import torch

from specheads.core.errors import InputError
from specheads.core.tree import MAX_NODES
from specheads.decoding.draft_model import DraftModel, Streaming
from specheads.decoding.engine import Engine
from specheads.decoding.generate import generate
from specheads.decoding.request import Request
from specheads.decoding.sampling import GREEDY, Sampling
from specheads.decoding.trees.hybrid import HybridTree
from specheads.decoding.trees.policies import Beam, BestFirst, Product, Sampled, Static, chain
from specheads.heads.load import build_for_base
from tests import tiny

PROMPT = [5, 0, 60, 7]
BIG = 10**9


@pytest.fixture(autouse=True)
def _as_users_run_it() -> Iterator[None]:
    """Skip the checks of annotations, which run before ours and under pytest only."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def answer(prompts: Any, **settings: Any) -> list[list[int]]:
    return generate(tiny.base(), None, prompts, **{"max_new_tokens": 3, **settings}).tokens


def refused(message: str, make: Callable[[], Any]) -> None:
    with pytest.raises(InputError, match=message):
        make()


# --- prompts and settings ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt",
    [
        tuple(PROMPT),
        np.array(PROMPT, dtype=np.uint8),
        array.array("i", PROMPT),
        [torch.tensor(prompt) for prompt in PROMPT],
    ],
    ids=lambda prompt: f"{type(prompt).__name__} of {type(prompt[0]).__name__}",
)
def test_token_ids_are_taken_in_any_row_of_whole_numbers(prompt):
    assert answer([prompt]) == answer([PROMPT])
    request = Request(prompt=prompt)
    assert request.prompt == PROMPT
    assert {type(token) for token in request.prompt} == {int}


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("def f():", r"prompt 0 must be .* got str 'd'; tokenise .*tokenizer\(text\)"),
        (PROMPT, "prompt 0 must be a list of token ids, got int 5"),
        ([[PROMPT]], "token 0 of prompt 0 must be a whole number, got .5"),
        ([torch.tensor([1.0])], "token 0 of prompt 0 must be a whole number, got 1.0"),
        ([[True]], "token 0 of prompt 0 must be a whole number, got True"),
        ([PROMPT, [1, 2, -3]], "token 2 of prompt 1 must be at least 0, got -3"),
        ([PROMPT, [1, 61]], "below 61, got 61; use .* tokenizer"),
        ({"input_ids": [PROMPT]}, "prompts must be .* got {"),
        ((row for row in [PROMPT]), "prompts must be .* got <generator"),
        ([[1, 2], []], "a prompt needs at least one token"),
        ([[1] * 100 + [2] * 26], r"126 \+ 3 exceed 128"),
    ],
)
def test_invalid_prompts_are_refused_in_one_line(prompts, message):
    refused(message, lambda: answer(prompts))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 2.0}, "max_new_tokens must be a whole number, got 2.0"),
        ({"max_batch": True}, "max_batch must be a whole number, got True"),
        ({"max_new_tokens": -1}, "max_new_tokens must be at least 0, got -1"),
        ({"max_batch": 0}, "max_batch must be at least 1, got 0"),
        ({"acceptance": "lucky"}, "match, rejection, typical, got 'lucky'"),
        ({"sampling": 0.7}, "sampling must be .* got 0.7"),
        ({"sampling": [GREEDY] * 2}, "or a list of 1, got"),
    ],
)
def test_invalid_settings_are_refused_in_one_line(settings, message):
    refused(message, lambda: answer([PROMPT], **settings))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("temperature", -0.1, "a number, 0 or at least 1e-30"),
        # over which float32 logits are infinite
        ("temperature", 1e-40, "a number, 0 or at least 1e-30"),
        ("temperature", float("nan"), "a number"),
        ("top_k", -1, "a whole number, at least 0"),
        ("top_p", 0.0, "a number, above 0, at most 1"),
        ("min_p", 1.5, "a number, at least 0, at most 1"),
        ("repetition_penalty", 0.0, "a number, above 0"),
        ("seed", -1, "a whole number, at least 0"),
    ],
)
def test_sampling_settings_out_of_range_are_refused_in_one_line(name, value, message):
    refused(f"{name} must be {message}.*, got {value!r}", lambda: Sampling(**{name: value}))


BAD: dict[str, Any] = {
    "text": {"prompt": "abc"},
    "nothing": {"prompt": []},
    "no such token": {"prompt": [61]},
    "no settings": {"sampling": None},
    "an empty stop string": {"stop": ("",)},
    "stop strings without a tokenizer": {"stop": ("a",)},
    "a long prompt": {"prompt": [1] * 200},
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_fails_alone(name):
    engine = Engine(tiny.base(), None)
    before = engine.submit(Request(prompt=PROMPT, max_new_tokens=6))
    engine.step()
    state = [*engine.running], [*engine.waiting]
    refused(".", lambda: engine.submit(Request(**{"prompt": PROMPT, **BAD[name]})))
    assert (engine.running, engine.waiting) == state
    engine.run()
    assert [before.tokens] == answer([PROMPT], max_new_tokens=6)


# --- trees ---------------------------------------------------------------------------------------


@pytest.fixture
def built() -> Iterator[Callable[[], int]]:
    """Give what tells how many bytes of objects there have been at once since."""
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("make", "setting"),
    [
        (lambda: Product([1000] * 3, 64), "tree.branches"),
        (lambda: Sampled([BIG]), "tree.branches"),
        (lambda: chain(BIG), "tree.depth"),
        (lambda: BestFirst(BIG, 4), "best-first"),
        (lambda: BestFirst(8, 4, beam=BIG, branch=BIG), "tree.beam"),
        (lambda: Beam(BIG, 2, top=BIG), "tree.beam"),
        (lambda: Static([(rank,) for rank in range(MAX_NODES)]), "tree.paths"),
        (lambda: HybridTree(chain(1), 10**6), "copied_tokens"),
        (lambda: Static([(0,), (0, 0, 0)]), "distinct, non-empty rank paths"),
        (lambda: Static([(True,)]), r"a rank of tree\.paths must be"),
        (lambda: BestFirst(16, depth=3, beam=4, branch=2), "2 to 15 nodes, got 16"),
        (lambda: Beam(6, 2, top=5), "a beam needs a width from 1 to 5"),
        (lambda: Product((2, 2), 8), r"set tree\.branches, tree\.num_nodes"),
        (lambda: Sampled((2, 0)), r"a number of tree\.branches must be at least 1"),
        (lambda: Streaming(tiny.base(), 3, sinks=0), "a window above 3"),
    ],
)
def test_a_tree_that_cannot_be_is_refused_before_it_is_built(make, setting, built):
    refused(setting, make)
    assert built() < 10 * 2**20


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ("chain", r"TreePolicy, such as policies\.chain.*got 'chain'"),
        (chain(3), "the tree has 3 levels but the head drafts 2"),
        (Static([(tiny.VOCAB,)]), "62 guesses after a node, and the drafter knows 61 tokens"),
        (Product([tiny.VOCAB + 1], 8), "62 guesses"),
        (HybridTree(Static([(tiny.VOCAB,)]), 2), "62 guesses"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_tree_that_the_drafter_cannot_draft_is_refused_with_the_engine(tree, message):
    drafter = DraftModel(tiny.base(), 2, tiny.base())
    refused(message, lambda: Engine(tiny.base(), drafter, tree=tree))


def test_guesses_are_counted_among_the_tokens_that_a_head_drafts():
    small_head = build_for_base(
        {"kind": "medusa", "depth": 1, "draft_tokens": 8}, tiny.base()
    ).double()
    Engine(tiny.base(), small_head, tree=Static([(7,)]))
    refused("9 guesses .* knows 8", lambda: Engine(tiny.base(), small_head, tree=Static([(8,)])))


def test_a_tree_with_levels_needs_a_head():
    refused("the head drafts 0", lambda: generate(tiny.base(), None, [[1, 2]], tree=chain(2)))


# --- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_the_size_of_a_cache_is_known_before_it_is_made(architecture):
    base = tiny.base(architecture)
    cache = base.cache(2, 7)
    base.prefill(torch.tensor([[1, 2], [3, 4]]), cache, [2, 2])
    assert sum(stack.nbytes for stack in cache.slab.stacks) == base.slot_bytes * 2 * 7


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda base: base.cache(BIG, 1000), r"lower max_batch or max_length, or take a pool"),
        (lambda base: base.pool(BIG), "lower num_blocks"),
        (lambda base: Streaming(base, 2, window=10**12).memory(1, 8), "lower window or max_nodes"),
    ],
)
def test_too_large_allocations_are_refused_by_size(make, message, built):
    refused(rf"must fit into the memory of cpu, and needs .*{message}", lambda: make(tiny.base()))
    assert built() < 10 * 2**20

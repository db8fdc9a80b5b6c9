"""What cannot fit is refused by its computed size, before anything of it is built."""

import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import jaxtyping
import pytest
import torch

from specheads.base.paged import BlockPool
from specheads.core import machine
from specheads.core.errors import InputError
from specheads.core.tree import MAX_NODES
from specheads.decoding.draft_model import DraftModel
from specheads.decoding.engine import Engine
from specheads.decoding.generate import generate
from specheads.decoding.prompt_lookup import PromptLookup
from specheads.decoding.request import Request
from specheads.decoding.streaming import Streaming
from specheads.decoding.trees.hybrid import Hybrid, HybridTree, Lookup
from specheads.decoding.trees.policies import Beam, BestFirst, Product, Sampled, Static, chain
from specheads.heads.load import build_for
from tests import tiny

BIG = 10**9


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
        (lambda: Product([1] * 10**5, 64), "tree.branches"),
        (lambda: Sampled([1000] * 3), "tree.branches"),
        (lambda: Sampled([BIG]), "tree.branches"),
        (lambda: chain(BIG), "tree.depth"),
        (lambda: BestFirst(BIG, 4), "best-first"),
        (lambda: BestFirst(8, BIG), "tree.depth"),
        (lambda: BestFirst(8, 4, beam=BIG, branch=BIG), "tree.beam"),
        (lambda: Beam(BIG, 2, top=BIG), "tree.beam"),
        (lambda: Beam(2, BIG), "tree.depth"),
        (lambda: Static([(rank,) for rank in range(MAX_NODES)]), "tree.paths"),
        (lambda: Lookup(10**6), "copied_tokens"),
        (lambda: HybridTree(chain(1), 10**6), "copied_tokens"),
        (lambda: PromptLookup(61, 10**6), "copied_tokens"),
        (lambda: PromptLookup(61, max_ngram=BIG), "max_ngram"),
    ],
)
def test_a_tree_of_too_many_nodes_is_refused_before_it_is_built(make, setting, built):
    with pytest.raises(InputError, match=setting) as caught:
        make()
    assert "\n" not in str(caught.value)
    assert built() < 10 * 2**20


def test_the_largest_trees_are_taken():
    assert chain(200).num_nodes == 201
    assert Lookup(MAX_NODES - 1).num_nodes == MAX_NODES
    assert Product([63, 64], 8).num_answers == 63
    assert Sampled([4, 4]).num_nodes == 21
    assert BestFirst(60, 8, beam=10, branch=10).num_guesses == 10


@pytest.mark.parametrize("rank", [-1, 0.5, "0", True, None])
def test_a_rank_is_a_whole_number(rank):
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        with pytest.raises(InputError, match=r"a rank of tree\.paths must be"):
            Static([(rank,)])
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def test_a_tree_s_name_is_no_tree():
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        with pytest.raises(InputError, match=r"TreePolicy, such as policies\.chain.*got 'chain'"):
            Engine(tiny.base(), tiny.oracle(2), tree="chain")  # pyright: ignore[reportArgumentType]
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize(
    "tree",
    [
        Static([(10**6,)]),
        Static([(tiny.VOCAB,)]),
        BestFirst(8, 2, branch=tiny.VOCAB + 1),
        Product([tiny.VOCAB + 1], 8),
        Sampled([tiny.VOCAB + 1]),
        Beam(tiny.VOCAB + 1, 2, top=100),
        HybridTree(Static([(10**6,)]), 2),
    ],
    ids=lambda tree: tree.name,
)
def test_more_guesses_than_the_vocabulary_has_are_refused_with_the_engine(tree):
    drafter = DraftModel(tiny.base(), 2, tiny.base())
    if isinstance(tree, HybridTree):
        drafter = Hybrid(drafter, PromptLookup(tiny.VOCAB, 2))
    with pytest.raises(InputError, match=r"guesses after a node, and the drafter knows 61 tokens"):
        Engine(tiny.base(), drafter, tree=tree)


def test_guesses_are_counted_among_the_tokens_that_a_head_drafts():
    made = build_for({"kind": "medusa", "depth": 1, "draft_tokens": 8}, tiny.base()).double()
    Engine(tiny.base(), made, tree=Static([(7,)]))
    with pytest.raises(InputError, match="9 guesses after a node, and the drafter knows 8 tokens"):
        Engine(tiny.base(), made, tree=Static([(8,)]))


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_the_size_of_a_cache_is_known_before_it_is_made(architecture):
    base = tiny.base(architecture)
    cache = base.cache(2, 7)
    base.prefill(torch.tensor([[1, 2], [3, 4]]), cache, [2, 2])
    assert sum(one.nbytes for one in cache.slab.stacks) == base.slot_bytes * 2 * 7


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda base: Engine(base, max_batch=BIG, max_length=64), "lower max_batch"),
        (lambda base: base.cache(BIG, 1000), r"lower max_batch or max_length, or take a pool"),
        (lambda base: base.pool(BIG), "lower num_blocks"),
        (lambda _: BlockPool(1, 10**12), "lower num_blocks"),
        (
            lambda base: Streaming(base, 2, window=10**12).memory(1, 8),
            "lower window or max_nodes",
        ),
        (lambda base: DraftModel(base, 2, base, max_nodes=10**12).memory(1, 8), "lower max_batch"),
    ],
)
def test_too_large_allocations_are_refused_by_size(make, told, built):
    with pytest.raises(InputError, match=rf"must fit into the memory of cpu, and needs .*{told}"):
        make(tiny.base())
    assert built() < 10 * 2**20


def room(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Have the machine offer so many bytes."""
    monkeypatch.setattr(machine.os, "sysconf", lambda name: 1 if "PAGE_SIZE" in name else size)


def test_a_batch_is_refused_where_the_memory_ends(monkeypatch):
    settings: dict[str, Any] = {"max_new_tokens": 8, "tree": Static([(0,), (1,)])}
    prompts, drafter = tiny.prompts(), tiny.oracle(2)
    # masks of 3 nodes, their logits and ancestors, and 3 rows of 29 tokens and two trees
    slots, pool = 29 + 2 * 3, tiny.base().pool(8)
    needed = 3 * 3 * ((29 + 3) * 8 + tiny.VOCAB * 8 + 3) + 3 * slots * tiny.base().slot_bytes
    room(monkeypatch, needed)
    assert generate(tiny.base(), drafter, prompts, **settings).tokens == [
        said[:8] for said in tiny.continuations()
    ]
    room(monkeypatch, needed - 1)
    with pytest.raises(InputError, match=r"3 rows of 29 tokens with trees of 3 nodes must fit"):
        generate(tiny.base(), drafter, prompts, **settings)
    # one after the other, and over a pool, they need less
    generate(tiny.base(), drafter, prompts, max_batch=1, **settings)
    generate(tiny.base(), drafter, prompts, pool=pool, **settings)


def test_an_answer_of_the_drafter_counts_too(monkeypatch):
    made = build_for({"kind": "medusa", "depth": 2}, tiny.base()).double()
    tree = Product([20, 20], 8)
    assert (tree.num_answers, made.drafted_size) == (20, tiny.VOCAB)
    drafted = 20 * tiny.VOCAB * 8
    room(monkeypatch, drafted)
    with pytest.raises(InputError, match="the tree's nodes"):
        Engine(tiny.base(), made, tree=tree, max_batch=1, max_length=8)


def test_a_context_beyond_all_memory_needs_a_length(monkeypatch):
    monkeypatch.setitem(tiny.base().__dict__, "max_length", 10**13)
    with pytest.raises(InputError, match=r"rows of 1e.13 tokens .* lower max_batch, max_length"):
        Engine(tiny.base())
    Engine(tiny.base(), max_length=100).submit(Request(prompt=[1]))

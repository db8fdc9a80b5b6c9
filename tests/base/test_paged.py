"""Blocks are allocated, shared, copied on write and freed; results equal contiguous rows."""

import random
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from specheads.base.cache import KVCache, RowCache
from specheads.base.forward import Verification
from specheads.base.model import FrozenBase
from specheads.base.paged import BlockPool, PagedKVCache, PoolFullError
from specheads.core.drafter import Drafter
from specheads.core.tree import TokenTree
from specheads.decoding.engine import Engine
from specheads.decoding.generate import generate
from specheads.decoding.prompt_lookup import PromptLookup
from specheads.decoding.request import Request
from specheads.decoding.trees.hybrid import Hybrid, HybridTree
from specheads.decoding.trees.policies import Beam, BestFirst, Sampled, chain
from tests import tiny
from tests.decoding.test_exact import RandomTrees


def pool(num_blocks: int = 64, block_size: int = 4, *, layers: int = 3) -> BlockPool:
    return BlockPool(layers, num_blocks, block_size)


def padded(prompts: list[list[int]]) -> Tensor:
    longest = max(map(len, prompts))
    return torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts])


def random_tree(generator: random.Random, rows: int, num_nodes: int) -> TokenTree:
    """Return a tree of random tokens; verified nodes need not be accepted."""
    parents = [
        [-1] + [generator.randrange(node) for node in range(1, num_nodes)] for _ in range(rows)
    ]
    tokens = [[generator.randrange(tiny.VOCAB) for _ in range(num_nodes)] for _ in range(rows)]
    return TokenTree(torch.tensor(tokens), torch.tensor(parents))


@torch.inference_mode()
def everything_said(base: FrozenBase, cache: RowCache) -> list[Tensor]:
    """Read ragged prompts, verify random trees, commit random paths and remove rows."""
    generator = random.Random(0)
    prompts = tiny.prompts()
    logits, features = base.prefill(padded(prompts), cache, [*map(len, prompts)], chunk=8)
    real = [features.hidden[row, : len(prompt)] for row, prompt in enumerate(prompts)]
    said = [logits, *real]
    for step in range(5):
        rows = len(cache.row_lengths)
        seen = base.verify(random_tree(generator, rows, num_nodes=9), cache)
        said += [seen.logits, seen.features.hidden]
        paths = [seen.ancestors[row, generator.randrange(9)].nonzero() for row in range(rows)]
        cache.commit([path[:, 0].tolist() for path in paths])
        if step == 2:
            cache.keep_rows([2, 0, 2])
    return said


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_paged_rows_equal_contiguous_rows_bit_for_bit(architecture, attention):
    base = tiny.base(architecture, attention)
    rows = everything_said(base, base.cache(3, 128))
    blocks = pool()
    paged = everything_said(base, PagedKVCache(blocks, 3))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(paged, rows, strict=True))
    # again, over blocks with old content
    again = everything_said(base, PagedKVCache(blocks, 3))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(again, rows, strict=True))


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_random_trees_over_blocks_equal_the_plain_base(architecture, monkeypatch):
    base, policy, blocks = tiny.base(architecture), RandomTrees(), pool(90)
    monkeypatch.setattr(base, "cache", lambda batch, _: PagedKVCache(blocks, batch))
    out = generate(
        base,
        tiny.oracle(policy.depth, architecture),
        tiny.prompts(),
        max_new_tokens=tiny.NEW_TOKENS,
        tree=policy,
    )
    assert out.tokens == tiny.continuations(architecture)
    assert blocks.copied_blocks == 0


def test_rows_own_only_the_blocks_of_their_committed_tokens():
    blocks = pool(num_blocks=12)
    cache = PagedKVCache(blocks, 3)
    # padding needs no blocks: a prompt of one token next to one of 17 needs one block
    cache.reserve(17, [17, 4, 1])
    assert [len(row) for row in cache.blocks] == [5, 1, 1]
    cache.commit([list(range(17)), list(range(4)), [0]])
    cache.reserve(6)
    assert [len(row) for row in cache.blocks] == [6, 3, 2]
    cache.commit([[0], [0], []])
    assert [len(row) for row in cache.blocks] == [5, 2, 1]
    assert blocks.num_free == 4
    cache.keep_rows([2])
    assert blocks.num_free == 11
    cache.keep_rows([])
    assert blocks.num_free == 12
    assert not any(blocks.references)


class Written:
    """A paged cache of one layer whose content can be read token by token."""

    def __init__(self, blocks: BlockPool, rows: int) -> None:
        self.cache, self.said = PagedKVCache(blocks, rows), [[] for _ in range(rows)]

    def step(self, paths: list[list[int]], num_nodes: int, first: int) -> None:
        """Write nodes `first`, `first + 1`, ... in every row, all different; commit paths."""
        self.cache.reserve(num_nodes)
        rows = len(self.said)
        new = first + torch.arange(rows * num_nodes).view(rows, num_nodes)
        states = new[:, None, :, None].double()
        for layer in range(len(self.cache.layers)):
            self.cache.update(states, -states, layer)
        self.cache.commit(paths)
        for row, path in enumerate(paths):
            self.said[row] = self.said[row] + [int(new[row, node]) for node in path]

    def keep(self, rows: list[int]) -> None:
        self.cache.keep_rows(rows)
        self.said = [list(self.said[row]) for row in rows]

    def assert_held(self) -> None:
        for keys, values in filter(None, self.cache.pool.held):
            assert torch.equal(values, -keys)
            for blocks, said in zip(self.cache.blocks, self.said, strict=True):
                assert keys[0, blocks].flatten()[: len(said)].tolist() == said


def test_forks_copy_only_the_block_that_both_write_into():
    #  block      0        1        2             one row of ten tokens, forked in three
    #          0 1 2 3  4 5 6 7  8 9 . .
    blocks = pool()
    rows = Written(blocks, 1)
    rows.step([list(range(10))], 10, first=0)
    before = rows.cache.blocks[0]
    rows.keep([0, 0, 0])
    assert rows.cache.blocks == [before] * 3
    assert [blocks.references[block] for block in before] == [3, 3, 3]
    assert blocks.num_free == 64 - 3
    rows.step([[0], [0, 1], [1, 3]], 5, first=100)
    # all three write into block 2: two get a copy, the last one needs none
    assert blocks.copied_blocks == 2
    assert len({row[2] for row in rows.cache.blocks}) == 3
    assert {tuple(row[:2]) for row in rows.cache.blocks} == {tuple(before[:2])}
    rows.assert_held()
    # now every row writes into its own blocks
    rows.step([[0], [2], [1]], 3, first=200)
    assert blocks.copied_blocks == 2
    rows.assert_held()


def test_a_fork_at_the_end_of_a_block_copies_nothing():
    blocks = pool()
    rows = Written(blocks, 1)
    rows.step([list(range(8))], 8, first=0)
    rows.keep([0, 0])
    rows.step([[0, 2], [0, 1]], 4, first=100)
    assert blocks.copied_blocks == 0
    rows.assert_held()


def test_a_full_pool_raises_before_anything_changes():
    blocks = pool(num_blocks=5)
    rows = Written(blocks, 2)
    rows.step([[0, 1, 2], [0, 1, 2, 3]], 6, first=0)
    held = [list(row) for row in rows.cache.blocks]
    with pytest.raises(PoolFullError, match="must have 8 free blocks, has 3 of 5"):
        rows.cache.reserve(14)
    assert rows.cache.blocks == held
    assert blocks.num_free == 3
    # a removed row makes room for the other
    rows.keep([1])
    rows.step([[0, 13]], 14, first=50)
    rows.assert_held()


def test_a_full_pool_counts_the_copies_that_forks_need():
    blocks = pool(num_blocks=3)
    rows = Written(blocks, 1)
    rows.step([[0, 1]], 2, first=0)
    rows.keep([0, 0, 0, 0])
    with pytest.raises(PoolFullError, match="must have 3 free blocks, has 2 of 3"):
        rows.cache.reserve(1)
    rows.keep([0, 1, 2])
    rows.step([[0], [0], [0]], 1, first=10)
    rows.assert_held()
    assert blocks.num_free == 0


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_joined_rows_decode_as_if_alone(kind):
    base, blocks = tiny.base(), pool()

    def cache() -> RowCache:
        return base.cache(1, 40) if kind == "contiguous" else PagedKVCache(blocks, 1)

    def read(prompt: list[int], into: RowCache) -> Tensor:
        return base.prefill(torch.tensor([prompt]), into, [len(prompt)])[0]

    first, second, _ = tiny.prompts()
    together, late = cache(), cache()
    read(first, together)
    read(second, late)
    storage = blocks.held[0]
    before = [*together.row_lengths, *late.row_lengths]
    tables = [
        row for rows in (together, late) if isinstance(rows, PagedKVCache) for row in rows.blocks
    ]
    together.join(late)
    assert together.row_lengths == before
    assert late.row_lengths == []
    tree = random_tree(random.Random(4), rows=2, num_nodes=5)
    said = base.verify(tree, together).logits
    for row, prompt in enumerate((first, second)):
        alone = cache()
        read(prompt, alone)
        one = TokenTree(tree.tokens[row : row + 1], tree.parents[row : row + 1])
        torch.testing.assert_close(base.verify(one, alone).logits[0], said[row])
    if isinstance(together, PagedKVCache):
        # no block and no pool moved
        assert all(row[: len(old)] == old for row, old in zip(together.blocks, tables, strict=True))
        assert blocks.held[0] is storage
        assert blocks.copied_blocks == 0


def test_rows_over_different_pools_or_of_different_capacity_cannot_join():
    with pytest.raises(ValueError, match="must use its pool"):
        PagedKVCache(pool(), 1).join(PagedKVCache(pool(), 1))
    with pytest.raises(ValueError, match="contiguous rows of 8 slots, got 9"):
        KVCache(1, 1, 8).join(KVCache(1, 1, 9))


def serve(generator: random.Random, requests: int, num_blocks: int = 40) -> BlockPool:
    """Serve random requests over one pool: they start, fork, decode, are cancelled and end."""
    blocks = pool(num_blocks, generator.choice([1, 3, 4, 8]), layers=1)
    rows, waiting, number = Written(blocks, 0), requests, 0
    while waiting or rows.said:
        prompt = generator.randrange(1, 14)
        while waiting and len(rows.said) < 8 and blocks.blocks_for(prompt + 1) <= blocks.num_free:
            waiting -= 1
            new = Written(blocks, 1)
            new.step([list(range(prompt))], prompt, first=number)
            rows.cache.join(new.cache)
            rows.said += new.said
            number += prompt
        if rows.said:
            number = _serve_one_step(generator, rows, number)
        assert_counted(rows.cache)
    rows.assert_held()
    return blocks


def _serve_one_step(generator: random.Random, rows: Written, number: int) -> int:
    num_nodes = generator.randrange(1, 6)
    live = [row for row in range(len(rows.said)) if generator.random() > 0.4]
    # sometimes a fork of a row that continues
    rows.keep(live + live[:1] * (generator.random() < 0.3))
    paths = [
        sorted(generator.sample(range(num_nodes), generator.randrange(num_nodes + 1)))
        for _ in rows.said
    ]
    if not rows.said:
        return number
    try:
        rows.step(paths, num_nodes, first=number)
    except PoolFullError:
        rows.keep(list(range(len(rows.said) // 2)))
    if generator.random() < 0.1:
        rows.assert_held()
    return number + 5 * len(rows.said)


def assert_counted(cache: PagedKVCache) -> None:
    """Check that each block is free or has as many references as table entries."""
    named = Counter(block for row in cache.blocks for block in row)
    assert [named[block] for block in range(cache.pool.num_blocks)] == cache.pool.references
    assert cache.pool.num_free == cache.pool.references.count(0)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32))
def test_every_block_is_free_after_random_requests(seed):
    assert serve(random.Random(seed), requests=20).num_free == 40


@pytest.mark.slow
def test_every_block_is_free_after_a_thousand_requests():
    blocks = serve(random.Random(5), requests=1000)
    assert blocks.num_free == 40
    assert blocks.copied_blocks > 0


POLICIES = {
    "chain": chain(3),
    "best first": BestFirst(9, 3),
    "beam": Beam(3, 3),
    "sampled": Sampled((3, 2)),
    "graft": HybridTree(Beam(2, 2), 4),
}


@pytest.mark.parametrize("name", POLICIES)
def test_candidates_of_one_request_never_copy_a_block(name, monkeypatch):
    base, blocks, verify = tiny.base(), pool(), tiny.base().verify
    drafter: Drafter = tiny.oracle(3)
    if name == "graft":
        drafter = Hybrid(drafter, PromptLookup(tiny.VOCAB, 4))
    seen: list[int] = []

    def watched(
        tree: TokenTree, cache: PagedKVCache, aux_layers: tuple[int, ...] = ()
    ) -> Verification:
        before = [list(row) for row in cache.blocks]
        whole = [length // blocks.block_size for length in cache.row_lengths]
        said = [full_blocks(cache, row, count) for row, count in enumerate(whole)]
        out = verify(tree, cache, aux_layers)
        nodes = tree.tokens.shape[1]
        for row, (old, now) in enumerate(zip(before, cache.blocks, strict=True)):
            # the prefix keeps its blocks, and all candidates share as many more
            # as one row needs
            assert now[: len(old)] == old
            assert len(now) == blocks.blocks_for(cache.row_lengths[row] + nodes)
            assert torch.equal(said[row], full_blocks(cache, row, whole[row]))
            seen.append(whole[row])
        return out

    monkeypatch.setattr(base, "verify", watched)
    engine = Engine(base, drafter, tree=POLICIES[name], max_batch=2, pool=blocks)
    streams = [engine.submit(Request(prompt=one, max_new_tokens=12)) for one in tiny.prompts()]
    engine.run()
    assert [one.tokens for one in streams] == [said[:12] for said in tiny.continuations()]
    assert max(seen) > 5
    assert blocks.copied_blocks == 0


def full_blocks(cache: PagedKVCache, row: int, count: int) -> Tensor:
    """Return a copy of the keys of a row's first blocks, in the first layer."""
    return cache.pool.held[0][0][:, cache.blocks[row][:count]].clone()

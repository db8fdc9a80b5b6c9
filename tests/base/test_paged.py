"""Blocks are allocated and freed with their rows; results equal those of contiguous rows."""

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from specheads.base.cache import KVCache, RowCache
from specheads.base.model import FrozenBase
from specheads.base.paged import BlockPool, PagedKVCache, PoolFullError
from specheads.core.tree import TokenTree
from tests import tiny


def pool(num_blocks: int = 64, block_size: int = 4, *, layers: int = 3) -> BlockPool:
    return BlockPool(layers, num_blocks, block_size)


def random_tree(generator: random.Random, rows: int, num_nodes: int) -> TokenTree:
    """Return a tree of random tokens; verified nodes need not be accepted."""
    parents = [
        [-1] + [generator.randrange(node) for node in range(1, num_nodes)] for _ in range(rows)
    ]
    tokens = [[generator.randrange(tiny.VOCAB) for _ in range(num_nodes)] for _ in range(rows)]
    return TokenTree(torch.tensor(tokens), torch.tensor(parents))


@torch.inference_mode()
def outputs(base: FrozenBase, cache: RowCache) -> list[Tensor]:
    """Read ragged prompts, verify random trees, commit random paths and remove rows."""
    generator = random.Random(0)
    prompts = tiny.prompts()
    longest = max(map(len, prompts))
    padded = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts])
    logits, features = base.prefill(padded, cache, [*map(len, prompts)], chunk=8)
    found = [logits, *(features.hidden[row, : len(one)] for row, one in enumerate(prompts))]
    for step in range(5):
        rows = len(cache.row_lengths)
        seen = base.verify(random_tree(generator, rows, num_nodes=9), cache)
        found += [seen.logits, seen.features.hidden]
        paths = [seen.ancestors[row, generator.randrange(9)].nonzero() for row in range(rows)]
        cache.commit([path[:, 0].tolist() for path in paths])
        if step == 2:
            cache.keep_rows([2, 0])
    return found


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_paged_rows_equal_contiguous_rows_bit_for_bit(architecture, attention):
    base, blocks = tiny.base(architecture, attention), pool()
    rows = outputs(base, base.cache(3, 128))
    # the second time over blocks with old content
    for _ in range(2):
        paged = outputs(base, PagedKVCache(blocks, 3))
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(paged, rows, strict=True))


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


class Written:
    """A paged cache whose content can be read token by token."""

    def __init__(self, blocks: BlockPool, rows: int) -> None:
        self.cache, self.texts = PagedKVCache(blocks, rows), [[] for _ in range(rows)]

    def step(self, paths: list[list[int]], num_nodes: int, first: int) -> None:
        """Write nodes `first`, `first + 1`, ... in every row, all different; commit paths."""
        self.cache.reserve(num_nodes)
        rows = len(self.texts)
        new = first + torch.arange(rows * num_nodes).view(rows, num_nodes)
        states = new[:, None, :, None].double()
        for layer in range(len(self.cache.layers)):
            self.cache.update(states, -states, layer)
        self.cache.commit(paths)
        for row, path in enumerate(paths):
            self.texts[row] = self.texts[row] + [int(new[row, node]) for node in path]

    def keep(self, rows: list[int]) -> None:
        self.cache.keep_rows(rows)
        self.texts = [self.texts[row] for row in rows]

    def check(self) -> None:
        """Check that each row has its text, and that each block is free or has one owner."""
        for keys, values in filter(None, self.cache.pool.held):
            assert torch.equal(values, -keys)
            for blocks, text in zip(self.cache.blocks, self.texts, strict=True):
                assert keys[0, blocks].flatten()[: len(text)].tolist() == text
        owned = [block for row in self.cache.blocks for block in row]
        assert (
            len(set(owned)) == len(owned) == self.cache.pool.num_blocks - self.cache.pool.num_free
        )


def test_rows_over_different_pools_or_of_different_capacity_cannot_join():
    with pytest.raises(ValueError, match="must use its pool"):
        PagedKVCache(pool(), 1).join(PagedKVCache(pool(), 1))
    with pytest.raises(ValueError, match="contiguous rows of 8 slots, got 9"):
        KVCache(1, 1, 8).join(KVCache(1, 1, 9))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32))
def test_every_block_is_free_after_random_requests(seed: int):
    generator = random.Random(seed)
    blocks = pool(40, generator.choice([1, 3, 4, 8]), layers=1)
    rows, waiting, number = Written(blocks, 0), 20, 0
    while waiting or rows.texts:
        prompt = generator.randrange(1, 14)
        while waiting and len(rows.texts) < 8 and blocks.blocks_for(prompt + 1) <= blocks.num_free:
            waiting -= 1
            new = Written(blocks, 1)
            new.step([list(range(prompt))], prompt, first=number)
            rows.cache.join(new.cache)
            rows.texts += new.texts
            number += prompt
        rows.keep([row for row in range(len(rows.texts)) if generator.random() > 0.4])
        num_nodes = generator.randrange(1, 6)
        paths = [
            sorted(generator.sample(range(num_nodes), generator.randrange(num_nodes + 1)))
            for _ in rows.texts
        ]
        try:
            if rows.texts:
                rows.step(paths, num_nodes, first=number)
        except PoolFullError:
            rows.keep(list(range(len(rows.texts) // 2)))
        number += 5 * len(rows.texts)
        rows.check()
    assert blocks.num_free == 40

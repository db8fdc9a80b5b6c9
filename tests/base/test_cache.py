import random

import pytest
import torch
from torch import Tensor

from specheads.base.cache import KVCache, RowCache
from specheads.base.model import FrozenBase
from specheads.base.paged import BlockPool, PagedKVCache
from specheads.core.tree import TokenTree
from tests import tiny
from tests.slow import ATTENTIONS


def test_more_tokens_than_slots_are_refused():
    with pytest.raises(ValueError, match=r"cannot hold 0 \+ 6 tokens"):
        KVCache(1, 2, 5).reserve(6)


SHAPES = {
    "alike": [(3, 4)] * 4,
    "keys and values": [(3, 4), (3, 6)] * 2,
    "layers": [(3, 4)] * 2 + [(2, 8)] * 2,
}
"""Heads and width of the keys and values of two layers."""


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_layers_of_any_shape_keep_the_same_slots(shapes, static: bool):
    torch.manual_seed(0)
    paths, committed = [[0, 2, 5], [1, 6]], []
    together, late = (KVCache(2, batch, 20, static=static) for batch in (2, 1))
    for cache in (together, late):
        cache.reserve(7)
        rows = len(cache.row_lengths)
        new = [torch.randn(rows, heads, 7, width) for heads, width in shapes]
        for layer in range(2):
            cache.update(new[2 * layer], new[2 * layer + 1], layer)
        cache.commit(paths[:rows])
        committed += [[states[row, :, paths[row]] for states in new] for row in range(rows)]
    together.room = 4
    together.join(late)
    assert {stack.shape[1] for stack in together.slab.stacks} == {4}
    together.keep_rows(order := [2, 0, 1])
    for layer in range(2):
        for index, states in enumerate(together.slab.states(layer, (new[0], new[0]))):
            for row, old in enumerate(order):
                expected = committed[old][2 * layer + index]
                assert torch.equal(states[row, :, : expected.shape[1]], expected)


def pool(num_blocks: int = 64, block_size: int = 4, *, layers: int = 3) -> BlockPool:
    return BlockPool(layers, num_blocks, block_size)


def random_tree(
    generator: random.Random, rows: int, num_nodes: int, device: torch.device
) -> TokenTree:
    parents = [
        [-1] + [generator.randrange(node) for node in range(1, num_nodes)] for _ in range(rows)
    ]
    tokens = [[generator.randrange(tiny.VOCAB) for _ in range(num_nodes)] for _ in range(rows)]
    return TokenTree(torch.tensor(tokens, device=device), torch.tensor(parents, device=device))


@torch.inference_mode()
def outputs(base: FrozenBase, cache: RowCache) -> list[Tensor]:
    """Read ragged prompts, verify random trees, commit random paths and remove rows."""
    generator = random.Random(0)
    prompts = tiny.prompts()
    longest = max(map(len, prompts))
    padded = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts])
    logits, features = base.prefill(padded.to(base.device), cache, [*map(len, prompts)], chunk=8)
    tensors = [logits, *(features.hidden[row, : len(prompt)] for row, prompt in enumerate(prompts))]
    for step in range(5):
        rows = len(cache.row_lengths)
        verification = base.verify(random_tree(generator, rows, 9, base.device), cache)
        # a recorded forward overwrites them
        tensors += [verification.logits.clone(), verification.features.hidden.clone()]
        paths = [
            verification.ancestors[row, generator.randrange(9)].nonzero() for row in range(rows)
        ]
        cache.commit([path[:, 0].tolist() for path in paths])
        if step == 2:
            cache.keep_rows([2, 0])
    return tensors


@pytest.mark.parametrize(("architecture", "attention"), ATTENTIONS)
def test_paged_rows_equal_contiguous_rows_bit_for_bit(architecture, attention):
    base, blocks = tiny.base(architecture, attention), pool()
    rows = outputs(base, base.cache(3, 128))
    # the second time over blocks with old content
    for _ in range(2):
        paged = outputs(base, PagedKVCache(blocks, 3))
        assert all(
            torch.equal(paged_output, row_output)
            for paged_output, row_output in zip(paged, rows, strict=True)
        )


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

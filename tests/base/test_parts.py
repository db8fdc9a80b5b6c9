"""Attention of a tree in two parts, and recorded verifications, equal those under one mask."""

import random
from itertools import product

import pytest
import torch

from specheads.base.attention import (
    attend_folded,
    attend_nodes,
    attend_text,
    merge_parts,
    repeat_mask,
)
from specheads.base.masks import additive, tree_mask
from specheads.base.paged import PagedKVCache
from tests import tiny
from tests.base.test_cache import outputs, random_tree
from tests.slow import slow_except

LENGTHS = [1, 37, 12]
NODES, HEADS, SHARED, WIDTH = 9, 4, 2, 8


@pytest.mark.parametrize("scale", [1.0, 30.0], ids=["usual", "one key wins"])
def test_attention_in_two_parts_equals_attention_under_one_mask(scale: float) -> None:
    cache = tiny.base().cache(3, 64)
    cache.row_lengths, cache.lengths = LENGTHS, torch.tensor(LENGTHS)
    cache.longest, cache.shared_length = max(LENGTHS), None
    ancestors = random_tree(random.Random(1), 3, NODES, tiny.CPU).ancestors()
    query = scale * torch.randn(3, HEADS, NODES, WIDTH, dtype=torch.float64)
    # slots after the text hold old values
    keys, values = torch.randn(2, 3, SHARED, 64, WIDTH, dtype=torch.float64)
    slots = cache.scratch(NODES)[:, None, :, None].expand(-1, SHARED, -1, WIDTH)
    key, value = keys.gather(2, slots), values.gather(2, slots)
    end = max(LENGTHS) + NODES
    mask = tree_mask(ancestors, ancestors.sum(-1) - 1, cache, None, torch.float64)
    dense = repeat_mask(mask, HEADS // SHARED)
    expected = attend_folded(query, keys[:, :, :end], values[:, :, :end], dense, 0.3)
    nodes = repeat_mask(additive(ancestors, torch.float64), HEADS // SHARED)
    text = attend_text(query, keys, values, cache.lengths, 0.3)
    result = merge_parts(text, attend_nodes(query, key, value, nodes, 0.3))
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("architecture", "paged"),
    slow_except(
        [*zip(tiny.ARCHITECTURES, (False, True) * 4, strict=True)],
        product(tiny.ARCHITECTURES, (False, True)),
    ),
)
def test_recorded_verifications_equal_eager_ones(architecture: str, paged: bool) -> None:
    base, eager = tiny.own_base(architecture), tiny.base(architecture)
    base.forwards.record()
    assert base.forwards.compiled_layers
    pool = base.pool(64, block_size=4)
    # the second time replays what the first recorded
    for _ in range(2):
        rows = outputs(base, PagedKVCache(pool, 3) if paged else base.cache(3, 128))
        for row, expected in zip(rows, outputs(eager, eager.cache(3, 128)), strict=True):
            atol = 1e-9 * float(expected.abs().max())
            torch.testing.assert_close(row, expected, rtol=0, atol=atol)

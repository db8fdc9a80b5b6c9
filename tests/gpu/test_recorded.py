"""Recorded steps on a device: CUDA graphs there, and on a CPU calls of the same functions."""

import random
import warnings

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
from specheads.base.model import FrozenBase
from specheads.decoding.generate import generate
from specheads.decoding.trees import policies
from specheads.heads.load import kinds
from tests import tiny
from tests.base.test_cache import random_tree
from tests.gpu import trained

pytestmark = pytest.mark.gpu

TREES = {
    "chain": policies.chain(3),
    "static": policies.Static([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]),
}


def recording_base(device: torch.device) -> FrozenBase:
    """Return a base as a user of this device gets it; a CPU is told to record."""
    base = tiny.own_base(dtype=torch.float32, device=device, compile=None)
    if device.type == "cpu":
        base.forwards.record()
    assert base.static
    return base


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("kind", kinds())
def test_recorded_steps_give_the_greedy_text(
    kind: str, tree: str, paged: bool, device: torch.device
) -> None:
    base, head = recording_base(device), trained.head(kind, device)
    pool = base.pool(64) if paged else None
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".* runs without a CUDA graph")
        for _ in range(2):
            settings = {"max_new_tokens": tiny.NEW_TOKENS, "tree": TREES[tree], "pool": pool}
            decoding = generate(base, head, tiny.prompts(), **settings)
            assert decoding.tokens == tiny.continuations("llama", torch.float32, device)


@pytest.mark.parametrize("nodes", [1, 24])
def test_attention_in_two_parts_is_that_under_one_mask_in_16_bits(
    nodes: int, device: torch.device
) -> None:
    # the flash kernel folds the heads of a group into rows if there is a node only
    lengths, heads, shared, width, slots = [1, 300, 77], 8, 2, 64, 512
    cache = tiny.base(device=device).cache(3, slots)
    cache.row_lengths, cache.lengths = lengths, torch.tensor(lengths, device=device)
    cache.longest, cache.shared_length = max(lengths), None
    ancestors = random_tree(random.Random(1), 3, nodes, device).ancestors()
    query = torch.randn(3, heads, nodes, width, device=device).bfloat16()
    text = torch.randn(2, 3, slots, shared, width, device=device).bfloat16()
    # slots of a row follow each other, as in the memory of a cache on CUDA
    keys, values = text.transpose(2, 3)
    places = cache.scratch(nodes)[:, None, :, None].expand(-1, shared, -1, width)
    key, value = keys.gather(2, places), values.gather(2, places)
    mask = tree_mask(ancestors, ancestors.sum(-1) - 1, cache, None, torch.float64)
    dense = repeat_mask(mask, heads // shared)
    end = mask.shape[-1]
    states = query.double(), keys[:, :, :end].double(), values[:, :, :end].double()
    expected = attend_folded(*states, dense, None)
    small = repeat_mask(additive(ancestors, torch.bfloat16), heads // shared)
    parts = (
        attend_text(query, keys, values, cache.lengths, None),
        attend_nodes(query, key, value, small, None),
    )
    torch.testing.assert_close(merge_parts(*parts).double(), expected, rtol=0.02, atol=0.02)

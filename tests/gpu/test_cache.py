"""On a device, paged blocks give what contiguous rows give."""

from typing import Any

import pytest
import torch

from specheads.base.paged import BlockPool, PagedKVCache
from specheads.decoding.generate import generate
from specheads.decoding.trees import policies
from tests import tiny
from tests.base.test_cache import outputs

pytestmark = pytest.mark.gpu

TREE = policies.Static([(0,), (1,), (0, 0), (0, 1)])
WIDE: dict[str, Any] = {"head_dim": 16}
"""Triton's matrix products take at least 16 channels."""


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3", "mistral"])
def test_a_paged_cache_gives_the_text_of_contiguous_rows(architecture, device):
    changes = {"hidden_size": 64} if architecture == "gpt2" else WIDE
    base = tiny.base(architecture, dtype=torch.float32, device=device, **changes)
    prompts = tiny.prompts()
    expected = generate(base, None, prompts, max_new_tokens=30).tokens
    texts = [prompt + text for prompt, text in zip(prompts, expected, strict=True)]
    drafter = tiny.Oracle(texts, 2, tiny.VOCAB, rate=0.7, device=device)
    pool = base.pool(64)
    out = generate(base, drafter, prompts, max_new_tokens=30, tree=TREE, pool=pool)
    assert out.tokens == expected
    assert sum(out.forwards) < 0.8 * 3 * 29
    assert pool.num_free == pool.num_blocks


def test_blocks_that_are_gathered_give_what_contiguous_rows_give(device: torch.device) -> None:
    base = tiny.base(device=device, **WIDE)
    rows = outputs(base, base.cache(3, 128))
    paged = outputs(base, PagedKVCache(BlockPool(base.num_layers, 64, 4, device), 3))
    for paged_outputs, row_outputs in zip(paged, rows, strict=True):
        torch.testing.assert_close(
            paged_outputs, row_outputs, rtol=0, atol=1e-9 * float(row_outputs.abs().max())
        )

"""On a device, paged blocks and joined rows give what contiguous rows give."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from specheads.base.cache import RowCache
from specheads.base.model import FrozenBase
from specheads.base.paged import BlockPool, PagedKVCache
from specheads.core.tree import TokenTree
from specheads.decoding.generate import generate
from specheads.decoding.trees import policies
from tests import tiny

pytestmark = pytest.mark.gpu

TREE = policies.Static([(0,), (1,), (0, 0), (0, 1)])
WIDE = {"head_dim": 16, "max_position_embeddings": 512}
"""Triton's matrix products take at least 16 channels, and long prompts need a longer context."""
SETTINGS: dict[str, dict[str, Any]] = {"gpt2": {"hidden_size": 64, "max_position_embeddings": 512}}


def assert_close(found: Tensor, wanted: Tensor) -> None:
    """Compare logits or states, which are sums in another order."""
    share = 1e-9 if wanted.dtype == torch.float64 else 1e-3
    torch.testing.assert_close(found, wanted, rtol=0, atol=share * float(wanted.abs().max()))


def base_on(
    device: torch.device, architecture: str = "llama", dtype: torch.dtype = torch.float32
) -> FrozenBase:
    changes = SETTINGS.get(architecture, WIDE)
    return tiny.base(architecture, dtype=dtype, device=device, **changes)


def random_tree(
    generator: random.Random, rows: int, num_nodes: int, device: torch.device
) -> TokenTree:
    parents = [
        [-1] + [generator.randrange(node) for node in range(1, num_nodes)] for _ in range(rows)
    ]
    tokens = [[generator.randrange(tiny.VOCAB) for _ in range(num_nodes)] for _ in range(rows)]
    return TokenTree(torch.tensor(tokens, device=device), torch.tensor(parents, device=device))


def read(base: FrozenBase, prompts: list[list[int]], cache: RowCache) -> Tensor:
    """Read ragged prompts into a cache; return the logits after each."""
    longest = max(map(len, prompts))
    padded = [prompt + [0] * (longest - len(prompt)) for prompt in prompts]
    tokens = torch.tensor(padded, device=base.device)
    return base.prefill(tokens, cache, [*map(len, prompts)], chunk=8)[0]


def everything(base: FrozenBase, cache: RowCache) -> list[Tensor]:
    """Read prompts, verify random trees, commit random paths; rows leave in between."""
    generator = random.Random(0)
    found = [read(base, tiny.prompts(), cache)]
    for step in range(4):
        rows = len(cache.row_lengths)
        seen = base.verify(random_tree(generator, rows, 9, base.device), cache)
        found += [seen.logits, seen.features.hidden]
        paths = [seen.ancestors[row, generator.randrange(9)].nonzero()[:, 0] for row in range(rows)]
        cache.commit([path.tolist() for path in paths])
        if step == 1:
            cache.keep_rows([2, 0])
    return found


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3", "mistral"])
def test_a_paged_cache_gives_the_text_of_contiguous_rows(
    architecture: str, device: torch.device
) -> None:
    base, prompts = base_on(device, architecture), tiny.prompts()
    said = generate(base, None, prompts, max_new_tokens=30).tokens
    texts = [prompt + text for prompt, text in zip(prompts, said, strict=True)]
    drafter = tiny.Oracle(texts, 2, tiny.VOCAB, rate=0.7, device=device)
    pool = base.pool(64)
    out = generate(base, drafter, prompts, max_new_tokens=30, tree=TREE, pool=pool)
    assert out.tokens == said
    assert sum(out.forwards) < 0.8 * 3 * 29
    assert pool.num_free == pool.num_blocks


def test_blocks_that_are_gathered_give_what_contiguous_rows_give(device: torch.device) -> None:
    base = base_on(device, dtype=torch.float64)
    rows = everything(base, base.cache(3, 128))
    pool = BlockPool(base.num_layers, 64, 4, device)
    for ours, theirs in zip(everything(base, PagedKVCache(pool, 3)), rows, strict=True):
        assert_close(ours, theirs)

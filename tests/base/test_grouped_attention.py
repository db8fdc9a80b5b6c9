"""Attention with shared keys equals attention with repeated keys."""

import pytest
import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from specheads.base import tree_attention


class Layer(nn.Module):
    """The attributes of a layer that transformers reads in attention."""

    is_causal = True

    def __init__(self, group: int) -> None:
        super().__init__()
        self.num_key_value_groups = group


@pytest.mark.parametrize("nodes", [1, 2, 5])
@pytest.mark.parametrize("group", [1, 3])
def test_grouped_attention_equals_repeated_keys(group, nodes):
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    query, key, value = random(2, 2 * group, nodes, 4), random(2, 2, 9, 4), random(2, 2, 9, 4)
    mask = torch.where(random(2, 1, nodes, 9) > 0, 0.0, -1e30).double()
    mask[..., 0] = 0.0
    given = Layer(group), query, key, value, mask
    ours, _ = tree_attention.grouped_attention(*given, scaling=0.3)
    theirs, _ = sdpa_attention_forward(*given, scaling=0.3)
    assert ours.shape == (2, nodes, 2 * group, 4)
    assert ours.is_contiguous()
    torch.testing.assert_close(ours, theirs)

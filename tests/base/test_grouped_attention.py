"""Attention with shared keys equals attention with repeated keys."""

import random
from itertools import combinations, pairwise

import pytest
import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from specheads.base import tree_attention
from tests import tiny


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


def test_a_base_verifies_trees_without_repeating_keys(monkeypatch):
    seen, original = [], tree_attention.grouped_attention

    def attend(module, query, key, *rest, **settings):
        seen.append((query.shape[1:3], key.shape[1]))
        return original(module, query, key, *rest, **settings)

    base = tiny.base()
    monkeypatch.setattr(tree_attention, "grouped_attention", attend)
    before = base.config._attn_implementation
    cache = base.cache(1, 8)
    base.prefill(torch.tensor([[1, 2, 3]]), cache, [3])
    heads, shared = base.config.num_attention_heads, base.config.num_key_value_heads
    assert seen == [((heads, 3), shared)] * base.num_layers
    assert base.config._attn_implementation == before == "sdpa"


def test_rows_are_read_by_spans_up_to_the_longest_of_each(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    lengths = [300, 200] * 8 + [900, 100, 600]
    batch, nodes, end = len(lengths), 2, max(lengths) + 2

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    query, key, value = (
        random(batch, 4, nodes, 4),
        random(batch, 2, end, 4),
        random(batch, 2, end, 4),
    )
    slots = torch.arange(end)
    seen = slots < torch.tensor(lengths)[:, None] + nodes
    mask = torch.where(seen, 0.0, -1e30).double()[:, None, None].repeat(1, 1, nodes, 1)
    whole, _ = tree_attention.grouped_attention(Layer(2), query, key, value, mask)
    read, attend = [], nn.functional.scaled_dot_product_attention

    def watched(query, key, *rest, **settings):
        read.append((len(key), key.shape[2]))
        return attend(query, key, *rest, **settings)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", watched)
    with tree_attention.ragged(lengths):
        ours, _ = tree_attention.grouped_attention(Layer(2), query, key, value, mask)
    assert read == [(16, 302), (1, 902), (1, 102), (1, 602)]
    torch.testing.assert_close(ours, whole, rtol=1e-12, atol=1e-12)


def read_by(cuts: tuple[int, ...], lengths: list[int]) -> int:
    """Return the slots read with these cuts, including the cost of calls."""
    edges = [0, *cuts, len(lengths)]
    parts = [lengths[first:last] for first, last in pairwise(edges)]
    return sum(tree_attention.CALL + len(part) * max(part) for part in parts)


def test_spans_read_the_fewest_slots():
    """The spans cost as little as the best of all possible cuts."""
    for seed in range(20):
        draw = random.Random(seed)
        lengths = [draw.choice([5, 90, 300, 1200]) + draw.randrange(40) for _ in range(8)]
        ways = [cuts for count in range(8) for cuts in combinations(range(1, 8), count)]
        found = tree_attention.spans(tuple(lengths))
        assert [max(lengths[rows]) for rows, _ in found] == [longest for _, longest in found]
        assert [place for rows, _ in found for place in range(rows.start, rows.stop)] == [*range(8)]
        taken = read_by(tuple(rows.start for rows, _ in found[1:]), lengths)
        assert taken == min(read_by(cuts, lengths) for cuts in ways)
    assert tree_attention.spans((400,) * 64) == [(slice(0, 64), 400)]

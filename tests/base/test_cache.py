import pytest
import torch
from torch import Tensor

from specheads.base.cache import KVCache


def written(batch: int, length: int, start: int) -> Tensor:
    """Return keys (batch, 2 heads, length, width 1) that encode row, head and place: r.h.place."""
    rows = 1000 * torch.arange(batch)[:, None, None, None]
    heads = 100 * torch.arange(2)[:, None, None]
    return (rows + heads + start + torch.arange(length)[:, None]).double()


def write(cache: KVCache, length: int, start: int) -> tuple[Tensor, Tensor]:
    """Write the next positions into every layer, like a forward of the base."""
    cache.reserve(length)
    keys = written(len(cache.row_lengths), length, start)
    seen = [cache.update(keys, -keys, layer) for layer in range(len(cache.layers))]
    return seen[-1]


def held(cache: KVCache, layer: int) -> tuple[Tensor, Tensor]:
    """Return all slots of a layer, including the scratch."""
    keys, values = cache.slab.views[layer]
    return keys, values


def committed(cache: KVCache, layer: int = 0) -> list[list[int]]:
    """Return the places that each row stores, without row and head."""
    keys, values = held(cache, layer)
    assert torch.equal(values, -keys)
    assert torch.equal(keys[:, 1] % 100, keys[:, 0] % 100)
    return [
        (keys[row, 0, :length, 0] % 100).int().tolist()
        for row, length in enumerate(cache.row_lengths)
    ]


def test_commit_keeps_the_path_of_each_row_in_order():
    cache = KVCache(num_layers=2, batch=3, capacity=12)
    write(cache, 3, start=0)
    cache.commit([[0, 1, 2], [0], [0, 1]])
    assert committed(cache) == [[0, 1, 2], [0], [0, 1]]
    # rows of 3, 1 and 2 tokens read a tree of five nodes, 10 to 14, and keep different paths
    write(cache, 5, start=10)
    cache.commit([[0, 2, 4], [0], [0, 3]])
    for layer in range(2):
        assert committed(cache, layer) == [[0, 1, 2, 10, 12, 14], [0, 10], [0, 1, 10, 13]]
    # rejected nodes leave no trace in the next forward
    write(cache, 1, start=20)
    cache.commit([[0], [0], [0]])
    assert committed(cache) == [[0, 1, 2, 10, 12, 14, 20], [0, 10, 20], [0, 1, 10, 13, 20]]


def test_more_tokens_than_slots_are_refused():
    cache = KVCache(num_layers=1, batch=2, capacity=5)
    write(cache, 3, start=0)
    cache.commit([[0, 1, 2], [0]])
    with pytest.raises(ValueError, match=r"3 \+ 3 exceed its 5 slots"):
        write(cache, 3, start=10)
    assert committed(cache) == [[0, 1, 2], [0]]


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
    paths, kept = [[0, 2, 5], [1, 6]], []
    together, late = (KVCache(2, batch, 20, static=static) for batch in (2, 1))
    for cache in (together, late):
        cache.reserve(7)
        rows = len(cache.row_lengths)
        new = [torch.randn(rows, heads, 7, width) for heads, width in shapes]
        for layer in range(2):
            cache.update(new[2 * layer], new[2 * layer + 1], layer)
        cache.commit(paths[:rows])
        kept += [[one[row, :, paths[row]] for one in new] for row in range(rows)]
    together.room = 4
    together.join(late)
    assert {stack.shape[1] for stack in together.slab.stacks} == {4}
    together.keep_rows(order := [2, 0, 1])
    for layer in range(2):
        for place, held in enumerate(together.slab.views[layer]):
            for row, old in enumerate(order):
                wanted = kept[old][2 * layer + place]
                assert torch.equal(held[row, :, : wanted.shape[1]], wanted)

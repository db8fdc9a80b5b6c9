"""Attention of few nodes: shared keys are read once, on a processor each row's own slots only.

See docs/tree_verification.md.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from specheads.base.attending import is_special
from specheads.core.opaque import opaque

MOST_NODES = 64
"""Nodes up to which copying keys costs more than a mask that is as much higher."""

CALL = 256
"""Slots of a row that are read while attention is called once more: fewer are not worth a call."""

ALIGNED = 16
"""Elements between rows of a mask: the kernel of CUDA copies a mask whose rows begin elsewhere."""

_LENGTHS: ContextVar[tuple[int, ...]] = ContextVar("committed tokens of each row", default=())
_TALL: ContextVar[dict[int, tuple[Tensor, Tensor]]] = ContextVar("masks of all heads of a group")


@contextmanager
def ragged(lengths: Sequence[int]) -> Iterator[None]:
    """Let attention know how many slots each row has before the nodes of this forward."""
    tokens = _LENGTHS.set(tuple(lengths)), _TALL.set({})
    try:
        yield
    finally:
        _LENGTHS.reset(tokens[0])
        _TALL.reset(tokens[1])


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Attend from every row's nodes to its slots: what transformers calls in each layer.

    Queries are (batch, heads, node, width), keys and values (batch, key heads, slot, width).
    Heads that share keys are taken for further nodes of one head, where transformers repeats keys
    and values once a head: so much would be copied at every step. On a processor rows are read by
    spans, each up to its own longest row: see `spans`.
    """
    nodes = query.shape[2]
    if is_special(settings) or (nodes > MOST_NODES and query.device.type == "cpu"):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **settings
        )
    return folded(query, key, value, attention_mask, scaling), None


def folded(
    query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float | None
) -> Tensor:
    """Return what the nodes see (batch, node, heads, width), heads that share keys as nodes."""
    (batch, heads, nodes, width), shared = query.shape, key.shape[1]
    group = heads // shared
    query = query.reshape(batch, shared, group * nodes, width)
    if query.device.type == "cpu":
        # repeat() takes ten times as long on so small a thing, once a layer
        mask = torch.cat([attention_mask] * group, dim=2)
    else:
        mask = _tall(attention_mask, group)
    # the compiler makes one graph for rows of all lengths, and they are looked up when it runs
    attend = _opaque if torch.compiler.is_compiling() else _attend
    out = attend(query, key, value, mask, nodes, scaling)
    return out.reshape(batch, heads, nodes, -1).transpose(1, 2).contiguous()


def _tall(mask: Tensor, group: int) -> Tensor:
    """Return the mask of all heads of a group, one below the other; worked out once a forward."""
    known, slots = _TALL.get({}), mask.shape[-1]
    if id(mask) not in known:
        aligned = F.pad(mask, (0, -slots % ALIGNED)).repeat(1, 1, group, 1)[..., :slots]
        # the mask is kept beside it, or another could come to lie at its address
        known[id(mask)] = mask, aligned
    return known[id(mask)][1]


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, nodes: int, scaling: float | None
) -> Tensor:
    if query.device.type != "cpu":
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    out = [
        F.scaled_dot_product_attention(
            query[rows],
            key[rows, :, :end],
            value[rows, :, :end],
            attn_mask=mask[rows, ..., :end],
            scale=scaling,
        )
        for rows, end in _spans(len(query), nodes, key.shape[2])
    ]
    return out[0] if len(out) == 1 else torch.cat(out)


def _shaped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, nodes: int, scaling: float | None
) -> Tensor:
    del key, mask, nodes, scaling
    return query.new_empty(*query.shape[:-1], value.shape[-1])


_opaque = opaque("grouped_attention", _attend, _shaped)


def _spans(batch: int, nodes: int, end: int) -> list[tuple[slice, int]]:
    """Return which rows are read together, and up to which slot."""
    if len(lengths := _LENGTHS.get()) != batch:
        return [(slice(None), end)]
    return [(rows, longest + nodes) for rows, longest in spans(lengths)]


@lru_cache(maxsize=8)
def spans(lengths: tuple[int, ...]) -> list[tuple[slice, int]]:
    """Return which neighbours are read together, each span up to its longest row, and that length.

    Of all ways to part the rows it is the one that reads the fewest slots, a call counting `CALL`.
    """
    # the least that the first so many rows take, where the last span of theirs begins, and its end
    least: list[tuple[int, int, int]] = [(0, 0, 0)]
    for count in range(1, len(lengths) + 1):
        # seldom is anything better than to go on with the last span of one row less
        _, first, longest = least[-1]
        longest = max(longest, lengths[count - 1])
        best = (least[first][0] + CALL + (count - first) * longest, first, longest)
        longest = 0
        for first in reversed(range(count)):
            longest = max(longest, lengths[first])
            taken = least[first][0] + CALL + (count - first) * longest
            best = min(best, (taken, first, longest))
            # a span that began further left, cut here, would be one call more and no longer
            if taken - CALL >= best[0]:
                break
        least.append(best)
    out, count = [], len(lengths)
    while count:
        _, first, longest = least[count]
        out.append((slice(first, count), longest))
        count = first
    return out[::-1]

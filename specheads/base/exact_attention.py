"""Attention that gives a node of a tree bit for bit what a step of its own would give it.

Sums of rounded numbers hang on their order, and a tree changes it: its nodes' keys lie behind each
other, not behind their parents', and its queries are multiplied together. Here each node attends by
itself, to the slots that it sees, brought together in their order. See docs/losslessness.md.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from specheads.base.masks import is_special
from specheads.core.errors import InputError

WHOLE = 64
"""Slots that are read are a multiple of it: processors add in vectors, and where these end would
decide what is added to what. Slots that are not seen add zeros."""


class _Seen(NamedTuple):
    """What each node of each row sees."""

    slots: Tensor
    """Slots in order, those that are seen first: (row, node, extent)."""
    mask: Tensor
    """Added to the scores: (row * node, 1, 1, extent)."""


_SEEN: ContextVar[dict[int, tuple[Tensor, _Seen]]] = ContextVar("what nodes see, by mask")


@contextmanager
def one_forward() -> Iterator[None]:
    """Let the layers of a forward share what is worked out of their masks."""
    token = _SEEN.set({})
    try:
        yield
    finally:
        _SEEN.reset(token)


def exact_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Attend from every node by itself: what transformers calls in each layer.

    Queries are (batch, heads, node, width), keys and values (batch, key heads, slot, width). Within
    `one_forward`.
    """
    del module
    if is_special(settings):
        raise InputError(
            "exact=true attends by plain products, and this base adds to them; leave exact out"
        )
    (batch, heads, nodes, width), shared = query.shape, key.shape[1]
    slots, mask = _seen(attention_mask)
    group = heads // shared
    each = query.reshape(batch, shared, group, nodes, width).permute(0, 3, 1, 2, 4).flatten(0, 1)
    out = F.scaled_dot_product_attention(
        each,
        _gathered(key, slots),
        _gathered(value, slots),
        attn_mask=mask.expand(-1, 1, group, -1),
        scale=scaling,
    )
    return out.reshape(batch, nodes, heads, -1), None


def _seen(mask: Tensor) -> _Seen:
    """Return what the nodes under a mask (batch, 1, node, slot) see, once a forward."""
    known = _SEEN.get()
    if id(mask) not in known:
        # the mask is kept beside it, or another could come to lie at its address
        known[id(mask)] = mask, _worked_out(mask[:, 0] == 0, mask.dtype)
    return known[id(mask)][1]


def _worked_out(visible: Tensor, dtype: torch.dtype) -> _Seen:
    counts = visible.sum(-1)
    extent = -(-int(counts.max()) // WHOLE) * WHOLE
    # a stable sort, so that what is seen keeps its order: that of the text
    slots = (~visible).to(torch.uint8).argsort(dim=-1, stable=True)[..., :extent]
    slots = F.pad(slots, (0, extent - slots.shape[-1]))
    unseen = torch.arange(extent, device=visible.device) >= counts[..., None]
    mask = torch.zeros(unseen.shape, dtype=dtype, device=visible.device)
    mask.masked_fill_(unseen, torch.finfo(dtype).min)
    return _Seen(slots, mask.flatten(0, 1)[:, None, None])


def _gathered(held: Tensor, slots: Tensor) -> Tensor:
    """Return what lies in the slots of each node: (row * node, heads, extent, width)."""
    rows = torch.arange(len(held), device=held.device)[:, None, None]
    return held.transpose(1, 2)[rows, slots].flatten(0, 1).transpose(1, 2)

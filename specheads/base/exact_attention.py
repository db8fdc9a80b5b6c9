"""Exact attention: each node of a tree gets bit for bit the result of decoding it alone.

Floating-point sums depend on their order, and a tree changes it: the keys of its nodes follow one
another, not their parents, and all queries are multiplied at once. Here each node is computed
separately over its visible slots, gathered in text order. See docs/losslessness.md.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.utils.weak import WeakTensorKeyDictionary

from specheads.base.masks import is_special
from specheads.core.errors import InputError

WHOLE = 64
"""The number of slots read is a multiple of this. CPUs add in vectors, and the end of a vector
would change the order of the sum. Invisible slots add zeros."""


class _Seen(NamedTuple):
    """The slots that each node of each row sees."""

    slots: Tensor
    """Slots in order, visible ones first: (row, node, extent)."""
    mask: Tensor
    """Additive mask: (row * node, 1, 1, extent)."""


_SEEN = WeakTensorKeyDictionary()
"""The visible slots under each mask, for as long as that mask lives: its layers share them."""


def exact_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Compute attention for each node separately; transformers calls this in each layer.

    Queries are (batch, heads, node, width), keys and values (batch, key heads, slot, width).
    """
    del module
    if is_special(settings):
        raise InputError(
            "exact=true supports plain attention only, and this base adds to its scores; "
            "leave exact out"
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
    """Return the visible slots under a mask (batch, 1, node, slot); computed once per mask."""
    if mask not in _SEEN:
        _SEEN[mask] = _visible_slots(mask[:, 0] == 0, mask.dtype)
    return _SEEN[mask]


def _visible_slots(visible: Tensor, dtype: torch.dtype) -> _Seen:
    counts = visible.sum(-1)
    extent = -(-int(counts.max()) // WHOLE) * WHOLE
    # a stable sort keeps visible slots in text order
    slots = (~visible).to(torch.uint8).argsort(dim=-1, stable=True)[..., :extent]
    slots = F.pad(slots, (0, extent - slots.shape[-1]))
    unseen = torch.arange(extent, device=visible.device) >= counts[..., None]
    mask = torch.zeros(unseen.shape, dtype=dtype, device=visible.device)
    mask.masked_fill_(unseen, torch.finfo(dtype).min)
    return _Seen(slots, mask.flatten(0, 1)[:, None, None])


def _gathered(held: Tensor, slots: Tensor) -> Tensor:
    """Gather the keys or values of each node's slots: (row * node, heads, extent, width)."""
    rows = torch.arange(len(held), device=held.device)[:, None, None]
    return held.transpose(1, 2)[rows, slots].flatten(0, 1).transpose(1, 2)

"""Attention whose query heads share keys, on a processor: shared keys are read once, not copied.

See docs/caches.md.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from transformers.integrations.sdpa_attention import sdpa_attention_forward

MOST_NODES = 64
"""Nodes up to which copying keys costs more than a mask that is as much higher."""


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
    Heads that share keys are taken for further nodes of one head. transformers does so for one
    node, and for several repeats keys and values once a head: so much is copied at every step.
    """
    (batch, heads, nodes, width), shared = query.shape, key.shape[1]
    group = heads // shared
    special = any(settings.get(name) is not None for name in ("softcap", "position_bias", "s_aux"))
    if special or group == 1 or not 1 < nodes <= MOST_NODES or query.device.type != "cpu":
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **settings
        )
    out = F.scaled_dot_product_attention(
        query.reshape(batch, shared, group * nodes, width),
        key,
        value,
        attn_mask=attention_mask.repeat(1, 1, group, 1),
        scale=scaling,
    )
    return out.reshape(batch, heads, nodes, -1).transpose(1, 2).contiguous(), None

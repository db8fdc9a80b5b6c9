"""Attention of tree nodes over a cache: grouped, or within compiled layers.

See docs/tree_verification.md.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from specheads.base.cache import RowCache
from specheads.base.exact_attention import ExactAttention
from specheads.base.masks import is_special, refuse_special, replaced
from specheads.core.errors import InputError
from specheads.core.kernels import opaque, without_cudnn_attention

MOST_NODES = 64
"""Largest tree for which folding query heads into nodes is faster than repeating the keys."""
ALIGNED = 16
"""Row stride of a mask, in elements: the CUDA kernel copies a mask with any other stride."""
_TALL = WeakTensorKeyDictionary()
"""The repeated mask of each mask, for as long as that mask lives: its layers share it."""


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Compute attention from each row's nodes to its slots; transformers calls this in each layer.

    Query heads that share keys are folded into the node axis. transformers repeats keys and values
    for each query head instead, which copies the whole cache at every step.
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
    """Return attention (batch, node, heads, width), with query heads folded into nodes."""
    (batch, heads, nodes, width), shared = query.shape, key.shape[1]
    group = heads // shared
    query = query.reshape(batch, shared, group * nodes, width)
    if query.device.type == "cpu":
        # repeat() takes ten times as long on such a small tensor
        mask = torch.cat([attention_mask] * group, dim=2)
    else:
        mask = _tall(attention_mask, group)
    # the compiler would make graphs of the kernel's own cases
    attend = _opaque_masked if torch.compiler.is_compiling() else _attend_masked
    out = attend(query, key, value, mask, scaling)
    return out.reshape(batch, heads, nodes, -1).transpose(1, 2).contiguous()


def _attend_masked(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None
) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)


def _masked_shape(query: Tensor, _key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return query.new_empty(*query.shape[:-1], value.shape[-1])


_opaque_masked = opaque("grouped_attention", _attend_masked, _masked_shape)


def _tall(mask: Tensor, group: int) -> Tensor:
    """Return the mask repeated for each query head of a group; computed once per mask."""
    if mask not in _TALL:
        slots = mask.shape[-1]
        _TALL[mask] = F.pad(mask, (0, -slots % ALIGNED)).repeat(1, 1, group, 1)[..., :slots]
    return _TALL[mask]


_LAYERS: ContextVar[Iterator[Any]] = ContextVar("layers of the cache, the next to attend first")


class DeferredCache(Cache):
    """A cache for compiled layers: it passes new keys and values on to attention.

    A compiled layer that knew its cache would be compiled again for each layer and each length.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the new keys and values; `deferred_attention` writes them."""
        return key_states, value_states


@contextmanager
def deferring(cache: RowCache) -> Iterator[None]:
    """Let `deferred_attention` write to and read the layers of this cache, in order.

    A context variable, because any argument would make the compiler specialise on the layer.
    """
    layers = iter(cache.layers)
    token = _LAYERS.set(layers)
    try:
        yield
        if next(layers, None) is not None:
            raise InputError(
                "compile=true needs layers that call attention once, in order; leave it out"
            )
    finally:
        _LAYERS.reset(token)


def deferred_attention(
    _module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Write new keys and values to the next layer's cache, then compute attention."""
    refuse_special(settings, "compile=true on CUDA")
    return _opaque_deferred(query, key, value, attention_mask, scaling), None


def _attend_deferred(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None
) -> Tensor:
    keys, values = next(_LAYERS.get()).update(key, value)
    return folded(query, keys, values, mask, scaling)


def _deferred_shape(query: Tensor, _key: Tensor, value: Tensor, *_: Any) -> Tensor:
    batch, heads, nodes = query.shape[:3]
    return query.new_empty(batch, nodes, heads, value.shape[-1])


_opaque_deferred = opaque("deferred_attention", _attend_deferred, _deferred_shape)


@contextmanager
def attending(
    config: PreTrainedConfig,
    cache: RowCache,
    *,
    exact: ExactAttention | None = None,
    deferred: bool = False,
) -> Iterator[None]:
    """Select the attention implementation for the forwards in this context.

    `exact` is that of an exact base; `deferred` is for compiled layers with a `DeferredCache`.
    """
    if deferred:
        name, function = "specheads_deferred", deferred_attention
    elif exact is not None:
        name, function = "specheads_exact", exact
    elif config._attn_implementation == "sdpa":
        name, function = "specheads_grouped", grouped_attention
    else:
        yield
        return
    written = deferring(cache) if deferred else nullcontext()
    with replaced(config, name, function), without_cudnn_attention(cache.device), written:
        yield

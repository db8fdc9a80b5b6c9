"""Attention within compiled layers: keys and values are written and read where no compiler looks.

A compiled layer that knew its cache would be compiled again for each layer and each length.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from specheads.base.attending import is_special
from specheads.base.cache import RowCache
from specheads.base.grouped_attention import folded
from specheads.core.errors import InputError
from specheads.core.opaque import opaque

_LAYERS: ContextVar[Iterator[Any]] = ContextVar("layers of the cache, the next to attend first")


class DeferredCache(Cache):
    """Stand in for a cache in compiled layers: hand new keys and values on to attention."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Return what is new: `deferred_attention` writes it."""
        return key_states, value_states


@contextmanager
def deferring(cache: RowCache) -> Iterator[None]:
    """Let `deferred_attention` write to this cache and read it, layer after layer."""
    layers = iter(cache.layers)
    token = _LAYERS.set(layers)
    try:
        yield
        if next(layers, None) is not None:
            raise InputError(
                "compile=true on CUDA needs a base each of whose layers attends once, in order; "
                "leave compile=true out"
            )
    finally:
        _LAYERS.reset(token)


def deferred_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Write new keys and values to the next layer's cache, then attend as `grouped_attention`."""
    del module
    if is_special(settings):
        raise InputError(
            "compile=true on CUDA attends by plain products, and this base adds to them; "
            "leave compile=true out"
        )
    return _opaque(query, key, value, attention_mask, scaling), None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None
) -> Tensor:
    keys, values = next(_LAYERS.get()).update(key, value)
    return folded(query, keys, values, mask, scaling)


def _shaped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None
) -> Tensor:
    del key, mask, scaling
    batch, heads, nodes, _ = query.shape
    return query.new_empty(batch, nodes, heads, value.shape[-1])


_opaque = opaque("deferred_attention", _attend, _shaped)

"""Attention of tree nodes over a cache, and within each document of a packed batch.

See docs/tree_verification.md.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from inspect import signature
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention.varlen import varlen_attn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from specheads.base.cache import RowCache
from specheads.base.exact_attention import ExactAttention
from specheads.base.masks import is_special, refuse_special, replaced
from specheads.core.errors import InputError
from specheads.core.features import PackedDocuments
from specheads.core.kernels import flash_takes, opaque, without_cudnn_attention

MOST_NODES = 64
"""Largest tree for which folding query heads into nodes is faster than repeating the keys."""
ALIGNED = 16
"""Row stride of a mask, in elements: the CUDA kernel copies a mask with any other stride."""
_HAS_ENABLE_GQA = "enable_gqa" in signature(varlen_attn).parameters
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


# documents: masked scores are not computed


@contextmanager
def attending_documents(
    config: PreTrainedConfig, places: Int[Tensor, "batch time"], windows: Sequence[int | None]
) -> Iterator[PackedDocuments | None]:
    """Select attention within documents for the forwards in this context, if it is faster.

    `places` are the positions within each document. Models whose attention cannot be replaced use
    the mask instead, and the context is None. On CUDA this synchronises once.
    """
    if places.device.type not in ("cpu", "cuda") or config._attn_implementation != "sdpa":
        yield None
        return
    documents = PackedDocuments.of(places)
    longest = max(documents.lengths)
    if any(window is not None and window < longest for window in windows):
        yield documents
        return
    with replaced(config, "specheads_documents", partial(document_attention, documents)):
        yield documents


def document_attention(
    documents: PackedDocuments,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Compute attention (batch, heads, time, width) within each document, for transformers."""
    if is_special(settings) or settings.get("dropout") or not _takes(query, key, value):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **settings
        )
    return _within_documents(documents, query, key, value, scaling), None


def _takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether the device supports these tensors: on CUDA, whether flash attention does."""
    if query.device.type != "cuda":
        return True
    alike = query.dtype == key.dtype == value.dtype and query.shape[-1] == value.shape[-1]
    return alike and flash_takes(query.dtype, query.shape[-1])


def _within_documents(
    documents: PackedDocuments, query: Tensor, key: Tensor, value: Tensor, scaling: float | None
) -> Tensor:
    """Return (batch, time, heads, width)."""
    lengths, bounds = documents
    # one split along one axis needs only one concatenation in the backward pass
    tokens = [values.transpose(1, 2).flatten(0, 1) for values in (query, key, value)]
    if query.device.type == "cuda":
        mixed = _flash(tokens[0], tokens[1], tokens[2], bounds, max(lengths), scaling)
        return mixed.unflatten(0, (len(query), -1))
    columns = [values.split(lengths) for values in tokens]
    pieces = []
    for column in zip(*columns, strict=True):
        own = [piece.transpose(0, 1)[None] for piece in column]
        mixed = F.scaled_dot_product_attention(
            *own, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
        pieces.append(mixed[0].transpose(0, 1))
    return torch.cat(pieces).unflatten(0, (len(query), -1))


def _flash(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scaling: float | None
) -> Tensor:
    """Compute attention within all documents in one kernel: (position, heads, width)."""
    # torch 2.11 has no enable_gqa, and shares keys without it
    settings: dict[str, Any] = {"scale": scaling, "window_size": (-1, 0)}
    if query.shape[1] != key.shape[1] and _HAS_ENABLE_GQA:
        settings["enable_gqa"] = True
    mixed = varlen_attn(query, key, value, bounds, bounds, longest, longest, **settings)
    assert isinstance(mixed, Tensor)
    return mixed

"""Attention within each document of a packed batch, without computing masked scores."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention.varlen import varlen_attn
from transformers import PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from specheads.base.masks import is_special, replaced
from specheads.core.features import Documents
from specheads.core.kernels import flash_takes

NAME = "specheads_documents"
_HAS_ENABLE_GQA = "enable_gqa" in signature(varlen_attn).parameters


@contextmanager
def attending_documents(
    config: PreTrainedConfig, places: Int[Tensor, "batch time"], windows: Sequence[int | None]
) -> Iterator[Documents | None]:
    """Select attention within documents for the forwards in this context, if it is faster.

    `places` are the positions within each document. Models whose attention cannot be replaced use
    the mask instead, and the context is None. On CUDA this synchronises once.
    """
    if places.device.type not in ("cpu", "cuda") or config._attn_implementation != "sdpa":
        yield None
        return
    documents = Documents.of(places)
    longest = max(documents.lengths)
    if any(window is not None and window < longest for window in windows):
        yield documents
        return
    with replaced(config, NAME, partial(document_attention, documents)):
        yield documents


def document_attention(
    documents: Documents,
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
    return _attend(documents, query, key, value, scaling), None


def _takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether the device supports these tensors: on CUDA, whether flash attention does."""
    if query.device.type != "cuda":
        return True
    alike = query.dtype == key.dtype == value.dtype and query.shape[-1] == value.shape[-1]
    return alike and flash_takes(query.dtype, query.shape[-1])


def _attend(
    documents: Documents, query: Tensor, key: Tensor, value: Tensor, scaling: float | None
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

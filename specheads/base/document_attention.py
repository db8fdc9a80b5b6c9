"""Attention of packed documents on a processor: each by itself, and nothing masked away."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from transformers import PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from specheads.base.attending import is_special, replaced
from specheads.core.features import document_lengths
from specheads.core.opaque import opaque

NAME = "specheads_documents"

_LENGTHS: ContextVar[Sequence[int]] = ContextVar("tokens of each document, row by row")


def attending_documents(
    config: PreTrainedConfig, places: Int[Tensor, "batch time"], windows: Sequence[int | None]
) -> AbstractContextManager[None]:
    """Let the model of this config attend within each document, where that is the faster way.

    `places` are those of positions in their documents. Masks are needed all the same: by models
    whose attention cannot be replaced.
    """
    if places.device.type != "cpu" or config._attn_implementation != "sdpa":
        return nullcontext()
    lengths = document_lengths(places)
    longest = max(lengths)
    if any(window is not None and window < longest for window in windows):
        return nullcontext()
    return _attending(config, lengths)


@contextmanager
def _attending(config: PreTrainedConfig, lengths: Sequence[int]) -> Iterator[None]:
    token = _LENGTHS.set(lengths)
    try:
        with replaced(config, NAME, document_attention):
            yield
    finally:
        _LENGTHS.reset(token)


def document_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Attend within each document: what transformers calls in each layer.

    Queries are (batch, heads, time, width), keys and values (batch, key heads, time, width).
    """
    if is_special(settings) or settings.get("dropout"):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **settings
        )
    # the compiler makes one graph for all documents, and they are looked up when it runs
    attend = _opaque if torch.compiler.is_compiling() else _attend
    return attend(query, key, value, scaling), None


def _attend(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Return (batch, time, heads, width)."""
    # taken apart along one axis, whose gradient is put together again once
    columns = [
        values.transpose(1, 2).flatten(0, 1).split(list(_LENGTHS.get()))
        for values in (query, key, value)
    ]
    pieces = []
    for column in zip(*columns, strict=True):
        own = [piece.transpose(0, 1)[None] for piece in column]
        mixed = F.scaled_dot_product_attention(
            *own, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
        pieces.append(mixed[0].transpose(0, 1))
    return torch.cat(pieces).unflatten(0, (len(query), -1))


def _shaped(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    del key, scaling
    batch, heads, time, _ = query.shape
    return query.new_empty(batch, time, heads, value.shape[-1])


_opaque = opaque("document_attention", _attend, _shaped)

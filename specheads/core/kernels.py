"""Rules of attention kernels, and operators that torch.compile does not trace into."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specheads.core.errors import InputError

FLASH_DTYPES = (torch.float16, torch.bfloat16)
MAX_FLASH_HEAD_DIM = 256
"""Dtypes and largest head width of the flash attention kernel."""
SCORE_CHANGES = ("softcap", "position_bias", "s_aux")
"""Arguments of attention that change its scores; plain attention does not support them."""


def flash_supports(dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether the flash attention kernel exists for this dtype and head width."""
    return dtype in FLASH_DTYPES and head_dim % 8 == 0 and head_dim <= MAX_FLASH_HEAD_DIM


class AttentionInputs(NamedTuple):
    """What a layer of transformers gives to the function that computes its attention."""

    module: torch.nn.Module
    query: Tensor
    """(batch, head, position, width)."""
    key: Tensor
    value: Tensor
    mask: Tensor
    """Added to the scores."""
    scaling: float | None
    settings: dict[str, Any]
    """All other arguments."""


def changes_scores(inputs: AttentionInputs) -> bool:
    """Return whether a layer asks for more than plain attention."""
    return any(inputs.settings.get(name) is not None for name in SCORE_CHANGES)


def refuse_changed_scores(inputs: AttentionInputs, feature: str) -> None:
    """Refuse a base with more than plain attention, which `feature` does not compute."""
    if changes_scores(inputs):
        raise InputError(
            f"{feature} supports plain attention, this base adds to its scores; leave it out"
        )


def product_dtype(values: Tensor) -> torch.dtype:
    """Return the dtype in which products of these values are computed now, by autocast or not."""
    device = values.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return values.dtype


@contextmanager
def without_cudnn_attention(device: torch.device) -> Iterator[None]:
    """Have torch choose another attention kernel than cuDNN's on a GPU.

    cuDNN plans again for each new number of keys, which takes 40 ms on the host of an H200: a draft
    that grows by a token each step would wait for it each time. Its backward pass is not
    repeatable; torch chooses the kernel in the forward pass, so training leaves it out there too.
    """
    if device.type != "cuda":
        yield
        return
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


_LIBRARY = torch.library.Library("specheads", "FRAGMENT")


def opaque(
    name: str, function: Callable[..., Tensor], empty_result: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """Return a function of tensors, which returns new memory, as an operator that is not traced.

    `empty_result` returns memory of the right shape. `torch.library.custom_op` does the same,
    but adds 37 microseconds to each call instead of 7, and a step makes hundreds of calls.
    """
    _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()))
    for device in ("CPU", "CUDA"):
        _LIBRARY.impl(name, function, device)
    torch.library.register_fake(f"specheads::{name}", empty_result, lib=_LIBRARY)
    return getattr(torch.ops.specheads, name).default

"""Rules of attention kernels, and operators that torch.compile does not trace into."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
WIDEST = 256
"""Dtypes and largest head width of the flash attention kernel."""


def flash_takes(dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether the flash attention kernel exists for this dtype and head width."""
    return dtype in HALF and head_dim % 8 == 0 and head_dim <= WIDEST


def product_dtype(values: Tensor) -> torch.dtype:
    """Return the dtype in which products of these values are computed now, by autocast or not."""
    kind = values.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
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
    name: str, function: Callable[..., Tensor], shaped: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """Return a function of tensors, which returns new memory, as an operator that is not traced.

    `shaped` returns an empty result of the right shape. `torch.library.custom_op` does the same,
    but adds 37 microseconds to each call instead of 7, and a step makes hundreds of calls.
    """
    _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()))
    for device in ("CPU", "CUDA"):
        _LIBRARY.impl(name, function, device)
    torch.library.register_fake(f"specheads::{name}", shaped, lib=_LIBRARY)
    return getattr(torch.ops.specheads, name).default

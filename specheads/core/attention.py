"""Which attention kernels torch may choose."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


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

"""Copies from the host that a GPU does not have to be waited for."""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a host's tensor on a device, which goes on with its work meanwhile.

    CUDA copies in the background only from pinned memory. torch keeps that until the copy is made.
    """
    pinned = tensor.pin_memory() if device.type == "cuda" and not tensor.is_cuda else tensor
    return pinned.to(device, non_blocking=True)

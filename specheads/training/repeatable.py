"""Gradients that are the same bits each time, on a GPU too."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def fix_workspace() -> None:
    """Set the size of cuBLAS's workspace unless it is set; torch reads it at its first product."""
    os.environ.setdefault(WORKSPACE, ":4096:8")


@contextmanager
def repeatable(device: torch.device) -> Iterator[None]:
    """Use torch's deterministic algorithms for a backward pass on a GPU; restore settings after it.

    A resumed run needs the same bits as an uninterrupted one. One kernel of a training step adds in
    an order that differs from run to run: the backward pass of torch's fused attention. The
    deterministic variant is less parallel; all other kernels stay the same. Forward passes are
    repeatable without the setting, and the setting would refuse the kernel that counts the tokens
    of each expert in some bases. torch also fills uninitialised memory by default; that is switched
    off.
    """
    if device.type != "cuda" or not _orders(device):
        yield
        return
    with _strict():
        yield


@contextmanager
def _strict() -> Iterator[None]:
    deterministic: Any = torch.utils.deterministic
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        deterministic.fill_uninitialized_memory,
    )
    # attention ignores the setting if warn_only is true
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        enabled, warn_only, deterministic.fill_uninitialized_memory = before
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


@cache
def _orders(device: torch.device) -> bool:
    """Return whether torch accepts cuBLAS as deterministic; warn if the variable came too late."""
    one = torch.ones(1, 1, device=device)
    try:
        with _strict():
            torch.mm(one, one)
    except RuntimeError:
        warnings.warn(
            f"a resumed run may differ in its last bits on {device}: torch multiplied there before "
            f"{WORKSPACE} was set; set it to :4096:8 before Python starts",
            stacklevel=2,
        )
        return False
    return True

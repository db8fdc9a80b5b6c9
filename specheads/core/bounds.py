"""Limits that are checked before allocation: tree sizes, memory, and integers."""

from collections.abc import Sequence
from operator import index
from typing import Any

import torch

from specheads.core.errors import InputError
from specheads.core.machine import device_bytes

MAX_NODES = 4096
"""Most nodes of a tree, and most drafted nodes. One forward reads them all, the mask of each row is
their square, and beyond a few hundred nodes the time of a forward grows with each node."""


def refuse_nodes(num_nodes: int, setting: str) -> int:
    """Return a number of nodes, or refuse it and name the setting to lower."""
    if num_nodes > MAX_NODES:
        raise InputError(
            f"a tree may have at most {MAX_NODES} nodes, and as many drafted nodes, got "
            f"{num_nodes:.4g} or more; lower {setting}"
        )
    return num_nodes


def level_sizes(branches: Sequence[int]) -> list[int]:
    """Return the number of nodes of each level, given the number of children at each level."""
    sizes, total = [1], 1
    for branch in branches:
        sizes.append(sizes[-1] * whole(branch, "a number of tree.branches"))
        total = refuse_nodes(total + sizes[-1], "tree.branches")
    return sizes


def refuse_bytes(size: int, device: torch.device, what: str, remedy: str) -> None:
    """Refuse an allocation larger than the free memory of CUDA or the whole memory of the host."""
    if size > (room := device_bytes(device)):
        raise InputError(
            f"{what} must fit into the memory of {device}, and needs {size / 2**30:.4g} GiB of "
            f"{room / 2**30:.4g}; {remedy}"
        )


def whole(value: Any, name: str, least: int | None = 0) -> int:
    """Return an integer of Python, numpy or torch as an `int`; refuse anything else."""
    try:
        # Python counts True and boolean tensors as integers
        number = None if "bool" in str(getattr(value, "dtype", type(value))) else index(value)
    except TypeError:
        number = None
    if number is None:
        raise InputError(f"{name} must be a whole number, got {value!r:.80}")
    if least is not None and number < least:
        raise InputError(f"{name} must be at least {least}, got {number}")
    return number

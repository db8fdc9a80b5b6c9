"""What is refused before it is built: trees of too many nodes, and what no memory can hold."""

from collections.abc import Sequence
from operator import index
from typing import Any

import torch

from specheads.core.errors import InputError
from specheads.core.machine import device_bytes

MAX_NODES = 4096
"""Nodes of a tree, and of what is drafted for one. One forward reads them all, each row keeps
their square as booleans, and beyond a few hundred a forward's time grows with every node."""


def refuse_nodes(num_nodes: int, setting: str) -> int:
    """Return a number of nodes, or refuse it, naming the setting that decides it."""
    if num_nodes > MAX_NODES:
        raise InputError(
            f"a tree may have {MAX_NODES} nodes, and as many drafted for it, got {num_nodes:.4g} "
            f"or more; lower {setting}"
        )
    return num_nodes


def level_sizes(branches: Sequence[int]) -> list[int]:
    """Return the nodes of each level of a tree in which all nodes of one have as many children."""
    sizes, total = [1], 1
    for branch in branches:
        sizes.append(sizes[-1] * whole(branch, "a number of tree.branches"))
        total = refuse_nodes(total + sizes[-1], "tree.branches")
    return sizes


def refuse_bytes(size: int, device: torch.device, what: str, remedy: str) -> None:
    """Refuse what cannot lie in a device's memory: free memory on CUDA, all of it on a host."""
    if size > (room := device_bytes(device)):
        raise InputError(
            f"{what} must fit the memory of {device}, and takes {size / 2**30:.4g} GiB of "
            f"{room / 2**30:.4g}; {remedy}"
        )


def whole(value: Any, name: str, least: int | None = 0) -> int:
    """Return a whole number of Python, numpy or torch as Python's own."""
    try:
        # True and a tensor of truth are numbers to Python
        number = None if "bool" in str(getattr(value, "dtype", type(value))) else index(value)
    except TypeError:
        number = None
    if number is None:
        raise InputError(f"{name} must be a whole number, got {value!r:.80}")
    if least is not None and number < least:
        raise InputError(f"{name} must be at least {least}, got {number}")
    return number

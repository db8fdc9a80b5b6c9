"""Activation checkpointing: layers of a head compute once more for their gradients."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch.utils.checkpoint import checkpoint

from specheads.core.drafter import Head
from specheads.heads.layers.block import BlockLayer
from specheads.heads.layers.common import ResidualBlock
from specheads.heads.layers.feedback import FeedbackLayer
from specheads.heads.layers.prefix import PrefixLayer

LAYERS = BlockLayer, FeedbackLayer, PrefixLayer, ResidualBlock
"""What computes again; of each only what it was given is kept."""


@contextmanager
def recomputed(head: Head) -> Iterator[None]:
    """Have the layers that are called meanwhile keep no activations: gradients are the same."""
    layers = [layer for layer in head.modules() if isinstance(layer, LAYERS)]
    for layer in layers:
        vars(layer)["forward"] = partial(checkpoint, layer.forward, use_reentrant=False)
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["forward"]

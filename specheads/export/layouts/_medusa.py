"""FasterDecoding's Medusa layout, in the one form that TGI and vLLM 0.32 both read right."""

import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Any

from torch import Tensor

from specheads.base.model import FrozenBase
from specheads.core.drafter import Head
from specheads.export.layout import Folder
from specheads.export.layouts.vllm import serve
from specheads.export.readers.medusa import FILE

SETTINGS: dict[str, Collection[Any] | None] = dict.fromkeys(
    ("depth", "num_layers", "projection", "rank")
)
"""Projections that are shared or thin are written out in full, so all are held; neither engine
loads a reduced vocabulary."""


def write(head: Head, base: FrozenBase, out: Path) -> Folder:
    """Return the folder that serves both.

    No `architectures`: TGI would serve without a head. medusa_fc_bias: vLLM would drop biases.
    """
    config = {
        "model_type": "medusa",
        "base_model_name_or_path": base.name,
        "medusa_num_heads": head.depth,
        "medusa_num_layers": head.config.num_layers,
        "medusa_fc_bias": True,
        "hidden_size": head.width,
        "vocab_size": head.vocab_size,
    }
    settings: dict[str, object] = {
        "method": "medusa",
        "model": str(out),
        "num_speculative_tokens": head.depth,
    }
    lines = (
        f"text-generation-launcher --model-id {shlex.quote(str(out))} --speculate {head.depth}",
        f"{serve(base.name, settings)}  # vllm==0.32.0",
    )
    return Folder(config, _tensors(head), lines, weights_file=FILE)


def _tensors(head: Head) -> dict[str, Tensor]:
    weights, settings = head.state_dict(), head.config
    named: dict[str, Tensor] = {}
    for level in range(head.depth):
        for layer in range(settings.num_layers):
            for part in ("weight", "bias"):
                source = f"blocks.{level}.{layer}.linear.{part}"
                named[f"{level}.{layer}.linear.{part}"] = weights[source]
        named[f"{level}.{settings.num_layers}.weight"] = _projection(head, weights, level)
    return named


def _projection(head: Head, weights: dict[str, Tensor], level: int) -> Tensor:
    """Return a level's whole matrix, the base's own included where the head borrows it."""
    matrix, _ = head.projection(level)
    if head.config.projection != "low_rank":
        return matrix
    lent, up = matrix.split([head.width, head.config.rank], dim=1)
    return lent + up @ weights[f"down.{level}.weight"]

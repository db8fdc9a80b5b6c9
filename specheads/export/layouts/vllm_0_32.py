"""vLLM 0.32.0, the last version with a loader for Medusa of its own.

FasterDecoding's layout, in the one form that TGI reads right as well.
"""

import shlex
from pathlib import Path

from torch import Tensor

from specheads.base.model import FrozenBase
from specheads.core.drafter import Head
from specheads.export.layout import Folder, Layout, all_of, at_revision
from specheads.export.layouts.vllm import serve
from specheads.export.readers import medusa

ABOUT = "vLLM 0.32.0, its own Medusa loader"
SETTINGS = all_of("num_layers", "projection", "rank")
"""Projections that are shared or thin are written out in full, so all are held; neither engine
loads a reduced vocabulary."""


def write(head: Head, base: FrozenBase, out: Path) -> Folder:
    """Return the folder that serves both.

    No `architectures`: TGI would serve without a head. medusa_fc_bias: vLLM would drop biases.
    """
    config = {
        "model_type": "medusa",
        "base_model_name_or_path": base.place,
        "medusa_num_heads": head.depth,
        "medusa_num_layers": head.config.num_layers,
        "medusa_fc_bias": True,
        "hidden_size": head.width,
        "vocab_size": head.vocab_size,
    }
    lines = (
        serve_tgi(head, base, out),
        f"{serve(head, base, 'medusa', str(out))}  # vllm==0.32.0",
    )
    return Folder(config, _tensors(head), lines, weights_file=medusa.FILE)


def serve_tgi(head: Head, base: FrozenBase, out: Path) -> str:
    """Return the command line that serves a folder in TGI, which takes the base's `main` always."""
    line = f"text-generation-launcher --model-id {shlex.quote(str(out))} --speculate {head.depth}"
    return at_revision(base, line, "  # it loads the base's main, and the head is for ")


def _tensors(head: Head) -> dict[str, Tensor]:
    weights, settings = head.state_dict(), head.config
    named: dict[str, Tensor] = {}
    for level in range(head.depth):
        for layer in range(settings.num_layers):
            for part in ("weight", "bias"):
                source = f"blocks.{level}.{layer}.linear.{part}"
                named[f"{level}.{layer}.linear.{part}"] = weights[source]
        # the whole matrix, the base's own included where the head borrows it
        matrix, _ = head.projection(level)
        if settings.projection == "low_rank":
            lent, up = matrix.split([head.width, settings.rank], dim=1)
            matrix = lent + up @ weights[f"down.{level}.weight"]
        named[f"{level}.{settings.num_layers}.weight"] = matrix
    return named


LAYOUTS = {
    "medusa": Layout(
        write,
        medusa.vllm_0_32,
        SETTINGS,
        "run",
        "same folder as TGI's; in vLLM 0.32.0 on a CPU (`make vllm`)",
    )
}

"""vLLM 0.32.0, the last version with its own loader for Medusa.

The folder is FasterDecoding's layout in the form that TGI also reads correctly.
"""

import shlex
from pathlib import Path

from torch import Tensor

from specheads.base.model import FrozenBase
from specheads.core.drafter import Head
from specheads.export.layouts._shared import Folder, Layout, all_of, at_revision
from specheads.export.layouts.vllm import serve

ABOUT = "vLLM 0.32.0, its own Medusa loader"
SETTINGS = all_of("num_layers", "projection", "rank")
"""Every projection is written as a full matrix. Both engines need the whole vocabulary."""


def write_medusa(head: Head, base: FrozenBase, out: Path) -> Folder:
    """Return the folder that vLLM 0.32 and TGI serve.

    config.json has no `architectures`, because TGI would then serve without a head. It has
    `medusa_fc_bias`, because vLLM would otherwise drop the biases.
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
    lines = serve_tgi(head, base, out), f"{serve(head, base, 'medusa', str(out))}  # vllm==0.32.0"
    return Folder(config, _tensors(head), lines, weights_file="medusa_lm_head.safetensors")


def serve_tgi(head: Head, base: FrozenBase, out: Path) -> str:
    """Return TGI's command line. TGI always loads the base's `main` revision."""
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
        # a head that shares the base's projection gets a full copy of it
        matrix, _ = head.projection(level)
        if settings.projection == "low_rank":
            shared, up = matrix.split([head.width, settings.rank], dim=1)
            matrix = shared + up @ weights[f"down.{level}.weight"]
        named[f"{level}.{settings.num_layers}.weight"] = matrix
    return named


NOTE = "same folder as TGI's; in vLLM 0.32.0 on a CPU (`make vllm`)"

LAYOUTS = {"medusa": Layout(write_medusa, SETTINGS, "run", NOTE)}

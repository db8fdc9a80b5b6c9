"""Text Generation Inference: Medusa, and MLP speculators with tied weights.

A Medusa folder is FasterDecoding's layout in the form that vLLM 0.32's own loader also reads.
"""

import shlex
from pathlib import Path

from torch import Tensor

from specheads.base.ends import BaseEnds
from specheads.core.drafter import Head
from specheads.export.layouts._shared import (
    AllowedSettings,
    Folder,
    Layout,
    all_of,
    at_revision,
    stored_dtype,
)
from specheads.export.layouts.vllm import serve

ABOUT = "Text Generation Inference (db931fcf)"
TOP_K = (4, 3, 2)
"""`top_k_tokens_per_head` of IBM's checkpoints; the last value repeats. Servers draft chains."""

# TGI's code for untied weights fails on the first request
TIED: AllowedSettings = {**all_of("inner_dim", "scale_input"), "tie_weights": (True,)}
READ = "as TGI's sources read it"
MEDUSA = all_of("num_layers", "projection", "rank")
"""Every projection is written as a full matrix. Both engines need the whole vocabulary."""


def write_medusa(head: Head, base: BaseEnds, out: Path) -> Folder:
    """Return the folder that vLLM 0.32 and TGI serve.

    config.json has no `architectures`, because TGI would then serve without a head. It has
    `medusa_fc_bias`, because vLLM would otherwise drop the biases.
    """
    config = {
        "model_type": "medusa",
        "base_model_name_or_path": base.location,
        "medusa_num_heads": head.depth,
        "medusa_num_layers": head.config.num_layers,
        "medusa_fc_bias": True,
        "hidden_size": head.width,
        "vocab_size": head.vocab_size,
    }
    lines = serve_tgi(head, base, out), f"{serve(head, base, 'medusa', str(out))}  # vllm==0.32.0"
    return Folder(config, _tensors(head), lines, weights_file="medusa_lm_head.safetensors")


def serve_tgi(head: Head, base: BaseEnds, out: Path) -> str:
    """Return TGI's command line. TGI always loads the base's `main` revision."""
    line = f"text-generation-launcher --model-id {shlex.quote(str(out))} --speculate {head.depth}"
    return at_revision(base, line, "  # it loads the base's main, and the head is for ")


def _tensors(head: Head) -> dict[str, Tensor]:
    weights, settings = head.state_dict(), head.config
    tensors: dict[str, Tensor] = {}
    for level in range(head.depth):
        for layer in range(settings.num_layers):
            for suffix in ("weight", "bias"):
                source = f"blocks.{level}.{layer}.linear.{suffix}"
                tensors[f"{level}.{layer}.linear.{suffix}"] = weights[source]
        # a head that shares the base's projection gets a full copy of it
        matrix, _ = head.projection(level)
        if settings.projection == "low_rank":
            shared, up = matrix.split([head.width, settings.rank], dim=1)
            matrix = shared + up @ weights[f"down.{level}.weight"]
        tensors[f"{level}.{settings.num_layers}.weight"] = matrix
    return tensors


def write_mlp(head: Head, base: BaseEnds, out: Path) -> Folder:
    """Return IBM's layout, which stores a copy of each tied tensor per level."""
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "base_model_name_or_path": base.location,
        "vocab_size": head.vocab_size,
        "emb_dim": head.width,
        "inner_dim": head.config.inner_dim or head.width,
        "n_predict": head.depth,
        "n_candidates": 5,
        "top_k_tokens_per_head": [*TOP_K, *TOP_K[-1:] * head.depth][: head.depth],
        "tie_weights": True,
        "scale_input": head.config.scale_input,
        "torch_dtype": stored_dtype(head),
    }
    weights = head.state_dict()
    tensors: dict[str, Tensor] = {}
    for level in range(head.depth):
        tensors[f"speculator.proj.{level}.weight"] = weights[f"proj.{min(level, 1)}.weight"]
        for name in ("emb.{}.weight", "head.{}.weight", "ln.{}.weight", "ln.{}.bias"):
            tensors["speculator." + name.format(level)] = weights[name.format(0)]
    return Folder(config, tensors, (serve_tgi(head, base, out),))


def mlp_objection(head: Head, _: BaseEnds) -> str:
    """Object to a head with one level: TGI always reads a second projection."""
    return "" if head.depth > 1 else "it needs depth 2 or more"


NOTE = "vLLM 0.32.0 ran with the same folder on a CPU (`make vllm`)"
LAYOUTS = {
    "medusa": Layout(write_medusa, MEDUSA, "layout", f"{READ}; {NOTE}"),
    "mlp_speculator": Layout(write_mlp, TIED, "layout", READ, objection=mlp_objection),
}

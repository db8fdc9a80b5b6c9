"""Text Generation Inference: Medusa, and MLP speculators with tied weights."""

from pathlib import Path

from torch import Tensor

from specheads.base.model import FrozenBase
from specheads.core.drafter import Head
from specheads.export.layouts import vllm_0_32
from specheads.export.layouts._shared import AllowedSettings, Folder, Layout, all_of, stored_dtype

ABOUT = "Text Generation Inference (db931fcf)"
TOP_K = (4, 3, 2)
"""`top_k_tokens_per_head` of IBM's checkpoints; the last value repeats. Servers draft chains."""

# TGI's code for untied weights fails on the first request
TIED: AllowedSettings = {**all_of("inner_dim", "scale_input"), "tie_weights": (True,)}
READ = "as TGI's sources read it"


def write_mlp(head: Head, base: FrozenBase, out: Path) -> Folder:
    """Return IBM's layout, which stores a copy of each tied tensor per level."""
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "base_model_name_or_path": base.place,
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
    named: dict[str, Tensor] = {}
    for level in range(head.depth):
        named[f"speculator.proj.{level}.weight"] = weights[f"proj.{min(level, 1)}.weight"]
        for part in ("emb.{}.weight", "head.{}.weight", "ln.{}.weight", "ln.{}.bias"):
            named["speculator." + part.format(level)] = weights[part.format(0)]
    return Folder(config, named, (vllm_0_32.serve_tgi(head, base, out),))


def mlp_objection(head: Head, _base: FrozenBase) -> str:
    """Object to a head with one level: TGI always reads a second projection."""
    return "" if head.depth > 1 else "it needs depth 2 or more"


LAYOUTS = {
    "medusa": Layout(vllm_0_32.write_medusa, vllm_0_32.SETTINGS, "layout", READ),
    "mlp_speculator": Layout(write_mlp, TIED, "layout", READ, mlp_objection, "depth 2 or more"),
}

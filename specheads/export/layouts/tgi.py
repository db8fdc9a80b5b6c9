"""Text Generation Inference: Medusa, and MLP speculators whose weights are tied."""

from pathlib import Path

from torch import Tensor

from specheads.base.model import FrozenBase
from specheads.core.drafter import Head
from specheads.export.layout import Folder, Layout, Settings, all_of, stored_dtype
from specheads.export.layouts import vllm_0_32
from specheads.export.readers import medusa, mlp_speculator

ABOUT = "Text Generation Inference (db931fcf)"
GUESSES = (4, 3, 2)
"""top_k_tokens_per_head of IBM's checkpoints, the last one repeated; servers draft chains."""

# its code for untied weights fails on the first request
TIED: Settings = {**all_of("inner_dim", "scale_input"), "tie_weights": (True,)}


def write_mlp(head: Head, base: FrozenBase, out: Path) -> Folder:
    """Return IBM's layout, in which tied tensors stand once a level."""
    guesses = [GUESSES[min(level, len(GUESSES) - 1)] for level in range(head.depth)]
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "base_model_name_or_path": base.place,
        "vocab_size": head.vocab_size,
        "emb_dim": head.width,
        "inner_dim": head.config.inner_dim or head.width,
        "n_predict": head.depth,
        "n_candidates": 5,
        "top_k_tokens_per_head": guesses,
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


def one_level(head: Head, _base: FrozenBase) -> str:
    """Return why it cannot serve a head of one level: it reads a second projection."""
    return "" if head.depth > 1 else "it needs depth 2 or more"


LAYOUTS = {
    "medusa": Layout(
        vllm_0_32.write, medusa.tgi, vllm_0_32.SETTINGS, "layout", "as TGI's sources read it"
    ),
    "mlp_speculator": Layout(
        write_mlp,
        mlp_speculator.tgi,
        TIED,
        "layout",
        "as TGI's sources read it",
        one_level,
        "depth 2 or more",
    ),
}

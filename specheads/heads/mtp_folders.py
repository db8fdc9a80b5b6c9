"""MTP modules in checkpoints of bases, and in folders of vllm-project's speculators.

A base's own module stands beside its layers, as `model.layers.N` (DeepSeek-V3), `mtp` (Qwen3-Next)
or `model.mtp_layers.0` (MiMo). Its embedding and vocabulary projection are the base's.
"""

import re
from typing import Any

from torch import Tensor

from specheads.core.errors import InputError
from specheads.heads.layers.rotary import published

PROJECTION = re.compile(
    r"(model\.layers\.\d+\.|(?:model\.)?mtp_layers\.\d+\.|mtp\.)(?:eh_proj|input_proj|fc)\.weight"
)
"""What every module has, behind the prefix of all its tensors."""

PARTS = {
    "layer.enorm": ("enorm", "token_layernorm", "pre_fc_norm_embedding"),
    "layer.hnorm": ("hnorm", "hidden_layernorm", "pre_fc_norm_hidden"),
    "layer.eh_proj": ("eh_proj", "input_proj", "fc"),
    "norm": ("shared_head.norm", "final_layernorm", "norm"),
}
"""Our names, and those of DeepSeek-V3, of MiMo and speculators, and of Qwen3-Next."""

OURS = {f"{one}.weight": f"{ours}.weight" for ours, theirs in PARTS.items() for one in theirs}

COPIES = ("embed_tokens.weight", "shared_head.head.weight")
"""Copies of the base's own tensors, which a module may carry along."""

PLAIN = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "partial_rotary_factor": 1,
    "use_sliding_window": False,
}
"""Settings that may differ there, and whose other values nothing here reads."""

FOREIGN = {
    "experts": re.compile(r"mlp\.(shared_)?experts?\b|mlp\.gate\."),
    "latent attention": re.compile(r"self_attn\.(q_a|q_b|kv_a|kv_b)_"),
}
"""Parts of modules that the head has not, by their tensors."""


def interpret(
    config: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """Return settings and tensors as `kinds/mtp.py` has them; None for a folder without a module.

    Sizes stand among the settings, as `width` and `vocab_size`.

    Raises:
        ValueError: There are several modules, or it needs something that the head has not.
    """
    prefixes = sorted(found[1] for found in map(PROJECTION.fullmatch, tensors) if found)
    if not prefixes:
        return None
    if len(prefixes) > 1:
        raise InputError(
            f"mtp reads one module, to be applied again and again, this checkpoint has "
            f"{len(prefixes)}: {', '.join(prefixes)[:80]}; choose another, or train head=mtp anew"
        )
    named = _named(tensors, prefixes[0])
    settings = config | config.get("text_config", {}) | config.get("transformer_layer_config", {})
    said = (settings.get("rope_parameters") or {}) | settings
    for name, value in PLAIN.items():
        if said.get(name) not in (None, value):
            raise InputError(
                f"mtp reads modules with {name}={value!r}, this one has {said[name]!r:.80}; train "
                "head=mtp anew"
            )
    return _own_settings(settings, named, prefixes[0]), named


def _named(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return a module's tensors by our names."""
    own = {name[len(prefix) :]: value for name, value in tensors.items() if name.startswith(prefix)}
    for what, pattern in FOREIGN.items():
        if found := next(filter(pattern.search, sorted(own)), None):
            raise InputError(
                f"mtp reads modules of a dense Llama layer, this one has {what} "
                f"({prefix}{found:.80}); train head=mtp anew"
            )
    plain = {name.removeprefix("layers.0."): value for name, value in own.items()}
    for copy in COPIES:
        plain.pop(copy, None)
    return {OURS.get(name, f"layer.mtp_block.{name}"): value for name, value in plain.items()}


def _own_settings(
    settings: dict[str, Any], named: dict[str, Tensor], prefix: str
) -> dict[str, Any]:
    attention = "layer.mtp_block.self_attn."
    rows, columns = (named[f"{attention}{one}_proj.weight"].shape for one in "qo")
    if rows[0] == 2 * columns[1]:
        raise InputError(
            f"mtp reads modules of a dense Llama layer, this one has gated attention "
            f"({prefix}self_attn.q_proj); train head=mtp anew"
        )
    proposals = settings.get("speculators_config", {}).get("proposal_methods", [{}])
    depth = proposals[0].get("speculative_tokens")
    heads = settings["num_attention_heads"]
    return {
        "width": settings["hidden_size"],
        "vocab_size": settings["vocab_size"],
        **({"depth": depth} if depth else {}),
        "attention_heads": heads,
        "key_value_heads": settings.get("num_key_value_heads") or 0,
        "head_dim": settings.get("head_dim") or rows[0] // heads,
        "inner_dim": settings["intermediate_size"],
        "hidden_first": prefix.startswith("model.mtp_layers."),
        "qk_norm": f"{attention}q_norm.weight" in named,
        "attention_bias": f"{attention}q_proj.bias" in named,
        "epsilon": settings["rms_norm_eps"],
        **published(settings),
    }

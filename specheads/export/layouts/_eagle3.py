"""EAGLE-3 as all its engines read it: one folder, save for what each cannot hold.

Source: SafeAILab/EAGLE, and the engines' sources as in readers/eagle3.py.
"""

from typing import Any

from torch import Tensor

from specheads.base.model import FrozenBase
from specheads.core.drafter import Head
from specheads.export.layout import Settings, all_of, stored_dtype
from specheads.heads.kinds.eagle3 import Head as Eagle3

IDS = "eagle_aux_hidden_state_layer_ids"
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Settings that engines have by the same names."""

PLAIN_RESIDUAL: Settings = {
    **all_of("aux_layers", "attention_heads", "key_value_heads", "head_dim"),
    **all_of("inner_dim", "rope_theta", "epsilon", "draft_tokens"),
    "norm_before_residual": (False,),
}
"""Settings that an engine holds which does not know norm_before_residual."""

ONE_LAYER: Settings = {**PLAIN_RESIDUAL, "norm_before_residual": None}
"""Settings that an engine holds which knows the published network alone."""

SETTINGS: Settings = {
    **ONE_LAYER,
    **all_of("num_layers", "rope_scaling", "norm_before_fc", "fc_norm", "norm_output"),
    **all_of("own_embedding", "parallel", "mask_token"),
}
"""Settings that vLLM holds: all there are."""


def hidden_layers_only(head: Head, base: FrozenBase) -> str:
    """Return why engines cannot hand on the layers this head reads; empty where they can."""
    if max(head.aux_layers) < base.num_layers:
        return ""
    # the last one is the final norm's output here, and no residual stream
    return f"streams end after layer {base.num_layers - 1}, aux_layers are {list(head.aux_layers)}"


def layer_outputs_only(head: Head, base: FrozenBase) -> str:
    """Return why an engine that counts outputs of layers cannot hand on the embedding."""
    if min(head.aux_layers) > 0:
        return hidden_layers_only(head, base)
    return (
        f"it hands on outputs of layers, aux_layers are {list(head.aux_layers)}, of which 0 is none"
    )


def layer(head: Head, base: FrozenBase) -> dict[str, Any]:
    """Return the settings of its Llama layer."""
    assert isinstance(head, Eagle3)
    weights, settings, size = head.state_dict(), head.config, head.midlayer.self_attn.head_dim
    return {
        "model_type": "llama",
        "hidden_size": head.width,
        "intermediate_size": weights["midlayer.mlp.gate_proj.weight"].shape[0],
        "num_hidden_layers": settings.num_layers,
        "num_attention_heads": weights["midlayer.self_attn.q_proj.weight"].shape[0] // size,
        "num_key_value_heads": weights["midlayer.self_attn.k_proj.weight"].shape[0] // size,
        "head_dim": size,
        "hidden_act": "silu",
        "rms_norm_eps": settings.epsilon,
        "rope_theta": settings.rope_theta,
        "rope_scaling": settings.rope_scaling or None,
        "max_position_embeddings": base.max_length,
        "vocab_size": head.vocab_size,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": base.config.bos_token_id,
        "eos_token_id": base.config.eos_token_id,
    }


def config(head: Head, base: FrozenBase) -> dict[str, Any]:
    """Return config.json; layer ids stand there twice, once in each convention.

    At the top level k is the stream after k layers (vLLM); in eagle_config, where SGLang looks
    and vLLM only if the first is missing, the output of layer k, counted from zero.
    """
    settings = head.config
    nested: dict[str, Any] = {
        "use_aux_hidden_state": True,
        "norm_before_fc": settings.norm_before_fc,
    }
    if min(head.aux_layers) > 0:
        nested[IDS] = [layer - 1 for layer in head.aux_layers]
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layer(head, base),
        "draft_vocab_size": head.drafted_size,
        "target_hidden_size": head.width,
        **{name: getattr(settings, name) for name in NORMS},
        **({"mask_token_id": settings.mask_token} if settings.parallel else {}),
        # as speculators calls it one level down; engines are told on the command line
        "speculative_tokens": head.depth,
        IDS: list(head.aux_layers),
        "num_aux_hidden_states": len(head.aux_layers),
        # else an embedding is read as a copy of the base's
        "embed_requires_grad": settings.own_embedding,
        "eagle_config": nested,
        "torch_dtype": stored_dtype(head),
    }


def tensors(head: Head) -> dict[str, Tensor]:
    """Return the weights and, for a reduced vocabulary, both maps; never the base's embedding."""
    named = head.state_dict()
    if named.pop("draft_ids", None) is not None:
        named["d2t"], named["t2d"] = head.draft_maps()
    if "mask_hidden" in named:
        # as its project has it: one of a batch and of a text
        named["mask_hidden"] = named["mask_hidden"][None, None]
    return named

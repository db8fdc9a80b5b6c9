"""DFlash and DSpark as their engines read them: one network, named alike, save for its settings.

Source: as in readers/blocks.py.
"""

from typing import Any

from torch import Tensor

from specheads.base.model import FrozenBase
from specheads.core.drafter import Head
from specheads.export.layout import Settings, all_of, stored_dtype
from specheads.heads.layers.block import BlockHead

BLOCK: Settings = all_of(
    *("num_layers", "aux_layers", "attention_heads", "key_value_heads", "head_dim", "inner_dim"),
    *("rope_theta", "epsilon", "mask_token", "num_anchors", "sample_from_anchor"),
)
"""Settings that both kinds have."""

DSPARK: Settings = {**BLOCK, "markov_rank": None}
DFLASH: Settings = {**BLOCK, "sample_from_anchor": (False,)}
"""Neither vLLM's DFlash nor SGLang's has another way."""


def layer(head: Head, base: FrozenBase) -> dict[str, Any]:
    """Return the settings of its Qwen3 layers."""
    assert isinstance(head, BlockHead)
    weights, settings = head.state_dict(), head.config
    size = weights["layers.0.self_attn.q_norm.weight"].shape[0]
    return {
        "model_type": "qwen3",
        "hidden_size": head.width,
        "intermediate_size": weights["layers.0.mlp.gate_proj.weight"].shape[0],
        "num_hidden_layers": settings.num_layers,
        "num_attention_heads": weights["layers.0.self_attn.q_proj.weight"].shape[0] // size,
        "num_key_value_heads": weights["layers.0.self_attn.k_proj.weight"].shape[0] // size,
        "head_dim": size,
        "hidden_act": "silu",
        "rms_norm_eps": settings.epsilon,
        "rope_theta": settings.rope_theta,
        "max_position_embeddings": base.max_length,
        "vocab_size": head.vocab_size,
        "attention_bias": False,
        "layer_types": ["full_attention"] * settings.num_layers,
        "tie_word_embeddings": False,
        "bos_token_id": base.config.bos_token_id,
        "eos_token_id": base.config.eos_token_id,
    }


def in_speculators(head: Head, base: FrozenBase) -> dict[str, Any]:
    """Return what config.json of speculators' format says of these kinds alone.

    A setting that engines take for different things where it is missing is always there.
    """
    assert isinstance(head, BlockHead)
    anchored = head.config.sample_from_anchor
    return {
        "architectures": ["DSparkSpeculator" if head.kind == "dspark" else "DFlashSpeculator"],
        "speculators_model_type": head.kind,
        "transformer_layer_config": layer(head, base),
        "draft_vocab_size": head.drafted_size,
        "target_hidden_size": head.width,
        "block_size": head.depth + (not anchored),
        "aux_hidden_state_layer_ids": list(head.aux_layers),
        "mask_token_id": head.mask_token,
        # else vLLM has every layer see one way
        "sliding_window_non_causal": True,
        "sample_from_anchor": anchored,
        **markov(head),
        "torch_dtype": stored_dtype(head),
    }


def markov(head: Head) -> dict[str, Any]:
    """Return the settings of its Markov and its confidence head; none where it has neither."""
    assert isinstance(head, BlockHead)
    if head.kind != "dspark":
        return {}
    return {
        "markov_rank": head.config.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }


def tensors(head: Head) -> dict[str, Tensor]:
    """Return the weights; for a reduced vocabulary both maps, and the base's rows of it."""
    assert isinstance(head, BlockHead)
    named = head.state_dict()
    if named.pop("draft_ids", None) is not None:
        named["d2t"], named["t2d"] = head.draft_maps()
        named["lm_head.weight"] = head.lent()
    return named

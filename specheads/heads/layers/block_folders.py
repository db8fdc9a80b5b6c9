"""Published folders of DFlash and DSpark: z-lab's, DeepSpec's and vllm-project's speculators.

SGLang serves the first two, and reads DeepSpec's by further names.
"""

from typing import Any

from torch import Tensor

from specheads.core.errors import InputError
from specheads.heads.fill import fill, take_maps
from specheads.heads.layers.block import BlockHead

PLAIN = {
    "hidden_act": "silu",
    "attention_bias": False,
    "rope_type": "default",
    "use_swa": False,
    "use_aux_hidden_state": True,
    "is_causal": False,
}
"""Settings that may differ there, and whose other values nothing here reads."""

PLAIN_MARKOV = {"markov_head_type": "vanilla", "confidence_head_with_markov": True}
"""Those of a folder with a Markov head."""

BY_DEEPSPEC = ("Qwen3DSparkModel", "LingDSparkModel", "DSparkDraftModel")
"""Names of one network, DeepSpec's own first."""

LENT = ("lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight")
"""Copies of the base's own tensors."""


def flat_settings(config: dict[str, Any]) -> dict[str, Any] | None:
    """Return all settings of such a folder in one place; None of a folder of another make.

    Raises:
        ValueError: One of them has a value that nothing here reads.
    """
    kind = config.get("speculators_model_type", "")
    named = config.get("architectures") or []
    by_deepspec = not kind and any(name in named for name in BY_DEEPSPEC)
    if not (kind in ("dflash", "dspark") or "dflash_config" in config or by_deepspec):
        return None
    nested = config.get("transformer_layer_config", {}) | config.get("dflash_config", {})
    settings = nested | config
    rope = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    settings["rope_type"] = rope.get("rope_type", rope.get("type"))
    settings["rope_theta"] = settings.get("rope_theta") or rope.get("rope_theta")
    # there an id is the output of a layer, counted from zero; here k is the stream after k layers
    layers = [layer + 1 for layer in settings.get("target_layer_ids") or ()]
    settings["aux_layers"] = settings.get("aux_hidden_state_layer_ids") or layers
    settings.setdefault("sample_from_anchor", by_deepspec or kind == "dspark")
    plain = PLAIN | (PLAIN_MARKOV if settings.get("markov_rank") else {})
    for name, value in (plain | {"target_hidden_size": settings["hidden_size"]}).items():
        if settings.get(name) not in (None, value):
            raise InputError(
                f"a block head is read with {name}={value!r}, this one has {settings[name]!r}; "
                "choose another checkpoint"
            )
    if set(settings.get("layer_types") or ()) - {"full_attention"}:
        raise InputError("a block head is read with full attention only; choose another checkpoint")
    # others count a slot that drafts nothing
    settings["anchor_counts"] = not (by_deepspec or settings["sample_from_anchor"])
    return settings


def own_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return what our `Config` calls the settings that both kinds have."""
    drafted = settings.get("draft_vocab_size") or 0
    return {
        "depth": settings["block_size"] - settings["anchor_counts"],
        "num_layers": settings["num_hidden_layers"],
        "aux_layers": list(settings["aux_layers"]),
        "attention_heads": settings["num_attention_heads"],
        "key_value_heads": settings.get("num_key_value_heads") or 0,
        "head_dim": settings.get("head_dim") or 0,
        "inner_dim": settings["intermediate_size"],
        "rope_theta": settings["rope_theta"],
        "epsilon": settings["rms_norm_eps"],
        "mask_token": settings["mask_token_id"],
        "sample_from_anchor": settings["sample_from_anchor"],
        "draft_tokens": drafted if drafted != settings["vocab_size"] else 0,
    }


def filled(head: BlockHead, tensors: dict[str, Tensor]) -> BlockHead:
    """Copy the tensors of such a folder into a head, which borrows those that are the base's."""
    named = dict(tensors)
    embedding = named.pop("embed_tokens.weight", None)
    lent = [named.pop(name, None) for name in LENT]
    take_maps(head, named)
    fill(head, named)
    if embedding is not None and lent[0] is not None and len(lent[0]) == len(embedding):
        head.bind(embedding, lent[0])
    return head

"""What public folders of EAGLE-3 and P-EAGLE say, in the names of our own settings and tensors.

They are SafeAILab's, SpecForge's and those of vllm-project's speculators, and as vLLM reads them:
SpecForge 0.2.0 calls `norm_output` whether the last norm is there at all, which nobody else does.
"""

from typing import Any

from torch import Tensor

from specheads.core.errors import InputError
from specheads.heads.layers.rotary import published

IDS = "eagle_aux_hidden_state_layer_ids"

PLAIN = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
"""Settings of public checkpoints that may differ, and whose other values nothing here reads."""

SAME = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Settings of the same name and meaning there and here."""


def interpret(
    config: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """Return settings and tensors as `kinds/eagle3.py` has them; None for another layout.

    They name the first layer `midlayer` or `layers.0`. An embedding that was not trained is a copy
    of the base's, and stands under `embedding`. Sizes stand among the settings, as `width` and
    `vocab_size`.

    Raises:
        ValueError: It needs something that the head has not.
    """
    named = {name.replace("layers.0.", "midlayer."): value for name, value in tensors.items()}
    kind = config.get("speculators_model_type", "eagle3")
    if kind not in ("eagle3", "peagle") or "midlayer.hidden_norm.weight" not in named:
        return None
    nested = dict(config.get("eagle_config", {}))
    if IDS in nested:
        # SpecForge, SGLang and ModelOpt, who write them there, count outputs of layers from zero
        nested[IDS] = [layer + 1 for layer in nested[IDS]]
    settings = config.get("transformer_layer_config", {}) | nested | config
    for name, value in (PLAIN | {"target_hidden_size": settings["hidden_size"]}).items():
        if settings.get(name) not in (None, value):
            raise InputError(
                f"eagle3 reads checkpoints with {name}={value!r}, this one has "
                f"{settings[name]!r}; choose another checkpoint"
            )
    ours = _own_settings(settings)
    mask = named.get("mask_hidden")
    if mask is not None:
        named["mask_hidden"] = mask.flatten()
        ours |= {"parallel": True, "mask_token": _mask_token(settings)}
    if not settings.get("embed_requires_grad", kind == "peagle") and "embed_tokens.weight" in named:
        named["embedding"] = named.pop("embed_tokens.weight")
    ours["own_embedding"] = "embed_tokens.weight" in named
    return ours, named


def _own_settings(settings: dict[str, Any]) -> dict[str, Any]:
    # where it is not in speculators' format, our own exports say it beside the rest
    proposal = settings.get("speculators_config", {}).get("proposal_methods", [settings])[0]
    drafted, depth = settings.get("draft_vocab_size") or 0, proposal.get("speculative_tokens")
    return {
        "width": settings["hidden_size"],
        "vocab_size": settings["vocab_size"],
        **({"depth": depth} if depth else {}),
        **published(settings),
        "aux_layers": sorted(set(settings.get(IDS) or ())),
        "num_layers": settings.get("num_hidden_layers") or 1,
        "attention_heads": settings["num_attention_heads"],
        "key_value_heads": settings.get("num_key_value_heads") or 0,
        "head_dim": settings.get("head_dim") or 0,
        "inner_dim": settings["intermediate_size"],
        "epsilon": settings["rms_norm_eps"],
        "draft_tokens": drafted if drafted != settings["vocab_size"] else 0,
        **{name: bool(settings.get(name)) for name in SAME},
    }


def _mask_token(settings: dict[str, Any]) -> int:
    names = ("mask_token_id", "pard_token", "ptd_token_id")
    found = [settings[name] for name in names if settings.get(name) is not None]
    if not found:
        raise InputError(
            f"a checkpoint with mask_hidden needs one of {', '.join(names)} in config.json, got "
            "none; add the token its masks have"
        )
    return found[0]

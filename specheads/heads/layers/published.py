"""Settings of decoder layers in the config.json of published heads."""

from collections.abc import Mapping
from typing import Any

from specheads.core.foreign import refuse_unused
from specheads.core.ranges import PositiveInt, is_allowed
from specheads.heads.layers.rotary import ORIGINAL

NAMES = ("rope_type", "type", "rope_theta")
"""Entries of published settings that are no parameters of a scaling."""
HALVES = {"rope_is_neox_style": True, "is_neox_style": True}
"""Published settings of `rotate`, which pairs the halves of a head and not its neighbours."""


def read_rope_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return `rope_theta`, if present, and `rope_scaling` of a Llama's config.json."""
    rope = {**(settings.get("rope_parameters") or {}), **(settings.get("rope_scaling") or {})}
    # the outer one may be the default of an older class; transformers prefers the inner one too
    theta = rope.get("rope_theta") or settings.get("rope_theta")
    base = {"rope_theta": theta} if theta else {}
    kind = rope.get("rope_type", rope.get("type"))
    # texts have one position a token, so mrope rotates as without its sections
    if kind in (None, "default", "mrope"):
        refuse_unused(
            "a rotary embedding without scaling",
            rope,
            used=(*NAMES, ORIGINAL, "mrope_section", "mrope_interleaved"),
            fixed={"factor": 1, "partial_rotary_factor": 1},
        )
        return base | {"rope_scaling": {}}
    parameters = {name: value for name, value in rope.items() if name not in NAMES}
    if kind in ("llama3", "yarn") and (length := settings.get("max_position_embeddings")):
        parameters.setdefault(ORIGINAL, length)
    elif kind == "linear":
        parameters.pop(ORIGINAL, None)
    # readers ignore parameters that are zero or null, and all of them rotate whole heads
    scaling = {name: value for name, value in parameters.items() if value or value is False}
    if scaling.get("partial_rotary_factor") == 1:
        del scaling["partial_rotary_factor"]
    return base | {"rope_scaling": scaling | {"rope_type": kind}}


def draft_window(settings: Mapping[str, Any], num_layers: int) -> tuple[int | None, dict[str, Any]]:
    """Return the window of all layers, and the only supported values of settings of windows.

    A head has one window or none: layers of both kinds are not supported.
    """
    window, layer_types = settings.get("sliding_window"), settings.get("layer_types")
    in_use = settings.get("use_sliding_window") is not False and is_allowed(PositiveInt, window)
    sliding = layer_types.count("sliding_attention") if isinstance(layer_types, list) else 0
    if in_use and sliding == num_layers == len(layer_types or ()):
        return window, {}
    return None, full_attention(settings)


def full_attention(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the only values of settings of windows with which all layers have full attention."""
    layer_types = settings.get("layer_types")
    if layer_types and set(layer_types) == {"full_attention"}:
        return {}
    if layer_types:
        return {"layer_types": "full_attention", "sliding_window": None}
    if settings.get("use_sliding_window") is False:
        return {}
    return {"sliding_window": None, "use_sliding_window": False}


def published_sizes(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of layers and the depth, if it is known, of a published config."""
    proposal = settings.get("speculators_config", {}).get("proposal_methods", [settings])[0]
    depth, drafted = proposal.get("speculative_tokens"), settings.get("draft_vocab_size") or 0
    return {
        **({"depth": depth} if depth else {}),
        "attention_heads": settings["num_attention_heads"],
        "key_value_heads": settings.get("num_key_value_heads") or 0,
        "head_dim": settings.get("head_dim") or 0,
        "inner_dim": settings["intermediate_size"],
        "epsilon": settings["rms_norm_eps"],
        "draft_tokens": drafted if drafted != settings["vocab_size"] else 0,
    }

"""Checkpoints of heads: settings and tensors are read without running code, and loaded into a head.

A folder from the Hub is untrusted. Nothing in it is executed and no file outside it is read. Its
sizes, counts and names are checked against its tensors before memory is allocated.
"""

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from specheads.core.drafter import Head
from specheads.core.errors import InputError, first_line
from specheads.core.files import read_json, refuse_outside
from specheads.core.foreign import refuse_unused
from specheads.core.machine import dtype_name
from specheads.core.ranges import PositiveInt, is_allowed
from specheads.heads.layers.rotary import ORIGINAL

WEIGHT_FILES = (
    "model*.safetensors",
    "medusa_lm_head*.safetensors",
    "*.safetensors",
    "pytorch_model*.bin",
    "*.bin",
    "*.pt",
)
"""Weight files; the first pattern with a match is used. Pickles are read with weights_only."""
INDEX_SUFFIX = ".index.json"
MASK_EMBEDDING = "mask_embedding.pt"
"""File of some DFlash heads, whose masks SGLang and vLLM then embed by it."""
CODE_KEYS = ("_target_", "custom_pipelines")
"""Settings that name code. They are refused instead of ignored; `auto_map`, which published heads
copy from their bases, is ignored as it is there."""


def read_settings(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's config.json without null values, which mean unset.

    One that is missing, no JSON, or names code is refused.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise InputError(
            f"a head needs a config.json, and {folder} has none; name its folder, such as RUN/head"
        )
    settings = read_json(file)
    pending: list[Any] = [settings]
    # grows by the nested values; deep settings would exceed the limit of recursion
    for value in pending:
        if not isinstance(value, dict):
            pending += value if isinstance(value, list) else []
            continue
        if code := [name for name in CODE_KEYS if name in value]:
            raise InputError(
                f"{file} may hold settings only, and names code in {code[0]!r}; remove it"
            )
        for name, setting in [*value.items()]:
            if setting is None:
                del value[name]
            elif setting != setting or str(setting) in ("true", "false", "NaN"):
                raise InputError(
                    f"{file} must hold numbers, and true and false without quotes, and {name} is "
                    f"{setting!r}; fix it"
                )
        pending += value.values()
    return settings


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return a checkpoint's tensors, merged from all shards.

    A ValueError is raised if a file is missing, damaged, outside the folder, has other objects than
    tensors, or repeats a name.
    """
    if (folder / MASK_EMBEDDING).is_file():
        raise InputError(
            f"masks of a head are embedded by the base's row of mask_token_id, and {folder} has an "
            f"embedding of its own in {MASK_EMBEDDING}; choose another checkpoint"
        )
    files = next(filter(None, (_list_files(folder, pattern) for pattern in WEIGHT_FILES)), None)
    if files is None:
        raise InputError(
            f"a head needs weights, as *.safetensors, *.bin or *.pt; {folder} has none"
        )
    for index in _list_files(folder, f"*{INDEX_SUFFIX}"):
        shards = read_json(index).get("weight_map")
        names = set(map(str, shards.values())) if isinstance(shards, dict) else {""}
        # compared as names: a path may be too long for the file system
        if missing := sorted(names - {file.name for file in _list_files(folder, "*")}):
            raise InputError(
                f"{index} must name files of its folder, got {missing[0]!r:.80}; download it again"
            )
    tensors: dict[str, Tensor] = {}
    for file in files:
        refuse_outside(file)
        shard = _read_weight_file(file)
        if repeated := sorted(set(shard) & set(tensors)):
            raise InputError(f"{repeated[0]!r} is in two files of {folder}; keep one of them")
        tensors |= shard
    return tensors


def _list_files(folder: Path, pattern: str) -> list[Path]:
    return sorted(file for file in folder.glob(pattern) if file.is_file())


def _read_weight_file(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a file. A pickle is read without its other objects."""
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                size = sum(entry.file_size for entry in archive.infolist())
            if size > file.stat().st_size:
                raise ValueError(f"it unpacks to {size} bytes, and torch.save never compresses")
        tensors = torch.load(file, map_location="cpu", weights_only=True)
        # a file without a dictionary has no names
        for name, value in tensors.items() if isinstance(tensors, dict) else [(None, tensors)]:
            if not isinstance(name, str) or not _has_all_elements(value):
                raise ValueError(f"{name!r:.80} is not one")
    # a damaged file can raise any error
    except Exception as error:
        is_pickle = isinstance(error, pickle.UnpicklingError)
        reason = "it has other objects" if is_pickle else first_line(error)
        raise InputError(
            f"{file} must hold complete tensors by name and nothing else: {reason}; replace it"
        ) from error
    return tensors


def _has_all_elements(value: Any) -> bool:
    """Return whether a value is a tensor with memory for each of its elements."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_meta:
        return False
    return value.numel() * value.element_size() <= value.untyped_storage().nbytes()


def check_weights(weights: Mapping[str, Tensor]) -> None:
    """Refuse weights that are no floating-point numbers, such as packed ones, or not finite."""
    for name, weight in weights.items():
        if not weight.is_floating_point():
            raise InputError(
                f"{name} must hold floating-point numbers, got {dtype_name(weight.dtype)}; choose "
                "a checkpoint that is not quantised"
            )
        # not every operation exists for 8 bits
        wide = weight.float() if weight.element_size() == 1 else weight
        if not wide.isfinite().all():
            raise InputError(
                f"{name} must hold finite numbers, and has NaN or infinity; download it again, or "
                "choose another checkpoint"
            )


def fill_head(head: Head, tensors: Mapping[str, Tensor]) -> None:
    """Load tensors into a head; refuse a missing, unexpected, misshapen or damaged one by name.

    The head may be on the meta device, because its tensors are replaced. The maps d2t and t2d of
    public checkpoints are its `draft_ids`.
    """
    parameters, tensors = head.state_dict(), _with_draft_ids(head, tensors)
    check_weights({name: value for name, value in tensors.items() if name != "draft_ids"})
    copies = {
        name: value.to(parameters[name].dtype, copy=True) if name in parameters else value
        for name, value in tensors.items()
    }
    try:
        head.load_state_dict(copies, assign=True)
    except RuntimeError as error:
        # torch lists every difference, one kind of them on a line
        reason = str(error).splitlines()[1].strip(" \t.")
        raise InputError(
            f"the checkpoint is incomplete or of another kind: {reason:.200}; choose another"
        ) from error
    if (ids := tensors.get("draft_ids")) is None:
        return
    in_range = ids[0] >= 0 and ids[-1] < head.vocab_size
    if ids.is_floating_point() or not in_range or (ids.diff() < 1).any():
        raise InputError(
            f"draft_ids must increase and be below {head.vocab_size}; repair the checkpoint"
        )


def _with_draft_ids(head: Head, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Replace the maps d2t and t2d by `draft_ids`; refuse maps that contradict each other."""
    weights = dict(tensors)
    mask, offsets = weights.pop("t2d", None), weights.pop("d2t", None)
    if offsets is None:
        return weights
    if len(offsets) != head.drafted_size:
        raise InputError(
            f"d2t must name {head.drafted_size} tokens, got {len(offsets)}; repair the maps"
        )
    # the i-th draft token is token i + d2t[i] of the base
    ids = torch.arange(head.drafted_size, device=offsets.device) + offsets
    if mask is not None and not torch.equal(mask.nonzero()[:, 0], ids):
        raise InputError("d2t and t2d must name the same tokens, in order; repair the maps")
    return weights if head.draft_ids is None else weights | {"draft_ids": ids}


# --- settings of decoder layers in a published config.json --------------------------------------

NAMES = ("rope_type", "type", "rope_theta")
"""Entries of published settings that are no parameters of a scaling."""
PLAIN = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "logit_scale": 1,
    "partial_rotary_factor": 1,
    # `rotate` pairs the halves of a head and not its neighbours
    "rope_is_neox_style": True,
    "is_neox_style": True,
}
"""Published settings of layers with the only supported value of each."""
SIZES = {
    "attention_heads": "num_attention_heads",
    "key_value_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "inner_dim": "intermediate_size",
}
"""Our names of the sizes of a decoder layer, and those in config.json."""


def read_layer_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of layers, the draft vocabulary and, if known, depth and `rope_theta`."""
    proposal = settings.get("speculators_config", {}).get("proposal_methods", [settings])[0]
    depth, drafted = proposal.get("speculative_tokens"), settings.get("draft_vocab_size") or 0
    sizes = {"num_key_value_heads": 0, "head_dim": 0, **settings}
    return {
        **({"depth": depth} if depth else {}),
        **{name: sizes[public] or 0 for name, public in SIZES.items()},
        **read_rope_settings(settings),
        "epsilon": settings["rms_norm_eps"],
        "draft_tokens": drafted if drafted != settings["vocab_size"] else 0,
    }


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


def draft_window(
    settings: Mapping[str, Any], num_layers: int
) -> tuple[int | None, list[int], dict[str, Any]]:
    """Return the window, the layers without it, and the only supported values of further settings.

    A head has one window or none.
    """
    window, layer_types = settings.get("sliding_window"), settings.get("layer_types")
    in_use = settings.get("use_sliding_window") is not False and is_allowed(PositiveInt, window)
    types = layer_types if isinstance(layer_types, list) else []
    full_layers = [index for index, kind in enumerate(types) if kind == "full_attention"]
    num_windowed = types.count("sliding_attention")
    if in_use and num_windowed and num_windowed + len(full_layers) == num_layers == len(types):
        return window, full_layers, {}
    return None, [], fixed_without_window(settings)


def fixed_without_window(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the only values of settings of windows with which all layers have full attention."""
    layer_types = settings.get("layer_types")
    if layer_types and set(layer_types) == {"full_attention"}:
        return {}
    if layer_types:
        return {"layer_types": "full_attention", "sliding_window": None}
    if settings.get("use_sliding_window") is False:
        return {}
    return {"sliding_window": None, "use_sliding_window": False}

"""Rotary position embeddings, with the scaling for longer texts of transformers."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specheads.core.errors import InputError
from specheads.core.ranges import PositiveFloat, is_allowed

ORIGINAL = "original_max_position_embeddings"
REQUIRED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL),
    "yarn": ("factor", ORIGINAL),
}
"""Required parameters of each type of scaling."""
YARN = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate")
"""Optional parameters of yarn."""
Rope = tuple[float, tuple[tuple[str, Any], ...]]
"""Base of the frequencies, and their scaling as sorted items; empty is no scaling."""


def rope(theta: float, scaling: Mapping[str, Any]) -> Rope:
    """Return the embedding for the `rope_scaling` of a Llama; refuse one that is not supported."""
    kind = scaling.get("rope_type", None if scaling else "default")
    if kind == "default":
        return theta, ()
    if kind not in REQUIRED:
        raise InputError(
            f"rope_scaling needs a rope_type of {', '.join(REQUIRED)}, got {kind!r:.80}; set it"
        )
    numbers = {name: value for name, value in scaling.items() if name != "rope_type"}
    required, optional = REQUIRED[kind], YARN if kind == "yarn" else ()
    if invalid := sorted({*numbers} - {*required, *optional} or {*required} - {*numbers}):
        raise InputError(
            f"rope_scaling of rope_type {kind} needs {', '.join(required)} and may have "
            f"{', '.join(optional) or 'no more'}; fix {invalid[0]!r:.80}"
        )
    for name, value in numbers.items():
        if not is_allowed(bool if name == "truncate" else PositiveFloat, value):
            raise InputError(
                f"rope_scaling.{name} must be a number above 0, got {value!r:.80}; fix it"
            )
    return theta, tuple(sorted(scaling.items()))


def rotate(
    rope: Rope,
    values: Float[Tensor, "batch path time width"],
    positions: Int[Tensor, "row time"],
    share: float = 1.0,
) -> Float[Tensor, "batch path time width"]:
    """Rotate channels i and i + half of each head by their angle at the position.

    Only the first `share` of the channels is rotated.
    """
    if (size := int(values.shape[-1] * share)) < values.shape[-1]:
        rotated = rotate(rope, values[..., :size], positions)
        return torch.cat([rotated, values[..., size:]], dim=-1)
    dtype = torch.get_default_dtype()
    frequencies, factor = _frequencies(rope, values.shape[-1], values.device, dtype)
    angles = positions[:, None, :, None] * frequencies
    cos, sin = ((wave * factor).to(values.dtype) for wave in (angles.cos(), angles.sin()))
    first, second = values.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


@cache
def _frequencies(
    rope: Rope, size: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, float]:
    """Return the angle per position of each pair of channels, and the attention factor.

    `dtype` is torch's default dtype: float32, except in some tests.
    """
    theta, scaling = rope
    if not scaling:
        exponents = torch.arange(0, size, 2, device=device, dtype=dtype) / size
        return 1.0 / theta**exponents, 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {**dict(scaling), "rope_theta": theta}
    length = int(parameters.get(ORIGINAL, 1) * max(1, parameters["factor"]))
    config = LlamaConfig(rope_parameters=parameters, head_dim=size, max_position_embeddings=length)
    return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, device)

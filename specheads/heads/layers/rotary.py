"""Rotary position embeddings, plain or stretched to longer texts as a checkpoint asks for.

How frequencies are stretched is transformers' own code.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specheads.config.validation import admits
from specheads.core.errors import InputError

ORIGINAL = "original_max_position_embeddings"
REQUIRED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL),
    "yarn": ("factor", ORIGINAL),
}
"""What each way of stretching needs to be told."""

OPTIONAL = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor")
"""What yarn can be told besides, and `truncate`."""


@dataclass(frozen=True, slots=True)
class Rotary:
    """How positions turn the channels of queries and keys."""

    theta: float
    """Longest wavelength is about this many positions, times two pi."""
    scaling: tuple[tuple[str, Any], ...] = ()
    """How its frequencies are stretched, sorted by name; nothing leaves them."""

    @classmethod
    def of(cls, theta: float, scaling: Mapping[str, Any] | None = None) -> "Rotary":
        """Return the embedding that a Llama's `rope_scaling` describes.

        Raises:
            ValueError: It is of another kind, or lacks a number, or has one that is not known.
        """
        scaling = dict(scaling or {})
        kind = scaling.get("rope_type", "default" if not scaling else None)
        if kind == "default":
            return cls(theta)
        if kind not in REQUIRED:
            raise InputError(
                f"rope_scaling needs a rope_type of {', '.join(REQUIRED)}, got {kind!r:.80}; "
                "choose one, or leave it empty"
            )
        numbers = {name: value for name, value in scaling.items() if name != "rope_type"}
        known = (*REQUIRED[kind], *((*OPTIONAL, "truncate") if kind == "yarn" else ()))
        if wrong := sorted({*numbers} - {*known} or {*REQUIRED[kind]} - {*numbers}):
            raise InputError(
                f"rope_scaling of rope_type {kind} needs {', '.join(REQUIRED[kind])}"
                f"{' and may have ' + ', '.join(OPTIONAL) if kind == 'yarn' else ''}; got "
                f"{', '.join(sorted(numbers)) or 'nothing'}: mend {wrong[0]!r:.80}"
            )
        for name, value in numbers.items():
            if not (type(value) is bool if name == "truncate" else _is_scale(value)):
                raise InputError(
                    f"rope_scaling.{name} must be a number above 0, got {value!r:.80}; mend it"
                )
        return cls(theta, tuple(sorted(scaling.items())))

    def turn(
        self, values: Float[Tensor, "batch path time width"], positions: Int[Tensor, "row time"]
    ) -> Float[Tensor, "batch path time width"]:
        """Turn channels i and i + half of each head by their angle at the position."""
        half = values.shape[-1] // 2
        frequencies, factor = _frequencies(
            self, values.shape[-1], values.device, torch.get_default_dtype()
        )
        angles = positions[:, None, :, None] * frequencies
        cos, sin = ((part * factor).to(values.dtype) for part in (angles.cos(), angles.sin()))
        first, second = values.split(half, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def published(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return `rope_theta`, where it is said, and `rope_scaling` of a Llama's config.json."""
    rope = {**(settings.get("rope_parameters") or {}), **(settings.get("rope_scaling") or {})}
    theta = settings.get("rope_theta") or rope.get("rope_theta")
    scaling = _published_scaling(rope, settings.get("max_position_embeddings"))
    return {**({"rope_theta": theta} if theta else {}), "rope_scaling": scaling}


def _published_scaling(rope: dict[str, Any], length: int | None) -> dict[str, Any]:
    """Return how positions are stretched: empty where they are not."""
    kind = rope.get("rope_type", rope.get("type"))
    if kind in (None, "default"):
        return {}
    said = {name: value for name, value in rope.items() if name not in ("rope_theta", "type")}
    if kind in ("llama3", "yarn") and length:
        said.setdefault(ORIGINAL, length)
    elif kind == "linear":
        said.pop(ORIGINAL, None)
    # what is nothing or zero is taken for absent by those who read it, and all rotate whole heads
    kept = {name: value for name, value in said.items() if value or value is False}
    if kept.get("partial_rotary_factor") == 1:
        del kept["partial_rotary_factor"]
    return kept | {"rope_type": kind}


def _is_scale(value: Any) -> bool:
    return admits(float, value) and 0 < value <= 1e9


@cache
def _frequencies(
    rotary: Rotary, size: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, float]:
    """Return each pair's angle a position, in float32 as everybody has it, and a factor of both.

    `dtype` is torch's default, which is float32 but in tests that ask for more.
    """
    if not rotary.scaling:
        exponents = torch.arange(0, size, 2, device=device, dtype=dtype) / size
        return 1.0 / rotary.theta**exponents, 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {**dict(rotary.scaling), "rope_theta": rotary.theta}
    length = int(parameters.get(ORIGINAL, 1) * max(1, parameters["factor"]))
    config = LlamaConfig(rope_parameters=parameters, head_dim=size, max_position_embeddings=length)
    return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, device)

"""Code that all oracles share: the base's tensors, stored tensors, norms and rotary embeddings."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specheads.base.model import FrozenBase
from specheads.core.errors import InputError
from specheads.export.write import CheckText, LevelDraft


@dataclass(frozen=True, slots=True)
class BaseView:
    """The base's tensors for one text, as an engine has them while it drafts; all in float64."""

    streams: tuple[Tensor, ...]
    """Entry k is the residual stream after k layers, (time, width); the embedding is first."""
    hidden: Tensor
    """(time, width), after the final norm."""
    tokens: Tensor
    """(time,)."""
    embedding: Tensor
    """(vocab, width)."""
    projection: Tensor
    """(vocab, width); its product with `hidden` gives the base's logits."""


DraftOracle = Callable[[Path, BaseView, int], Iterator[LevelDraft]]
"""Takes a folder, the base on one text, and the number of tokens that the engine drafts."""


@torch.no_grad()
def view_base(base: FrozenBase, text: CheckText) -> BaseView:
    """Run the base on a text."""
    tokens = torch.tensor([text[0] + text[1]])
    features = base.read(tokens.to(base.device), tuple(range(base.num_layers + 1)))
    assert features.aux is not None
    streams = features.aux[0].detach().cpu().double().split(base.width, dim=-1)
    tables = base.embedding, base.projection.scaled_weight
    lent = (table.detach().cpu().double() for table in tables)
    return BaseView(streams, features.hidden[0].detach().cpu().double(), tokens[0], *lent)


class Stored:
    """The tensors of an export; each can be taken once."""

    def __init__(self, file: Path) -> None:
        if not file.is_file():
            raise InputError(f"the engine reads {file.name}; {file.parent} has none")
        self.name = file.name
        self.left: dict[str, Tensor] = load_file(file)

    def take(self, name: str, *shape: int) -> Tensor:
        """Return a tensor, with floating-point values in float64."""
        if name not in self.left:
            raise InputError(f"{self.name} lacks {name!r}")
        value = self.left.pop(name)
        if value.shape != shape:
            raise InputError(f"{name!r} must have shape {shape}, got {tuple(value.shape)}")
        return value.double() if value.is_floating_point() else value

    def __contains__(self, name: str) -> bool:
        return name in self.left

    def close(self) -> None:
        """Refuse tensors that were not taken."""
        if self.left:
            raise InputError(f"{self.name} has {min(self.left)!r}, which the engine ignores")


def read_config(folder: Path) -> dict[str, Any]:
    """Return an export's config.json."""
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def require(config: dict[str, Any], **expected: Any) -> None:
    """Refuse a setting that is missing or that an engine would read differently."""
    for name, value in expected.items():
        if config.get(name) != value:
            raise InputError(
                f"the engine needs {name}={value!r} in config.json, got {config.get(name)!r}"
            )


def rms(values: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Divide by the root mean square and scale by channel."""
    return values / (values.pow(2).mean(-1, keepdim=True) + epsilon).sqrt() * weight


def silu(values: Tensor) -> Tensor:
    """Multiply by the sigmoid."""
    return values * values.sigmoid()


def frequencies(config: dict[str, Any], size: int) -> tuple[Tensor, float]:
    """Return the angle of each pair at position 1, and the attention factor.

    The settings have the names of a Llama config; engines scale frequencies as transformers does.
    """
    rope = {**(config.get("rope_parameters") or {}), **(config.get("rope_scaling") or {})}
    theta = config.get("rope_theta") or rope["rope_theta"]
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size), 1.0
    llama = LlamaConfig(rope_parameters=rope | {"rope_theta": theta}, head_dim=size)
    steps, factor = ROPE_INIT_FUNCTIONS[kind](llama, torch.device("cpu"))
    return steps.double(), factor


def rotate(steps: Tensor, factor: float, values: Tensor, positions: Tensor) -> Tensor:
    """Rotate the pairs (i, i + half) of (time, head, channel) as complex numbers."""
    half = values.shape[-1] // 2
    angles = positions[:, None, None].double() * steps
    turned = torch.complex(values[..., :half], values[..., half:]) * torch.exp(1j * angles)
    return factor * torch.cat([turned.real, turned.imag], dim=-1)

"""What the scripts that make golden tensors share. They run by hand, in this folder."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

GOLDEN = Path(__file__).parent
SINGLE = torch.float32
SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


@contextmanager
def in_float64() -> Iterator[None]:
    """Let the code of other projects compute in float64 where it says float32, angles too."""
    before = torch.float32, torch.float, torch.Tensor.float
    torch.set_default_dtype(torch.float64)
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    try:
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float = before
        torch.set_default_dtype(torch.float32)


def randomise(module: torch.nn.Module) -> None:
    """Sample every weight as a float32 value."""
    for value in module.parameters():
        value.data.copy_((torch.randn(value.shape) * 0.3 + (value.ndim == 1)).to(SINGLE))


def save(
    name: str,
    weights: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    config: dict[str, Any] | None = None,
) -> None:
    """Write one case; without a config its folder has one."""
    folder = GOLDEN / name
    folder.mkdir(exist_ok=True)
    if config:
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    single = {key: value.to(SINGLE) if value.is_floating_point() else value
              for key, value in weights.items()}  # fmt: skip
    for file, tensors in (("model", single), ("expected", expected)):
        detached = {key: value.detach().clone().contiguous() for key, value in tensors.items()}
        save_file(detached, folder / f"{file}.safetensors")

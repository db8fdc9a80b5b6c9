"""Where a run would compute, and what of its base is at hand."""

from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from huggingface_hub import try_to_load_from_cache
from transformers import PreTrainedConfig

from specheads.base.gguf import located
from specheads.base.loading import load_config
from specheads.config import Base
from specheads.core.errors import InputError

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


@dataclass(frozen=True, slots=True)
class Target:
    """A device that is asked for, and the base that it is to hold."""

    device: torch.device
    is_here: bool
    """Whether this machine has the device."""
    source: str
    """Folder or Hub id of the base."""
    config: PreTrainedConfig
    dtype: torch.dtype
    has_weights: bool
    """Whether the base's weights can be read without a download."""

    @property
    def kind(self) -> str:
        """Kind of memory: what is no CPU has an allocator and chunks like CUDA's."""
        return "cpu" if self.device.type == "cpu" else "cuda"


def target_of(base: Base, accelerator: Accelerator) -> Target:
    """Return where settings of a base put it; only its config.json is read."""
    name = str(accelerator.device) if base.device == "auto" else base.device
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(
            f"base.device must name a torch device, got {name!r:.80}; use cpu, cuda, or auto"
        ) from error
    source = located(base.model)
    config = load_config(source, revision=base.revision)
    half = device.type != "cpu" and base.dtype == "auto"
    dtype = getattr(torch, "bfloat16" if half else base.dtype.replace("auto", "float32"))
    has_weights = _has_weights(source, base.revision)
    return Target(device, _is_here(device), source, config, dtype, has_weights)


def _is_here(device: torch.device) -> bool:
    try:
        return torch.empty(0, device=device).device.type != "meta"
    except (AssertionError, ImportError, NotImplementedError, RuntimeError):
        return False


def _has_weights(source: str, revision: str) -> bool:
    folder = Path(source)
    if folder.is_dir():
        return any(folder.glob("*.safetensors"))
    found = (try_to_load_from_cache(source, name, revision=revision) for name in WEIGHTS)
    return any(isinstance(one, str) for one in found)

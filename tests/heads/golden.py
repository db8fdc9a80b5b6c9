"""Tensors of the original projects in tests/golden/, and features as their heads read them."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from specheads.core.drafter import Features

GOLDEN = Path(__file__).parents[1] / "golden"


def expected(case: str) -> dict[str, Tensor]:
    """Return the inputs and outputs of a case."""
    return load_file(GOLDEN / case / "expected.safetensors")


def changed(case: str, folder: Path, section: str = "", drop: str = "", **settings: Any) -> Path:
    """Copy a public head, change settings in its config or in a part of that, and drop one."""
    out = shutil.copytree(GOLDEN / case, folder / "head")
    config = json.loads((out / "config.json").read_text())
    config.pop(drop, None)
    inner = config.setdefault(section, {}) if section else config
    inner |= settings
    (out / "config.json").write_text(json.dumps(config))
    return out


def close(result: Tensor, reference: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(result, reference, rtol=tolerance, atol=tolerance)


def features(aux: Tensor) -> Features:
    """Return features with aux only, the input of EAGLE-3 and of block heads."""
    return Features(aux[..., : aux.shape[-1] // 3], aux)

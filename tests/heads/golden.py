"""Tensors of the original projects in tests/golden/, and features as their heads read them."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from specheads.core.drafter import Features

GOLDEN = Path(__file__).parents[1] / "golden"


def expected(case: str) -> dict[str, Tensor]:
    """Return the inputs and outputs of a case."""
    return load_file(GOLDEN / case / "expected.safetensors")


def close(found: Tensor, wanted: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def features(aux: Tensor) -> Features:
    """Return features with aux only, the input of EAGLE-3 and of block heads."""
    return Features(aux[..., : aux.shape[-1] // 3], aux)

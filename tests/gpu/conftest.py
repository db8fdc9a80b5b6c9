"""Settings that every test of this folder shares."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from specheads.training.processes import fix_workspace

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Print warnings here instead of failing.

    Compilers and kernels for CUDA warn about themselves, and the time on a GPU is short.
    """
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session", autouse=True)
def _workspace() -> None:
    # before the first product on the device, as a command sets it before it loads a base
    fix_workspace()


@pytest.fixture(autouse=True)
def _full_float32() -> Iterator[None]:
    # TF32 has 10 bits of mantissa, and these tests compare tokens and tensors in float32
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)

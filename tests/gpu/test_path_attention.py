"""Flash attention with paths equals the plain attention of training rounds on the device."""

import pytest
import torch

from specheads.heads.layers import path_attention
from tests.heads.test_path_attention import agree, backward, forward, problem

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("levels", [0, 2])
def test_flash_attention_with_paths_equals_the_plain_one(levels, device, monkeypatch):
    how = {"dtype": torch.bfloat16, "device": device}
    if device.type == "cpu":
        # no such kernel there
        monkeypatch.setattr(path_attention, "_flash_forward", forward)
        monkeypatch.setattr(path_attention, "_flash_backward", backward)
        how["dtype"] = torch.float64
    agree(problem(4, 2, levels, how), 3e-2)

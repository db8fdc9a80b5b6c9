"""A backward pass on a GPU is deterministic; torch's own settings are as before afterwards."""

import os
from typing import Any

import pytest
import torch

from specheads.core.kernels import without_cudnn_attention
from specheads.training import processes

deterministic: Any = torch.utils.deterministic


def settings() -> tuple[bool, bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        deterministic.fill_uninitialized_memory,
    )


@pytest.mark.parametrize("before", [(False, False), (True, True), (True, False)])
def test_gpu_backward_is_deterministic_and_settings_are_restored(before, monkeypatch):
    monkeypatch.setenv(processes.WORKSPACE, ":4096:8")
    plain = settings()
    enabled, warn_only = before
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    try:
        as_set = settings()
        with processes.repeatable(torch.device("cuda")):
            assert settings() == (True, False, False)
        assert settings() == as_set
    finally:
        torch.use_deterministic_algorithms(plain[0], warn_only=plain[1])


def test_cudnn_attention_is_left_out_and_chosen_again_later():
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with without_cudnn_attention(torch.device("cuda")):
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


def test_cublas_workspace_is_set_before_a_base_is_loaded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(processes.WORKSPACE, raising=False)
    processes.accelerator_of_environment("float32")
    assert os.environ[processes.WORKSPACE] == ":4096:8"

"""A training step: its one synchronisation, and a deterministic backward pass."""

import copy
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from specheads.base.model import FrozenBase
from specheads.config.training import Phase
from specheads.core import features, machine
from specheads.core.kernels import without_cudnn_attention
from specheads.data.packing import TokenBatch
from specheads.heads.load import build_for_base
from specheads.training import objective as objectives
from specheads.training import processes
from specheads.training.objective import Objective, draft_labels
from specheads.training.schedule import ScheduledPhase
from specheads.training.step import MicroBatch, Teacher, compute_loss
from tests import tiny
from tests.meta import META, Waits
from tests.slow import each_kind


def uploaded(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


@pytest.mark.parametrize("kind", each_kind())
def test_training_step_synchronises_once(kind, monkeypatch):
    # it copies without waiting
    for module in (objectives, features):
        monkeypatch.setattr(module, machine.to_device.__name__, uploaded)
    base = tiny.base()
    head = build_for_base({"kind": kind}, base).to(base.dtype).to(META).train()
    model: Any = copy.deepcopy(base.model)
    far = FrozenBase(model.to(META), prepare=False)
    teacher = Teacher(far, head)
    settings = Phase(steps=4, batch_size=2, sequence_length=32, loss="lk_hybrid")
    phase = ScheduledPhase("corpus", settings, 0)
    tokens = torch.zeros(2, 32, dtype=torch.long, device=META)
    counted = torch.ones(2, 32, dtype=torch.bool, device=META)
    # without document ids transformers checks whether rows are packed
    documents = torch.zeros_like(tokens)
    with Waits() as waits:
        batch = TokenBatch(tokens, counted, documents)
        labels = draft_labels(head, batch, counted)
        micro_batch = MicroBatch(phase, 0, 0, batch, labels, labels.count(batch))
        compute_loss(micro_batch, teacher, Objective(head)).total.backward()
    assert waits.found == {"nonzero": 1}


@pytest.mark.parametrize("before", [(False, False), (True, True), (True, False)])
def test_gpu_backward_is_deterministic_and_settings_are_restored(before, monkeypatch):
    monkeypatch.setenv(processes.WORKSPACE, ":4096:8")
    deterministic: Any = torch.utils.deterministic

    def settings() -> tuple[bool, bool, bool]:
        enabled = torch.are_deterministic_algorithms_enabled()
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        return enabled, warn_only, deterministic.fill_uninitialized_memory

    plain, (enabled, warn_only) = settings(), before
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    try:
        as_set = settings()
        with processes.deterministic_backward(torch.device("cuda")):
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

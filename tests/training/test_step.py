"""A training step: its FLOPs, its one synchronisation, and a deterministic backward pass."""

import copy
import os
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from specheads.base.model import FrozenBase
from specheads.config.training import Phase, Schedule
from specheads.core import machine
from specheads.core.kernels import without_cudnn_attention
from specheads.data.packing import TokenBatch
from specheads.heads.load import build_for_base, kinds
from specheads.training import objective as objectives
from specheads.training import processes
from specheads.training.objective import Objective, label_counts
from specheads.training.schedule import ScheduledPhase, schedule_phases
from specheads.training.step import Step, StepRunner, Teacher, flop_counter
from tests import tiny
from tests.meta import META, Waits
from tests.packed import alone, texts


@pytest.mark.parametrize("loss", ["cross_entropy", "soft_cross_entropy"])
def test_flops_of_a_step_are_those_of_its_products(loss: str):
    """Forward of the base; forward and backward of the head and the vocabulary projections."""
    base, batch = tiny.base(dtype=torch.float32), alone(texts())
    head = build_for_base({"kind": "medusa", "depth": 2}, base)
    phase = Phase(text="corpus", steps=1, batch_size=2, sequence_length=40, loss=loss)
    schedule = Schedule(phases={"corpus": phase})
    stepper = StepRunner(Teacher(base, head), schedule, Accelerator(cpu=True), 0)
    stepper.teacher.begin()
    with flop_counter() as counter:
        base.read(batch.tokens)
    (where,) = schedule_phases(schedule)
    found = stepper.flops(batch, where, 0)
    # rows are padded to a multiple of 128; the base's distribution serves both depths
    vocabulary = 2 * 128 * tiny.VOCAB * base.width
    projections = 2 * 3 + (loss == "soft_cross_entropy")
    own = 2 * 2 * batch.tokens.numel() * base.width**2
    assert found > counter.get_total_flops() + projections * vocabulary + own
    assert found < counter.get_total_flops() + projections * vocabulary + 4 * own
    assert all(value.grad is None for value in head.parameters())


def uploaded(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


@pytest.mark.parametrize(
    ("kind", "weighting"),
    [*((kind, "geometric") for kind in kinds()), ("eagle3", "dpace"), ("dflash", "dpace")],
)
def test_training_step_synchronises_once(kind, weighting, monkeypatch):
    monkeypatch.setattr(objectives, machine.to_device.__name__, uploaded)
    base = tiny.base()
    head = build_for_base({"kind": kind}, base).to(base.dtype).to(META).train()
    model: Any = copy.deepcopy(base.model)
    far = FrozenBase(model.to(META), owned=False)
    teacher = Teacher(far, head)
    teacher.begin()
    settings = Phase(
        steps=4, batch_size=2, sequence_length=32, loss="lk_hybrid", weighting=weighting
    )
    phase = ScheduledPhase("corpus", settings, 0)
    tokens = torch.zeros(2, 32, dtype=torch.long, device=META)
    counted = torch.ones(2, 32, dtype=torch.bool, device=META)
    # without document ids transformers checks whether rows are packed
    documents = torch.zeros_like(tokens)
    with Waits() as waits:
        batch = TokenBatch(tokens, counted, documents)
        counts = label_counts(head, batch, counted, settings)
        step = Step(phase, 0, 0, batch, counted, counts)
        loss, _ = teacher.losses(step, Objective(head))
        loss.backward()
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

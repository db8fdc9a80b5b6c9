"""Training on a device: losses, kernels, resume bit for bit, and packed documents."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor
from transformers import AutoModelForCausalLM

from specheads.base import attention
from specheads.base.model import FrozenBase
from specheads.config.training import JointSettings, Schedule
from specheads.core.drafter import Head
from specheads.data.packing import BatchStream, PackedText
from specheads.heads.layers import path_attention
from specheads.heads.load import kinds
from specheads.runs.directory import RunDirectory
from specheads.runs.trackers import read_metrics
from specheads.training.losses import LOSSES
from tests import tiny
from tests.heads.test_path_attention import backward, check_agreement, forward, random_leaves
from tests.packed import packed, texts
from tests.training import test_trainer
from tests.training.in_processes import documents
from tests.training.test_losses import dense_loss, fused_loss, problem_of
from tests.training.test_trainer import Counting, assert_equal, phase, power_cut

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _accelerator_of_its_own() -> Iterator[None]:
    # accelerate keeps the device and precision of a process in a state that all share
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def base_on(device: torch.device, dtype: torch.dtype = torch.float32) -> FrozenBase:
    return tiny.base("llama", dtype=dtype, device=device)


def packed_text(batch_size: int) -> PackedText:
    """Return documents of uneven lengths in rows of 40 tokens."""
    return PackedText(documents(), sequence_length=40, batch_size=batch_size)


def run_training(
    folder: Path,
    device: torch.device,
    schedule: Schedule,
    kind: str = "mlp_speculator",
    *,
    precision: str = "no",
    base: FrozenBase | None = None,
    text: BatchStream | None = None,
    **choices: Any,
) -> tuple[Head, list[dict[str, Any]]]:
    """Train a head, by default on packed documents; return it with the rows of its metrics."""
    (settings,) = schedule.phases.values()
    head = test_trainer.run_training(
        folder,
        schedule,
        kind=kind,
        base=base or base_on(device),
        accelerator=Accelerator(cpu=device.type == "cpu", mixed_precision=precision),
        log_every=1,
        text=text or packed_text(int(settings.batch_size)),
        **choices,
    )
    return head, read_metrics(folder / "metrics.jsonl")


def corpus(**changes: Any) -> Schedule:
    return Schedule(phases={"corpus": phase(**changes)})


def assert_falls(rows: list[dict[str, Any]]) -> None:
    losses = [row["loss"] for row in rows]
    assert len(losses) == 20
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])


@pytest.mark.parametrize("kind", kinds())
def test_twenty_steps_lower_the_loss(kind: str, device: torch.device, tmp_path: Path) -> None:
    schedule = corpus(steps=20, loss="cross_entropy")
    head, rows = run_training(tmp_path, device, schedule, kind, text=Counting(tiny.VOCAB))
    assert_falls(rows)
    for name, value in head.named_parameters():
        assert value.device == device, name
        assert value.dtype == torch.float32, name
        assert value.isfinite().all(), name


@pytest.mark.parametrize("kind", ["eagle3", "mlp_speculator", "dflash"])
def test_twenty_steps_in_bfloat16_lower_the_loss(kind, device, tmp_path):
    schedule = corpus(steps=20, loss="cross_entropy")
    base = base_on(device, torch.bfloat16)
    head, rows = run_training(
        tmp_path, device, schedule, kind, text=Counting(tiny.VOCAB), precision="bf16", base=base
    )
    assert_falls(rows)
    # weights and the state of the optimizer stay precise
    assert {value.dtype for value in head.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("kind", "precision", "muon"),
    [
        *((kind, "no", 0.0) for kind in kinds()),
        ("mlp_speculator", "no", 0.02),
        ("mlp_speculator", "bf16", 0.0),
        ("eagle3", "bf16", 0.0),
        ("dflash", "bf16", 0.0),
    ],
)
def test_a_killed_run_goes_on_bit_for_bit(kind, precision, muon, device, tmp_path):
    settings = phase(steps=8, batch_size=4, sequence_length=40, scored_share=0.6)
    schedule = Schedule(phases={"corpus": settings}, muon_learning_rate=muon)
    call = device, schedule, kind
    full_run, rows = run_training(tmp_path / "whole", *call, precision=precision)
    with power_cut(5):
        run_training(tmp_path / "parts", *call, precision=precision, checkpoint_every=3)
    resumed_run, later = run_training(tmp_path / "parts", *call, precision=precision)
    assert_equal(full_run.state_dict(), resumed_run.state_dict())
    assert later[-1]["loss"] == rows[-1]["loss"]


def test_a_joint_phase_trains_an_adapter_and_leaves_the_base_as_it_was(device, tmp_path):
    base = tiny.own_base("llama", dtype=torch.float32, device=device)
    before = {name: value.clone() for name, value in base.model.state_dict().items()}
    schedule = corpus(steps=6, joint=JointSettings(rank=4))
    _, rows = run_training(tmp_path, device, schedule, base=base)
    assert all(row["loss/base"] > 0 for row in rows)
    assert (RunDirectory(tmp_path).adapter / "adapter_model.safetensors").is_file()
    assert_equal(base.model.state_dict(), before)


def test_packed_documents_are_read_as_under_a_mask(device, monkeypatch):
    # flash attention takes bfloat16 and heads of 16 channels; weights as initialised round evenly
    config = tiny.config("llama", head_dim=16)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").bfloat16()
    torch.nn.Module.to(model, device)
    base = FrozenBase(model, name="tiny-llama")
    weight = base.model.get_parameter("model.layers.0.self_attn.k_proj.weight")
    weight.requires_grad_(True)
    batch, results = packed(texts()), []
    # the sum of squares behind a norm would have no gradient but rounding
    direction = torch.randn(2, 40, base.width).to(device)
    for document_attention in (attention.document_attention, lambda *_: None):
        monkeypatch.setattr("specheads.base.forward.document_attention", document_attention)
        hidden = base.read(
            batch.tokens, document_ids=batch.document_ids, gradients=True
        ).hidden.float()
        (slope,) = torch.autograd.grad((hidden * direction).sum(), weight)
        results.append((hidden, slope.float()))
    for gpu_values, cpu_values in zip(*results, strict=True):
        assert (gpu_values - cpu_values).norm() <= 0.03 * cpu_values.norm()


WEIGHTS = (1.0, 0.8, 0.64)
DTYPES = (torch.float32, torch.bfloat16)
STEPPED = ("cross_entropy_l1", "lk", "lk_hybrid", "total_variation")
"""Losses whose gradient has a step where draft and base are equally probable."""


def tolerance(kind: str, dtype: torch.dtype) -> float:
    """Return the largest norm of a difference, as a share of the norm."""
    if dtype == torch.float32:
        return 1e-5
    # 8 bits of mantissa move some tokens over the step
    return 0.2 if kind in STEPPED else 0.02


KINDS = sorted(LOSSES)


def assert_close(actual: Tensor, expected: Tensor, share: float) -> None:
    actual, expected = (values.detach().double().cpu() for values in (actual, expected))
    assert (actual - expected).norm() <= share * expected.norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("chunk_rows", [40, None])
def test_a_loss_in_chunks_has_the_value_and_gradients_of_the_dense_one(
    kind: str, is_shared: bool, dtype: torch.dtype, chunk_rows: int | None, device: torch.device
) -> None:
    (states, projections, shared), masks, leaves = problem_of(dtype=dtype, device=device)
    precise, precise_each, precise_leaves = problem_of()
    targets, precise_targets = (shared, None) if is_shared else (masks, precise_each)
    loss = fused_loss(kind, states, projections, targets, weights=WEIGHTS, chunk_rows=chunk_rows)
    dense = dense_loss(kind, precise, WEIGHTS, precise_targets)
    assert (loss.total.device, loss.total.dtype) == (device, torch.float32)
    share = tolerance(kind, dtype)
    assert_close(loss.total, dense, share)
    gpu_values = torch.autograd.grad(loss.total, leaves)
    cpu_values = torch.autograd.grad(dense, precise_leaves)
    for gradient, reference, leaf in zip(gpu_values, cpu_values, leaves, strict=True):
        assert (gradient.dtype, gradient.device) == (leaf.dtype, leaf.device)
        assert_close(gradient, reference, share)


@pytest.mark.parametrize("levels", [0, 2])
def test_flash_attention_with_paths_equals_the_plain_one(levels, device, monkeypatch):
    options = {"dtype": torch.bfloat16, "device": device}
    if device.type == "cpu":
        # no such kernel there
        monkeypatch.setattr(path_attention, "_flash_forward", forward)
        monkeypatch.setattr(path_attention, "_flash_backward", backward)
        options["dtype"] = torch.float64
    check_agreement(random_leaves(4, 2, levels, options), 3e-2)

"""Losses in chunks on a device have the values and gradients of dense ones in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from specheads.training.depth_loss import DepthLoss, Targets, depth_loss
from specheads.training.losses import LOSSES
from tests.training.test_losses import Problem
from tests.training.test_losses import _dense as dense_loss

pytestmark = pytest.mark.gpu

ROWS, VOCAB, WIDTH, DEPTH = 150, 61, 16, 3
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


def drawn(*shape: int, scale: float = 1.0) -> Tensor:
    """Draw numbers that bfloat16 holds exactly, so that every dtype has the same problem."""
    return (scale * torch.randn(*shape)).bfloat16().double()


def problem(
    device: torch.device, dtype: torch.dtype, *, own_targets: bool = False
) -> tuple[Problem, list[Targets], list[Tensor]]:
    """Return states and projections, targets of each depth, and the leaves that get gradients.

    Depths 0 and 2 share a projection, and depth 1 has a bias. As under autocast, states are in
    `dtype` and weights in at least float32.
    """
    torch.manual_seed(3)
    precise = torch.promote_types(dtype, torch.float32)
    values = [drawn(ROWS, WIDTH) for _ in range(DEPTH)]
    shared, own, bias = drawn(VOCAB, WIDTH, scale=0.5), drawn(VOCAB, WIDTH, scale=0.5), drawn(VOCAB)
    states = [value.to(device, dtype).requires_grad_() for value in values]
    weights = [value.to(device, precise).requires_grad_() for value in (shared, own, bias)]
    base_weight = drawn(VOCAB, WIDTH, scale=0.5).to(device, precise)

    def targets() -> Targets:
        labels = torch.randint(VOCAB, (ROWS,))
        labels[torch.rand(ROWS) < 0.2] = -1
        hidden = drawn(ROWS, WIDTH).to(device, precise)
        return Targets(labels.to(device), hidden, lambda rows: rows @ base_weight.T)

    each = [targets() for _ in range(DEPTH)] if own_targets else [targets()] * DEPTH
    projections: Any = [(weights[0], None), (weights[1], weights[2]), (weights[0], None)]
    return (states, projections, each[0]), each, [*states, *weights]


def assert_close(found: Tensor, wanted: Tensor, share: float) -> None:
    found, wanted = (values.detach().double().cpu() for values in (found, wanted))
    assert (found - wanted).norm() <= share * wanted.norm()


def assert_same(
    loss: DepthLoss, leaves: list[Tensor], dense: Tensor, precise: list[Tensor], share: float
) -> None:
    assert_close(loss.total, dense, share)
    ours = torch.autograd.grad(loss.total, leaves)
    theirs = torch.autograd.grad(dense, precise)
    for one, other, leaf in zip(ours, theirs, leaves, strict=True):
        assert one.dtype == leaf.dtype
        assert one.device == leaf.device
        assert_close(one, other, share)


def fused(found: tuple[Problem, list[Targets], list[Tensor]], **settings: Any) -> DepthLoss:
    (states, projections, _), each, _ = found
    return depth_loss(states, projections, each, depth_weights=WEIGHTS, **settings)


def assert_dense(
    kind: str, device: torch.device, dtype: torch.dtype, weighting: str, chunk_rows: int | None
) -> None:
    dpace = weighting == "dpace"
    found = problem(device, dtype, own_targets=dpace)
    precise = problem(torch.device("cpu"), torch.float64, own_targets=dpace)
    loss = fused(found, kind=kind, weighting=weighting, chunk_rows=chunk_rows)
    dense = dense_loss(kind, precise[0], WEIGHTS, precise[1], dpace=dpace)
    assert_same(loss, found[2], dense, precise[2], tolerance(kind, dtype))
    assert loss.total.device == device
    assert loss.total.dtype == torch.float32


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_in_chunks_has_the_value_and_gradients_of_the_dense_one(
    kind: str, dtype: torch.dtype, device: torch.device
) -> None:
    assert_dense(kind, device, dtype, "geometric", chunk_rows=40)


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["cross_entropy", "kl", "lk"])
def test_dpace_weights_rows_as_the_dense_loss_does(
    kind: str, dtype: torch.dtype, device: torch.device
) -> None:
    assert_dense(kind, device, dtype, "dpace", chunk_rows=40)


@pytest.mark.parametrize("kind", KINDS)
def test_distributions_without_overlap_have_finite_losses_and_gradients(
    kind: str, device: torch.device
) -> None:
    logits = torch.tensor([[900.0, -900.0, 0.0]], device=device, requires_grad=True)
    base_logits = torch.tensor([[-torch.inf, 3.0, 0.0]], device=device)
    targets = Targets(torch.tensor([0], device=device), base_logits, lambda rows: rows)
    loss = depth_loss([logits], [(torch.eye(3, device=device), None)], targets, kind=kind).total
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss.isfinite()
    assert gradient.isfinite().all()

"""Losses in chunks on a device have the values and gradients of dense ones in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from specheads.training.depth_loss import Targets, depth_loss
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


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kind", "weighting"),
    [*((kind, "geometric") for kind in KINDS), *((kind, "dpace") for kind in ("kl", "lk"))],
)
@pytest.mark.parametrize("chunk_rows", [40, None])
def test_a_loss_in_chunks_has_the_value_and_gradients_of_the_dense_one(
    kind: str, weighting: str, dtype: torch.dtype, chunk_rows: int | None, device: torch.device
) -> None:
    own = weighting == "dpace"
    (states, projections, _), each, leaves = problem(device, dtype, own_targets=own)
    precise = problem(torch.device("cpu"), torch.float64, own_targets=own)
    how = {"kind": kind, "weighting": weighting, "chunk_rows": chunk_rows}
    loss = depth_loss(states, projections, each, depth_weights=WEIGHTS, **how)
    dense = dense_loss(kind, precise[0], WEIGHTS, precise[1], dpace=own)
    assert (loss.total.device, loss.total.dtype) == (device, torch.float32)
    share = tolerance(kind, dtype)
    assert_close(loss.total, dense, share)
    ours = torch.autograd.grad(loss.total, leaves)
    theirs = torch.autograd.grad(dense, precise[2])
    for one, other, leaf in zip(ours, theirs, leaves, strict=True):
        assert (one.dtype, one.device) == (leaf.dtype, leaf.device)
        assert_close(one, other, share)


@pytest.mark.parametrize("kind", KINDS)
def test_distributions_without_overlap_have_finite_losses_and_gradients(kind, device):
    logits = torch.tensor([[900.0, -900.0, 0.0]], device=device, requires_grad=True)
    base_logits = torch.tensor([[-torch.inf, 3.0, 0.0]], device=device)
    targets = Targets(torch.tensor([0], device=device), base_logits, lambda rows: rows)
    loss = depth_loss([logits], [(torch.eye(3, device=device), None)], targets, kind=kind).total
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss.isfinite()
    assert gradient.isfinite().all()

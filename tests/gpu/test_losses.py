"""Losses in chunks on a device have the values and gradients of dense ones in float64."""

import pytest
import torch
from torch import Tensor

from specheads.training.depth_loss import depth_loss
from specheads.training.losses import LOSSES
from tests.training.test_losses import dense_loss, problem_of

pytestmark = pytest.mark.gpu

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
    (states, projections, shared), each, leaves = problem_of(dtype=dtype, device=device)
    precise, precise_each, precise_leaves = problem_of()
    how = {"kind": kind, "weighting": weighting, "chunk_rows": chunk_rows}
    loss = depth_loss(states, projections, each if own else shared, depth_weights=WEIGHTS, **how)
    dense = dense_loss(kind, precise, WEIGHTS, precise_each if own else None, dpace=own)
    assert (loss.total.device, loss.total.dtype) == (device, torch.float32)
    share = tolerance(kind, dtype)
    assert_close(loss.total, dense, share)
    ours = torch.autograd.grad(loss.total, leaves)
    theirs = torch.autograd.grad(dense, precise_leaves)
    for one, other, leaf in zip(ours, theirs, leaves, strict=True):
        assert (one.dtype, one.device) == (leaf.dtype, leaf.device)
        assert_close(one, other, share)

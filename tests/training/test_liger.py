"""liger-kernel computes hard labels on CUDA and equals the chunked loss."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from specheads.training.losses import liger
from specheads.training.losses.depth_loss import Targets, depth_loss

ROWS, VOCAB, WIDTH, DEPTH = 17, 29, 8, 2


def _problem(device: str, dtype: torch.dtype, *, tied: bool = False) -> tuple[Any, list[Tensor]]:
    how: dict[str, Any] = {"device": device, "dtype": dtype}
    states = [torch.randn(ROWS, WIDTH, **how).requires_grad_() for _ in range(DEPTH)]
    weights = [torch.randn(VOCAB, WIDTH, **how).requires_grad_() for _ in range(DEPTH)]
    projections = [(weights[0 if tied else level], None) for level in range(DEPTH)]
    labels = torch.randint(VOCAB, (ROWS,), device=device)
    labels[3] = -1
    targets = Targets(labels, states[0].detach(), None)
    return (states, projections, targets), [*states, *weights[: 1 if tied else DEPTH]]


class _Fake:
    """Plain torch version of liger-kernel 0.8.5's function."""

    calls = 0

    @classmethod
    def apply(cls, *given: Any) -> tuple[Tensor, None, Tensor, None]:
        state, weight, labels, bias, class_weights, ignored, z_scale, smoothing, *rest = given
        assert (class_weights, z_scale, smoothing) == (None, 0.0, 0.0)
        assert rest == ["sum", None, False, None, False, True]
        cls.calls += 1
        logits = F.linear(state, weight, bias)
        total = F.cross_entropy(logits, labels, ignore_index=ignored, reduction="sum")
        counted = labels != ignored
        return total, None, (logits.argmax(-1) == labels)[counted].float().mean(), None


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("liger_kernel")
    package.__spec__ = ModuleSpec("liger_kernel", None)
    ops = SimpleNamespace(LigerFusedLinearCrossEntropyFunction=_Fake)
    monkeypatch.setitem(sys.modules, "liger_kernel", package)
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", ops)
    monkeypatch.setattr(liger, "DEVICE", "cpu")
    monkeypatch.setattr(_Fake, "calls", 0)


def _agree(problem: Any, leaves: list[Tensor], monkeypatch: pytest.MonkeyPatch, tol: float) -> None:
    by_liger = depth_loss(*problem, kind="cross_entropy", decay=0.5)
    with monkeypatch.context() as without:
        without.setattr(liger, "fits", lambda *_: False)
        ours = depth_loss(*problem, kind="cross_entropy", decay=0.5)
    for name in ("total", "by_depth", "agreement"):
        one, other = (getattr(loss, name).float() for loss in (by_liger, ours))
        torch.testing.assert_close(one, other, rtol=tol, atol=tol)
    gradients = [torch.autograd.grad(loss.total, leaves) for loss in (by_liger, ours)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=tol, atol=tol)


@pytest.mark.usefixtures("_installed")
def test_hard_labels_use_liger_if_installed(monkeypatch: pytest.MonkeyPatch):
    _agree(*_problem("cpu", torch.float32), monkeypatch, 1e-5)
    assert _Fake.calls == DEPTH


@pytest.mark.usefixtures("_installed")
def test_unsupported_losses_do_not_use_liger():
    tied, _ = _problem("cpu", torch.float32, tied=True)
    depth_loss(*tied, kind="cross_entropy")
    untied, _ = _problem("cpu", torch.float32)
    depth_loss(*untied, kind="cross_entropy", weighting="dpace")
    states, projections, targets = untied
    soft = Targets(
        targets.labels, targets.base_hidden, lambda rows: rows @ rows.new_ones(WIDTH, VOCAB)
    )
    depth_loss(states, projections, soft, kind="kl")
    half = [state.detach().bfloat16() for state in states]
    depth_loss(half, projections, targets, kind="cross_entropy")
    assert _Fake.calls == 0


def test_chunked_loss_without_liger_or_cuda():
    (states, projections, _), _ = _problem("cpu", torch.float32)
    assert not liger.fits("cross_entropy", states, projections)

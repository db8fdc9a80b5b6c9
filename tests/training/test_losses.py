"""The fused loss equals the dense loss: values and gradients, for every loss."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from specheads.config.training import Phase
from specheads.training.depth_loss import (
    ABSENT,
    BLOCK_LOGITS,
    DepthLoss,
    Targets,
    depth_loss,
)
from specheads.training.losses import LOSSES, Needs, RowLosses, loss_of_phase, row_loss
from tests import tiny

ROWS, VOCAB, WIDTH, DEPTH = 150, 61, 16, 3
NAMES = sorted(LOSSES)
Problem = tuple[list[Tensor], list[tuple[Tensor, Tensor | None]], Targets]


def problem_of(
    num_rows: int = ROWS, dtype: torch.dtype = torch.float64, device: torch.device = tiny.CPU
) -> tuple[Problem, list[Targets], list[Tensor]]:
    """Return a problem with shared targets, targets of each depth, and the leaves.

    Depths 0 and 2 share a projection, and depth 1 has a bias. bfloat16 holds all numbers exactly,
    so every dtype has the same problem. As under autocast, weights are in at least float32.
    """
    torch.manual_seed(3)
    precise = torch.promote_types(dtype, torch.float32)

    def drawn(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*shape)).bfloat16().to(device, precise)

    states = [drawn(num_rows, WIDTH).to(dtype).requires_grad_() for _ in range(DEPTH)]
    shared_weight, own_weight = (drawn(VOCAB, WIDTH, scale=0.5).requires_grad_() for _ in range(2))
    bias, base_weight = drawn(VOCAB).requires_grad_(), drawn(VOCAB, WIDTH, scale=0.5)

    def targets() -> Targets:
        labels = torch.randint(VOCAB, (num_rows,))
        # excluded rows do not count
        labels[torch.rand(num_rows) < 0.2] = -1
        return Targets(labels.to(device), drawn(num_rows, WIDTH), lambda rows: rows @ base_weight.T)

    targets_of_depths = [targets() for _ in range(DEPTH)]
    projections: Any = [(shared_weight, None), (own_weight, bias), (shared_weight, None)]
    return (
        (states, projections, targets_of_depths[0]),
        targets_of_depths,
        [*states, shared_weight, own_weight, bias],
    )


def _dense_rows(name: str, logits: Tensor, base_logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss per row from the formula, with autograd."""
    log_draft, log_base = logits.log_softmax(-1), base_logits.log_softmax(-1)
    draft, base = log_draft.exp(), log_base.exp()
    divergence = (base * (log_base - log_draft)).sum(-1)
    acceptance = torch.minimum(draft, base).sum(-1)
    trust = torch.exp(-3.0 * acceptance.detach())
    return {
        "cross_entropy": -log_draft.gather(-1, labels[:, None])[:, 0],
        "soft_cross_entropy": -(base * log_draft).sum(-1),
        "total_variation": 0.5 * (draft - base).abs().sum(-1),
        "cross_entropy_l1": -0.1 * log_draft.gather(-1, labels[:, None])[:, 0]
        + 0.9 * (draft - base).abs().sum(-1),
        "lk": -acceptance.log(),
        "lk_hybrid": trust * divergence + (1 - trust) * (1 - acceptance),
    }[name]


def dense_loss(
    name: str,
    problem: Problem,
    weights: Sequence[float] = (1.0, 1.0, 1.0),
    targets: Sequence[Targets] | None = None,
) -> Tensor:
    states, projections, shared = problem
    means = []
    for (weight, bias), state, target in zip(
        projections, states, targets or [shared] * DEPTH, strict=True
    ):
        base_logits = target.project(target.base_hidden)
        logits = F.linear(state, weight, bias)
        has_label = (target.labels >= 0).double()
        losses = _dense_rows(name, logits, base_logits, target.labels.clamp(min=0))
        means.append((losses * has_label).sum() / has_label.sum().clamp(min=1))
    return sum((w * mean for w, mean in zip(weights, means, strict=True)), torch.zeros(()))


def fused_loss(name: str, *problem: Any, **settings: Any) -> DepthLoss:
    return depth_loss(*problem, loss=loss_of_phase(Phase(loss=name)), **settings)


def _assert_same(fused: Tensor, dense: Tensor, leaves: list[Tensor]) -> None:
    torch.testing.assert_close(fused, dense, rtol=1e-12, atol=1e-12)
    # times three: the upstream gradient must reach every gradient
    gradients = torch.autograd.grad(3 * fused, leaves)
    expected_gradients = torch.autograd.grad(3 * dense, leaves, allow_unused=True)
    for leaf, gradient, expected in zip(leaves, gradients, expected_gradients, strict=True):
        expected = torch.zeros_like(leaf) if expected is None else expected
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk_rows", [7, 50, 200, None])
@pytest.mark.parametrize("is_shared", [True, False], ids=["shared targets", "targets by depth"])
def test_value_and_gradients_equal_the_dense_loss(name, chunk_rows, is_shared, monkeypatch):
    # several blocks in a chunk
    monkeypatch.setitem(BLOCK_LOGITS, "cpu", 4 * VOCAB)
    (states, projections, shared), targets, leaves = problem_of()
    problem = states, projections, shared if is_shared else targets
    for weights in ((1.0, 0.8, 0.64), (0.3, 0.0, 2.0)):
        fused = fused_loss(name, *problem, weights=weights, chunk_rows=chunk_rows)
        by_depth = None if is_shared else targets
        dense = dense_loss(name, (states, projections, shared), weights, by_depth)
        _assert_same(fused.total, dense, leaves)


def test_labels_shifted_by_one_are_caught():
    problem, _, leaves = problem_of()
    labels = problem[2].labels.roll(1)
    shifted = Targets(labels, problem[2].base_hidden, problem[2].project)
    fused = fused_loss("cross_entropy", *problem[:2], shifted)
    with pytest.raises(AssertionError, match="not close"):
        _assert_same(fused.total, dense_loss("cross_entropy", problem), leaves)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("label", [-1, ABSENT])
@pytest.mark.parametrize("num_rows", [0, 5])
def test_batch_without_labels_has_zero_loss_and_gradient(name: str, label: int, num_rows: int):
    (states, projections, targets), _, leaves = problem_of(num_rows)
    labels = torch.full((num_rows,), label, dtype=torch.long)
    fused = fused_loss(
        name, states, projections, Targets(labels, targets.base_hidden, targets.project)
    )
    assert fused.total.item() == 0.0
    assert fused.by_depth.tolist() == fused.agreement.tolist() == [0.0] * DEPTH
    for gradient in torch.autograd.grad(fused.total, leaves):
        assert not gradient.any()


def test_a_loss_reads_its_parameters_from_the_phase():
    (logits, base) = _log(0.25, 0.25, 0.5), _log(0.5, 0.25, 0.25)
    losses = [
        _one_row("lk_hybrid", logits, base, phase=Phase(lk_eta=eta))[0] for eta in (1e-9, 50.0)
    ]
    # KL(p || q) and the total variation
    assert losses == pytest.approx([0.17328679513998632, 0.25], abs=1e-7)


@pytest.mark.parametrize(
    ("needs", "fields"),
    [
        (Needs.LABELS, set()),
        (Needs.PROBS, {"probs"}),
        (Needs.LOG_PROBS, {"log_probs"}),
        (Needs.PROBS | Needs.LOG_PROBS | Needs.ENTROPY, {"probs", "log_probs", "entropy"}),
    ],
)
def test_a_new_loss_gets_what_it_needs(needs: Needs, fields: set[str], monkeypatch):
    monkeypatch.setattr("specheads.training.losses.LOSSES", {})
    received = []

    @row_loss(needs)
    def new_loss(log_draft: Tensor, base: Any) -> RowLosses:
        names = ("probs", "log_probs", "entropy")
        received.append({name for name in names if getattr(base, name) is not None})
        log_draft.zero_()
        return log_draft[:, 0].clone()

    problem, _, _ = problem_of()
    depth_loss(*problem, loss=loss_of_phase(Phase(loss="new_loss")))
    assert received[0] == fields


def test_agreement_is_the_share_of_equal_argmax():
    #  base chooses  0 1 2 2      the draft says 0 1 2 0 at depth 0: three of four
    eye = torch.eye(3)
    base_hidden = eye[[0, 1, 2, 2]]
    targets = Targets(torch.zeros(4, dtype=torch.long), base_hidden, lambda rows: rows @ eye)
    states = [eye[[0, 1, 2, 0]], eye[[1, 2, 0, 2]]]
    loss = depth_loss(states, [(eye, None), (eye, None)], targets)
    assert loss.agreement.tolist() == [0.75, 0.25]


def _one_row(
    name: str,
    draft: list[float],
    base: list[float],
    dtype: torch.dtype = torch.float64,
    phase: Phase | None = None,
) -> tuple[float, Tensor]:
    """Return the loss and its gradient for given logits of one row with label 0."""
    logits = torch.tensor([draft], dtype=dtype, requires_grad=True)
    targets = Targets(torch.tensor([0]), torch.tensor([base], dtype=dtype), lambda rows: rows)
    eye = torch.eye(len(draft), dtype=dtype)
    loss = loss_of_phase(replace(phase or Phase(), loss=name))
    total = depth_loss([logits], [(eye, None)], targets, loss=loss).total
    (slope,) = torch.autograd.grad(total, logits)
    return total.item(), slope[0]


def _log(*probs: float) -> list[float]:
    return torch.tensor(probs, dtype=torch.float64).log().tolist()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        # base 1/2 1/4 1/4, draft 1/4 1/4 1/2: they share 1/4 + 1/4 + 1/4
        ("cross_entropy", 1.3862943611198906),  # log 4
        ("soft_cross_entropy", 1.2130075659799042),  # 7/4 log 2
        ("total_variation", 0.25),
        ("cross_entropy_l1", 0.5886294361119891),  # 0.1 log 4 + 0.9 / 2
        ("lk", 0.2876820724517809),  # log 4/3
        ("lk_hybrid", 0.24191448769409912),
    ],
)
def test_losses_of_three_tokens_by_hand(name: str, value: float):
    loss, _ = _one_row(name, _log(0.25, 0.25, 0.5), _log(0.5, 0.25, 0.25))
    assert loss == pytest.approx(value, abs=1e-10)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "base",
    [[0.0, 900.0, 0.0], [-torch.inf, 3.0, 0.0], [-torch.inf, 3.0, -torch.inf]],
    ids=["disjoint", "one ruled out", "one left"],
)
def test_disjoint_distributions_have_finite_losses_and_gradients(name, dtype, base):
    value, slope = _one_row(name, [900.0, -900.0, 0.0], base, dtype)
    assert torch.tensor(value).isfinite()
    assert slope.isfinite().all()


def test_at_most_one_chunk_of_logits_is_alive(monkeypatch: pytest.MonkeyPatch):
    sizes = []
    linear = F.linear

    def watched(*arguments):
        out = linear(*arguments)
        sizes.append(out.numel())
        return out

    monkeypatch.setattr(F, "linear", watched)
    problem, _, _ = problem_of()
    depth_loss(*problem, chunk_rows=5).total.backward()
    assert max(sizes) == 5 * VOCAB


def test_products_in_bfloat16_keep_losses_and_shared_gradients_in_float32():
    problem, _, _ = problem_of()
    states = [state.detach().bfloat16().requires_grad_() for state in problem[0]]
    weight = problem[1][0][0].detach().float().requires_grad_()
    targets = Targets(problem[2].labels, problem[2].base_hidden.float(), problem[2].project)
    loss = fused_loss("cross_entropy", states, [(weight, None)] * DEPTH, targets)
    loss.total.backward()
    assert loss.total.dtype == torch.float32
    assert states[0].grad is not None
    assert weight.grad is not None
    assert (states[0].grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.float32)
    exact = [
        F.cross_entropy(state.float() @ weight.T, targets.labels, ignore_index=-1)
        for state in states
    ]
    assert loss.total.item() == pytest.approx(torch.stack(exact).sum().item(), rel=0.02)

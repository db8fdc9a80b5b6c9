"""The fused loss equals the dense loss: values and gradients, for every loss."""

import dataclasses
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from specheads.config.training import LENGTH_LOSSES, WEIGHTINGS
from specheads.training.depth_loss import (
    ABSENT,
    BLOCK_LOGITS,
    CHAIN_WEIGHTS,
    Targets,
    depth_loss,
)
from specheads.training.losses import LOSSES
from tests import tiny

ROWS, VOCAB, WIDTH, DEPTH = 150, 61, 16, 3
KINDS = sorted(LOSSES)
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
    shared, own = (drawn(VOCAB, WIDTH, scale=0.5).requires_grad_() for _ in range(2))
    bias, base_weight = drawn(VOCAB).requires_grad_(), drawn(VOCAB, WIDTH, scale=0.5)

    def targets() -> Targets:
        labels = torch.randint(VOCAB, (num_rows,))
        # excluded rows do not count
        labels[torch.rand(num_rows) < 0.2] = -1
        return Targets(labels.to(device), drawn(num_rows, WIDTH), lambda rows: rows @ base_weight.T)

    each = [targets() for _ in range(DEPTH)]
    projections: Any = [(shared, None), (own, bias), (shared, None)]
    return (states, projections, each[0]), each, [*states, shared, own, bias]


def _dense_rows(kind: str, logits: Tensor, base_logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss per row from the formula, with autograd."""
    log_draft, log_base = logits.log_softmax(-1), base_logits.log_softmax(-1)
    draft, base = log_draft.exp(), log_base.exp()
    divergence = (base * (log_base - log_draft)).sum(-1)
    acceptance = torch.minimum(draft, base).sum(-1)
    trust = torch.exp(-3.0 * acceptance.detach())
    return {
        "cross_entropy": -log_draft.gather(-1, labels[:, None])[:, 0],
        "argmax_cross_entropy": -log_draft.gather(-1, base.argmax(-1)[:, None])[:, 0],
        "soft_cross_entropy": -(base * log_draft).sum(-1),
        "kl": divergence,
        "reverse_kl": (draft * (log_draft - log_base)).sum(-1),
        "total_variation": 0.5 * (draft - base).abs().sum(-1),
        "cross_entropy_l1": -0.1 * log_draft.gather(-1, labels[:, None])[:, 0]
        + 0.9 * (draft - base).abs().sum(-1),
        "lk": -acceptance.log(),
        "lk_hybrid": trust * divergence + (1 - trust) * (1 - acceptance),
    }[kind]


def dense_loss(
    kind: str,
    problem: Problem,
    weights: Sequence[float] = (1.0, 1.0, 1.0),
    targets: Sequence[Targets] | None = None,
    *,
    weighting: str = "geometric",
) -> Tensor:
    states, projections, shared = problem
    rows, accepted = [], []
    counted = []
    for (weight, bias), state, target in zip(
        projections, states, targets or [shared] * DEPTH, strict=True
    ):
        base_logits = target.project(target.base_hidden)
        logits = F.linear(state, weight, bias)
        labels = target.labels.clamp(min=0)
        known = base_logits.argmax(-1) if kind == "argmax_cross_entropy" else labels
        counted.append((target.labels >= 0).double())
        rows.append(_dense_rows(kind, logits, base_logits, labels))
        draft = logits.softmax(-1)
        rate = draft.gather(-1, known[:, None])[:, 0]
        if kind in ("lk", "total_variation") and weighting != "dpace":
            rate = torch.minimum(draft, base_logits.softmax(-1)).sum(-1)
        accepted.append(rate * counted[-1])
    if weighting == "accepted_length":
        return -_expected_length(torch.stack(accepted)).sum() / counted[0].sum().clamp(min=1)
    chances, factors = torch.stack(accepted).detach(), [torch.ones_like(row) for row in rows]
    if weighting == "dpace":
        smooth = 0.5 + 0.5 * chances
        factors = [
            torch.stack([smooth[: m + 1].prod(0) for m in range(j, DEPTH)]).sum(0)
            for j in range(DEPTH)
        ]
    if weighting == "first_error":
        factors = [chances[:j].prod(0) for j in range(DEPTH)]
    means = [counted[0] if weighting == "first_error" else count for count in counted]
    by_depth = [
        weight * (row * factor * count).sum() / mean.sum().clamp(min=1)
        for weight, row, factor, count, mean in zip(
            weights, rows, factors, counted, means, strict=True
        )
    ]
    return torch.stack(by_depth).sum()


def _expected_length(accepted: Tensor) -> Tensor:
    """Return the mean over all outcomes of how many drafts come before the first rejected one."""
    total = torch.zeros_like(accepted[0])
    for outcome in product((True, False), repeat=len(accepted)):
        chance = torch.ones_like(total)
        for rate, is_accepted in zip(accepted, outcome, strict=True):
            chance = chance * (rate if is_accepted else 1 - rate)
        total = total + chance * [*outcome, False].index(False)
    return total


def _assert_same(fused: Tensor, dense: Tensor, leaves: list[Tensor]) -> None:
    torch.testing.assert_close(fused, dense, rtol=1e-12, atol=1e-12)
    # times three: the upstream gradient must reach every gradient
    ours = torch.autograd.grad(3 * fused, leaves)
    theirs = torch.autograd.grad(3 * dense, leaves, allow_unused=True)
    for leaf, one, other in zip(leaves, ours, theirs, strict=True):
        other = torch.zeros_like(leaf) if other is None else other
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


CHAINED = [
    (kind, weighting)
    for kind, weighting in product(KINDS, CHAIN_WEIGHTS)
    if weighting != "accepted_length" or kind in LENGTH_LOSSES
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk_rows", [7, 50, 200, None])
def test_value_and_gradients_equal_the_dense_loss(kind, chunk_rows, monkeypatch):
    # several blocks in a chunk
    monkeypatch.setitem(BLOCK_LOGITS, "cpu", 4 * VOCAB)
    problem, _, leaves = problem_of()
    own = (0.3, 0.0, 2.0)
    cases: list[Any] = [((1.0, 0.8, 0.64), {"decay": 0.8}), (own, {"depth_weights": own})]
    for weights, given in cases:
        fused = depth_loss(*problem, kind=kind, chunk_rows=chunk_rows, **given)
        _assert_same(fused.total, dense_loss(kind, problem, weights), leaves)


@pytest.mark.parametrize(("kind", "weighting"), CHAINED)
@pytest.mark.parametrize("chunk_rows", [7, 50, None])
def test_chain_weightings_equal_autograd_of_the_dense_loss(
    kind, weighting, chunk_rows, monkeypatch
):
    monkeypatch.setitem(BLOCK_LOGITS, "cpu", 4 * VOCAB)
    problem, each, leaves = problem_of()
    fused = depth_loss(*problem[:2], each, kind=kind, weighting=weighting, chunk_rows=chunk_rows)
    _assert_same(fused.total, dense_loss(kind, problem, targets=each, weighting=weighting), leaves)


@pytest.mark.parametrize(("kind", "weighting"), CHAINED)
@pytest.mark.parametrize("chunk_rows", [7, None])
def test_chains_that_end_early_equal_shallower_chains(kind: str, weighting: str, chunk_rows):
    (states, projections, _), each, leaves = problem_of()
    lengths = torch.arange(len(states[0])) % DEPTH + 1
    counts = [((one.labels >= 0) & (lengths > k)).sum() for k, one in enumerate(each)]
    ended = [
        dataclasses.replace(one, labels=one.labels.where(lengths > k, ABSENT))
        for k, one in enumerate(each)
    ]
    how = {"kind": kind, "weighting": weighting, "chunk_rows": chunk_rows}
    whole, parts = depth_loss(states, projections, ended, **how), torch.zeros(())
    for depth in range(1, DEPTH + 1):
        rows = lengths == depth
        own = [
            Targets(one.labels[rows], one.base_hidden[rows], one.project, count)
            for one, count in zip(each[:depth], counts, strict=False)
        ]
        shallow = [state[rows] for state in states[:depth]]
        parts = parts + depth_loss(shallow, projections[:depth], own, **how).total
    _assert_same(whole.total, parts, leaves)


@pytest.mark.parametrize("fault", ["labels shifted by one", "weights of the wrong level"])
@pytest.mark.parametrize("weighting", CHAIN_WEIGHTS)
def test_planted_faults_are_caught(fault: str, weighting: str, monkeypatch: pytest.MonkeyPatch):
    problem, each, leaves = problem_of()
    dense = dense_loss("cross_entropy", problem, targets=each, weighting=weighting)
    if fault == "labels shifted by one":
        each = [dataclasses.replace(one, labels=one.labels.roll(1)) for one in each]
    else:
        right = CHAIN_WEIGHTS[weighting]
        monkeypatch.setitem(CHAIN_WEIGHTS, weighting, lambda rates: right(rates).roll(1, 0))
    fused = depth_loss(*problem[:2], each, kind="cross_entropy", weighting=weighting)
    with pytest.raises(AssertionError, match="not close"):
        _assert_same(fused.total, dense, leaves)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("num_rows", [0, 5])
def test_batch_without_labels_has_zero_loss_and_gradient(kind: str, weighting: str, num_rows: int):
    (states, projections, targets), _, leaves = problem_of(num_rows)
    none = Targets(
        torch.full((num_rows,), -1, dtype=torch.long), targets.base_hidden, targets.project
    )
    fused = depth_loss(states, projections, none, kind=kind, weighting=weighting)
    assert fused.total.item() == 0.0
    assert fused.by_depth.tolist() == fused.agreement.tolist() == [0.0] * DEPTH
    for gradient in torch.autograd.grad(fused.total, leaves):
        assert not gradient.any()


def test_second_backward_is_refused():
    problem, _, leaves = problem_of()
    total = depth_loss(*problem).total
    torch.autograd.grad(total, leaves, retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward"):
        torch.autograd.grad(total, leaves)


def test_agreement_is_the_share_of_equal_argmax():
    #  base chooses  0 1 2 2      the draft says 0 1 2 0 at depth 0: three of four
    eye = torch.eye(3)
    base_hidden = eye[[0, 1, 2, 2]]
    targets = Targets(torch.zeros(4, dtype=torch.long), base_hidden, lambda rows: rows @ eye)
    states = [eye[[0, 1, 2, 0]], eye[[1, 2, 0, 2]]]
    found = depth_loss(states, [(eye, None), (eye, None)], targets)
    assert found.agreement.tolist() == [0.75, 0.25]


def _one_row(
    kind: str, draft: list[float], base: list[float], dtype: torch.dtype = torch.float64
) -> tuple[float, Tensor]:
    """Return the loss and its gradient for given logits of one row with label 0."""
    logits = torch.tensor([draft], dtype=dtype, requires_grad=True)
    targets = Targets(torch.tensor([0]), torch.tensor([base], dtype=dtype), lambda rows: rows)
    eye = torch.eye(len(draft), dtype=dtype)
    total = depth_loss([logits], [(eye, None)], targets, kind=kind).total
    (slope,) = torch.autograd.grad(total, logits)
    return total.item(), slope[0]


def _log(*probs: float) -> list[float]:
    return torch.tensor(probs, dtype=torch.float64).log().tolist()


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        # base 1/2 1/4 1/4, draft 1/4 1/4 1/2: they share 1/4 + 1/4 + 1/4
        ("cross_entropy", 1.3862943611198906),  # log 4
        ("argmax_cross_entropy", 1.3862943611198906),
        ("soft_cross_entropy", 1.2130075659799042),  # 7/4 log 2
        ("kl", 0.17328679513998632),  # 1/4 log 2
        ("reverse_kl", 0.17328679513998632),
        ("total_variation", 0.25),
        ("cross_entropy_l1", 0.5886294361119891),  # 0.1 log 4 + 0.9 / 2
        ("lk", 0.2876820724517809),  # log 4/3
        ("lk_hybrid", 0.24191448769409912),
    ],
)
def test_losses_of_three_tokens_by_hand(kind: str, value: float):
    found, _ = _one_row(kind, _log(0.25, 0.25, 0.5), _log(0.5, 0.25, 0.25))
    assert found == pytest.approx(value, abs=1e-10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "base",
    [[0.0, 900.0, 0.0], [-torch.inf, 3.0, 0.0], [-torch.inf, 3.0, -torch.inf]],
    ids=["disjoint", "one ruled out", "one left"],
)
def test_disjoint_distributions_have_finite_losses_and_gradients(kind, dtype, base):
    value, slope = _one_row(kind, [900.0, -900.0, 0.0], base, dtype)
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
    sizes.clear()
    # the slopes of all depths at once are no more than one chunk
    depth_loss(*problem, chunk_rows=6, weighting="dpace").total.backward()
    assert max(sizes) == 6 // DEPTH * VOCAB


def test_products_in_bfloat16_keep_losses_and_shared_gradients_in_float32():
    problem, _, _ = problem_of()
    states = [state.detach().bfloat16().requires_grad_() for state in problem[0]]
    weight = problem[1][0][0].detach().float().requires_grad_()
    targets = Targets(problem[2].labels, problem[2].base_hidden.float(), problem[2].project)
    found = depth_loss(states, [(weight, None)] * DEPTH, targets, kind="cross_entropy")
    found.total.backward()
    assert found.total.dtype == torch.float32
    assert states[0].grad is not None
    assert weight.grad is not None
    assert (states[0].grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.float32)
    exact = [
        F.cross_entropy(state.float() @ weight.T, targets.labels, ignore_index=-1)
        for state in states
    ]
    assert found.total.item() == pytest.approx(torch.stack(exact).sum().item(), rel=0.02)

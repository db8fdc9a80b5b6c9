"""Losses of drafted depths, fused with the vocabulary projection.

One chunk of rows at a time goes through the projection, gives its loss and its gradients, and
is forgotten, so that neither (depth, row, vocab) nor (row, vocab) is ever held. The base's own
law is projected from its hidden states in the same chunk, once for all depths.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

RowLoss = Callable[[Tensor, Tensor | None, Tensor], Tensor]
"""(draft logits, base logits or None, labels) of a chunk -> one loss a row."""


def cross_entropy(
    draft_logits: Float[Tensor, "row vocab"],
    base_logits: Float[Tensor, "row vocab"] | None,
    labels: Int[Tensor, " row"],
) -> Float[Tensor, " row"]:
    """Return the surprise of the text's own next token, in nats."""
    del base_logits
    return F.cross_entropy(draft_logits, labels, reduction="none")


def soft_cross_entropy(
    draft_logits: Float[Tensor, "row vocab"],
    base_logits: Float[Tensor, "row vocab"] | None,
    labels: Int[Tensor, " row"],
) -> Float[Tensor, " row"]:
    """Return the cross-entropy to the base's whole law: its KL divergence plus a constant.

    Source: Ankner et al. 2024, arXiv:2402.05109, the teacher loss of Hydra++.
    """
    del labels
    assert base_logits is not None
    return F.cross_entropy(draft_logits, base_logits.softmax(-1), reduction="none")


def argmax_cross_entropy(
    draft_logits: Float[Tensor, "row vocab"],
    base_logits: Float[Tensor, "row vocab"] | None,
    labels: Int[Tensor, " row"],
) -> Float[Tensor, " row"]:
    """Return the surprise of the token the base itself would choose at temperature zero."""
    del labels
    assert base_logits is not None
    return F.cross_entropy(draft_logits, base_logits.argmax(-1), reduction="none")


LABELS_ONLY = ("cross_entropy",)
"""Kinds that need no law of the base."""

KINDS: dict[str, RowLoss] = {
    "cross_entropy": cross_entropy,
    "soft_cross_entropy": soft_cross_entropy,
    "argmax_cross_entropy": argmax_cross_entropy,
}
"""Losses by the name that configurations give them."""


@dataclass(frozen=True, slots=True)
class Targets:
    """What the drafted depths should predict, one row for each counted position.

    Row r is the same label for every depth: the k-th depth predicts it from one position
    earlier than the depth before.
    """

    labels: Int[Tensor, " row"]
    """The text's own token."""
    base_hidden: Float[Tensor, "row width"]
    """The base's final hidden state one position before the label."""
    project: Callable[[Tensor], Tensor] | None
    """Turns those states into the base's own logits; None where the loss reads only labels,
    which then stand for the base's choice as well."""


@dataclass(frozen=True, slots=True)
class DepthLoss:
    """The loss of all depths together, and what to log of each."""

    total: Float[Tensor, ""]
    """Weighted sum over depths of the mean over rows; carries the gradients."""
    by_depth: Float[Tensor, " depth"]
    """Mean loss of each depth, unweighted."""
    agreement: Float[Tensor, " depth"]
    """Share of rows in which the draft's best token is the base's own best."""


def depth_loss(
    states: Sequence[Float[Tensor, "row width"]],
    projections: Sequence[tuple[Tensor, Tensor | None]],
    targets: Targets,
    *,
    kind: str = "soft_cross_entropy",
    decay: float = 1.0,
    chunk_rows: int = 512,
) -> DepthLoss:
    """Return the loss of the states of every depth, without ever holding all their logits.

    Args:
        states: One for each depth; row r of each stands for the r-th label.
        projections: Weight (vocab, width) and bias of each depth; tied depths repeat them.
        targets: Labels and the base's law.
        kind: One of `KINDS`.
        decay: Weight of each depth relative to the one before it.
        chunk_rows: Rows whose logits are held at once.

    Raises:
        ValueError: The kind is unknown.
    """
    if kind not in KINDS:
        raise ValueError(f"loss must be one of {', '.join(KINDS)}, got {kind!r}")
    plan = _Plan(KINDS[kind], targets, decay, chunk_rows)
    flat = [tensor for pair in projections for tensor in pair]
    total, by_depth, agreement = _FusedDepthLoss.apply(plan, len(states), *states, *flat)
    return DepthLoss(total, by_depth, agreement)


@dataclass(frozen=True, slots=True)
class _Plan:
    row_loss: RowLoss
    targets: Targets
    decay: float
    chunk_rows: int


class _FusedDepthLoss(torch.autograd.Function):
    """Computes gradients in the forward pass, while a chunk's logits are at hand."""

    @staticmethod
    @torch.autocast("cuda", enabled=False)
    @torch.autocast("cpu", enabled=False)
    def forward(ctx: Any, plan: _Plan, depth: int, *tensors: Tensor | None) -> Any:
        sink = _Gradients(depth, tensors, ctx.needs_input_grad[2:])
        states, num_rows = sink.states, len(plan.targets.labels)
        losses = torch.zeros(depth, device=states[0].device, dtype=sink.precision)
        agreed = torch.zeros_like(losses)
        for start in range(0, num_rows, plan.chunk_rows):
            rows = slice(start, start + plan.chunk_rows)
            base_logits = _base_logits(plan.targets, rows, sink.precision)
            best = plan.targets.labels[rows] if base_logits is None else base_logits.argmax(-1)
            for level in range(depth):
                logits = sink.logits(level, rows)
                loss, slope = _slope(plan, logits, base_logits, rows)
                losses[level] += loss
                agreed[level] += (logits.argmax(-1) == best).sum()
                sink.add(level, rows, slope.mul_(plan.decay**level / num_rows))
        ctx.gradients = sink.sums
        scale = 1 / max(num_rows, 1)
        by_depth, agreement = losses * scale, agreed * scale
        decay = plan.decay ** torch.arange(depth, dtype=losses.dtype, device=losses.device)
        ctx.mark_non_differentiable(by_depth, agreement)
        return (by_depth * decay).sum(), by_depth, agreement

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        scaled = (None if grad is None else grad * grad_outputs[0] for grad in ctx.gradients)
        return None, None, *scaled


def _base_logits(targets: Targets, rows: slice, precision: torch.dtype) -> Tensor | None:
    if targets.project is None:
        return None
    return targets.project(targets.base_hidden[rows]).to(precision)


def _slope(
    plan: _Plan, logits: Tensor, base_logits: Tensor | None, rows: slice
) -> tuple[Tensor, Tensor]:
    """Return the chunk's summed loss and its gradient by the logits."""
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        loss = plan.row_loss(leaf, base_logits, plan.targets.labels[rows]).sum()
        (slope,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), slope


class _Gradients:
    """Adds up the gradients of states, weights and biases, of those that are wanted.

    Products run in the states' own precision, as autocast chose it; losses and sums in at
    least float32.
    """

    def __init__(
        self, depth: int, tensors: Sequence[Tensor | None], wanted: Sequence[bool]
    ) -> None:
        self.states = [tensor for tensor in tensors[:depth] if tensor is not None]
        self.precision = torch.promote_types(self.states[0].dtype, torch.float32)
        # a tensor that several depths share gets one gradient, at its first place
        self.place = [
            next(first for first, other in enumerate(tensors) if other is tensor)
            for tensor in tensors
        ]
        self.sums = [
            torch.zeros_like(tensor)
            if want and tensor is not None and self.place[place] == place
            else None
            for place, (tensor, want) in enumerate(zip(tensors, wanted, strict=True))
        ]
        dtype = self.states[0].dtype
        cast = [None if tensor is None else tensor.to(dtype) for tensor in tensors]
        self.weights, self.biases = cast[depth::2], cast[depth + 1 :: 2]

    def logits(self, level: int, rows: slice) -> Tensor:
        weight = self.weights[level]
        assert weight is not None
        return F.linear(self.states[level][rows], weight, self.biases[level]).to(self.precision)

    def add(self, level: int, rows: slice, slope: Tensor) -> None:
        weight, state = self.weights[level], self.states[level][rows]
        assert weight is not None
        slope = slope.to(state.dtype)
        at = len(self.states) + 2 * level
        if (sums := self.sums[level]) is not None:
            sums[rows] = slope @ weight
        if (sums := self.sums[self.place[at]]) is not None:
            sums += slope.T @ state
        if self.biases[level] is not None and (sums := self.sums[self.place[at + 1]]) is not None:
            sums += slope.sum(0)

"""Losses of drafted depths, fused with the vocabulary projection.

One chunk of rows at a time goes through the projection, gives its loss and its gradients, and
is forgotten, so that neither (depth, row, vocab) nor (row, vocab) is ever held. The base's own
distribution is projected from its hidden states in the same chunk, once for all depths that
share it. See docs/losses.md.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch._C._autograd import _get_current_graph_task_keep_graph
from torch.nn import functional as F  # noqa: N812

from specheads.core.errors import InputError
from specheads.training.losses import liger
from specheads.training.losses.gradients import Gradients
from specheads.training.losses.row_losses import KINDS as KINDS
from specheads.training.losses.row_losses import LABELS_ONLY as LABELS_ONLY
from specheads.training.losses.row_losses import BaseRows, best_of, read_base

WEIGHTINGS = ("geometric", "dpace")
"""How depths are weighted against each other: by numbers given, or also by each row's drafts."""

SMOOTHING = 0.5
"""Share of the way by which D-PACE draws a draft's confidence towards one."""

CHUNK_LOGITS = {"cpu": 2**24, "cuda": 2**28}
"""Logits of a chunk: few enough to be small beside the weights, enough for a matrix product.

On a GPU each chunk reads and writes the weight's whole gradient, in float32. At 128k tokens 2**26
logits are 512 rows, whose products take no longer than that; at 2048 rows it is a quarter.
"""

BLOCK_LOGITS = {"cpu": 2**19, "cuda": 2**26}
"""Logits that are worked on at once in float32: what a core's cache holds, or 256 MiB."""

TILE = 128
"""Rows of a chunk or block on a GPU are a multiple of it, where so many are held at once: products
are computed in tiles of as many rows."""


@dataclass(frozen=True, slots=True)
class Targets:
    """What drafted depths should predict, one row for each scored position."""

    labels: Int[Tensor, " row"]
    """The text's own token; -1 leaves the row out."""
    base_hidden: Float[Tensor, "row width"]
    """The base's final hidden state one position before the label."""
    project: Callable[[Tensor], Tensor] | None
    """Turns those states into the base's own logits; None where the loss reads only labels,
    which then stand for the base's choice as well."""
    count: Int[Tensor, ""] | None = None
    """Labels that the mean is over, where these are a part of them; None: these."""


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
    targets: Targets | Sequence[Targets],
    *,
    kind: str = "soft_cross_entropy",
    decay: float = 1.0,
    depth_weights: Sequence[float] = (),
    weighting: str = "geometric",
    chunk_rows: int | None = None,
) -> DepthLoss:
    """Return the loss of the states of every depth, without ever holding all their logits.

    Row r of each state stands for the r-th label. `projections` are weight (vocab, width) and bias
    of each depth; tied depths repeat them. Targets are shared by all depths or one for each.
    `depth_weights` stand in place of decay, the weight of each depth relative to the one before it.
    dpace multiplies by `dpace_weights`; row r of every depth must then be drafted from the same
    position, so that the depths have targets of their own. `chunk_rows` are the rows whose logits
    are held at once; None fits them to the device.
    """
    depth = len(states)
    each = [targets] * depth if isinstance(targets, Targets) else list(targets)
    check_choices(kind, weighting)
    _check(kind, depth_weights, each, depth)
    weights = depth_shares(depth, decay, depth_weights)
    rows = torch.stack(
        [(one.labels >= 0).sum() if one.count is None else one.count for one in each]
    )
    if weighting == "geometric" and liger.fits(kind, states, projections):
        return _by_liger(states, projections, each, weights, rows)
    weight = projections[0][0]
    chunk_rows, block_rows = chunk_rows or rows_of(weight), rows_of(weight, BLOCK_LOGITS)
    learns = torch.is_grad_enabled()
    plan = _Plan(kind, each, weights, rows, weighting == "dpace", chunk_rows, block_rows, learns)
    flat = [tensor for pair in projections for tensor in pair]
    total, by_depth, agreement = _FusedDepthLoss.apply(plan, depth, *states, *flat)
    return DepthLoss(total, by_depth, agreement)


def rows_of(weight: Float[Tensor, "vocab width"], logits: Mapping[str, int] = CHUNK_LOGITS) -> int:
    """Return the rows whose logits are held, or worked on, at once."""
    kind = "cpu" if weight.device.type == "cpu" else "cuda"
    rows = max(1, logits[kind] // len(weight))
    return rows if kind == "cpu" or rows < TILE else rows - rows % TILE


def depth_shares(depth: int, decay: float, depth_weights: Sequence[float]) -> list[float]:
    """Return the weight of each depth's loss."""
    return list(depth_weights) or [decay**level for level in range(depth)]


def dpace_weights(confidence: Float[Tensor, "depth row"]) -> Float[Tensor, "depth row"]:
    """Return how much of a drafted chain's expected length hangs on each of its depths.

    Depth j weighs the sum over m >= j of the product over i <= m of the smoothed confidences, the
    draft's probabilities of what it should predict: the expected number of accepted tokens that an
    error at j would lose. Carries no gradient.

    Source: Wu et al. 2026, arXiv:2605.18810, with smoothing 0.5.
    """
    reach = (SMOOTHING + (1 - SMOOTHING) * confidence.detach()).cumprod(0)
    return reach.flip(0).cumsum(0).flip(0)


def whole_chains(
    scored: Bool[Tensor, "batch time"],
    depth: int,
    document_ids: Int[Tensor, "batch time"] | None = None,
) -> Bool[Tensor, "batch time"]:
    """Return which labels begin `depth` scored ones: a chain drafted from one position.

    A chain lies in one of the `document_ids` of its row; None: each row is one text.
    """
    whole = F.pad(scored, (0, depth - 1)).unfold(-1, depth, 1).all(-1)
    if document_ids is None:
        return whole
    last = document_ids.new_full((len(document_ids), depth - 1), -1)
    return whole & (document_ids == torch.cat([document_ids, last], dim=1)[:, depth - 1 :])


def check_choices(kind: str, weighting: str) -> None:
    """Refuse a loss or a weighting there is not."""
    for name, value, known in (("loss", kind, KINDS), ("weighting", weighting, WEIGHTINGS)):
        if value not in known:
            raise InputError(f"{name} must be one of {', '.join(known)}, got {value!r}")


def _check(
    kind: str, depth_weights: Sequence[float], targets: Sequence[Targets], depth: int
) -> None:
    if len(depth_weights) not in (0, depth):
        raise InputError(
            f"depth_weights needs one weight for each of {depth} depths, got {len(depth_weights)}"
        )
    if len(targets) != depth:
        raise InputError(f"targets are one for all, or one for each of {depth}: got {len(targets)}")
    if kind not in LABELS_ONLY and any(target.project is None for target in targets):
        raise InputError(
            f"loss {kind} reads the base's distribution, got project=None; pass a projection"
        )


def _by_liger(
    states: Sequence[Tensor],
    projections: Sequence[tuple[Tensor, Tensor | None]],
    targets: Sequence[Targets],
    weights: Sequence[float],
    rows: Int[Tensor, " depth"],
) -> DepthLoss:
    found = [
        liger.cross_entropy(state, *projection, target.labels, count)
        for state, projection, target, count in zip(states, projections, targets, rows, strict=True)
    ]
    by_depth = torch.stack([loss for loss, _ in found])
    total = (by_depth * by_depth.new_tensor(weights)).sum()
    return DepthLoss(total, by_depth.detach(), torch.stack([accuracy for _, accuracy in found]))


@dataclass(frozen=True, slots=True)
class _Plan:
    kind: str
    targets: list[Targets]
    weights: list[float]
    rows: Int[Tensor, " depth"]
    dpace: bool
    chunk_rows: int
    block_rows: int
    learns: bool
    """Whether gradients are wanted; parameters alone would not tell."""


def _slices(total: int, step: int) -> Iterator[slice]:
    for start in range(0, total, step):
        yield slice(start, min(start + step, total))


class _FusedDepthLoss(torch.autograd.Function):
    """Computes gradients in the forward pass, while a chunk's logits are at hand."""

    @staticmethod
    @torch.autocast("cuda", enabled=False)
    @torch.autocast("cpu", enabled=False)
    def forward(ctx: Any, plan: _Plan, depth: int, *tensors: Tensor | None) -> Any:
        """Return what the losses sum to, chunk by chunk, each chunk's gradients along with it."""
        wanted = [plan.learns and needed for needed in ctx.needs_input_grad[2:]]
        gradients = Gradients(depth, tensors, wanted)
        scores = _Scores(plan, gradients)
        base_rows: list[BaseRows] = []
        # D-PACE holds the slopes of all depths at once, so its chunks are that much shorter
        chunk_rows = max(1, plan.chunk_rows // depth if plan.dpace else plan.chunk_rows)
        for rows in _slices(len(plan.targets[0].labels), chunk_rows):
            for level, target in enumerate(plan.targets):
                if level == 0 or target is not plan.targets[level - 1]:
                    base_rows.clear()  # before the next one is made, not after
                    base_rows = _base_rows(plan, target, rows, gradients.precision)
                scores.add(level, rows, base_rows)
                if not plan.dpace or level == depth - 1:
                    scores.flush(rows)
        ctx.gradients = gradients.sums
        ctx.mark_non_differentiable(scores.by_depth, scores.agreement)
        return scores.total, scores.by_depth, scores.agreement

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """Hand over the gradients that forward summed, scaled by the loss's own; once."""
        if ctx.gradients is None:
            raise RuntimeError(
                "a loss gives its gradients once, got a second backward; pass retain_graph=True "
                "to the first"
            )
        scale = grad_outputs[0]
        if _get_current_graph_task_keep_graph():
            return None, None, *(None if grad is None else grad * scale for grad in ctx.gradients)
        # nobody asks again, so the sums themselves are handed over: a second copy of every
        # projection's gradient would be the largest thing this loss holds
        given, ctx.gradients = ctx.gradients, None
        return None, None, *(None if grad is None else grad.mul_(scale) for grad in given)


def _base_rows(
    plan: _Plan, targets: Targets, rows: slice, precision: torch.dtype
) -> list[BaseRows]:
    """Return what each block of a chunk is to predict."""
    labels = targets.labels[rows].clamp(min=0)
    logits = targets.project(targets.base_hidden[rows]) if targets.project else None
    return [
        read_base(plan.kind, labels[block], None if logits is None else logits[block].to(precision))
        for block in _slices(len(labels), plan.block_rows)
    ]


class _Scores:
    """Adds up losses and agreement, and hands weighted slopes on to the gradients."""

    def __init__(self, plan: _Plan, gradients: Gradients) -> None:
        self.plan, self.gradients = plan, gradients
        self.pending: list[tuple[int, Tensor, Tensor, Tensor, Tensor]] = []
        self.room: list[Tensor] = []
        """Slopes of earlier chunks: on a CPU new pages cost as much as a third of a product."""
        self.precision = gradients.precision
        self.by_depth = gradients.states[0].new_zeros(len(plan.targets), dtype=self.precision)
        self.agreement, self.total = torch.zeros_like(self.by_depth), self.by_depth.new_zeros(())
        self.shares = list(1.0 / plan.rows.clamp(min=1).to(self.precision))

    def add(self, level: int, rows: slice, base_rows: list[BaseRows]) -> None:
        """Turn one depth's logits of a chunk into slopes, and keep them until they are weighted.

        A block is worked on in at least float32, and kept as the products have it.
        """
        plan, room = self.plan, self.room.pop() if self.room else None
        slopes = self.gradients.logits(level, rows, room)
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        for block, base in zip(_slices(len(slopes), plan.block_rows), base_rows, strict=True):
            log_draft = slopes[block].log_softmax(-1, dtype=self.precision)
            agreed = best_of(log_draft) == base.best
            expected = base.best if plan.kind == "argmax_cross_entropy" else base.labels
            confidence = log_draft.gather(-1, expected[:, None])[:, 0].exp()
            found.append((KINDS[plan.kind](log_draft, base), confidence, agreed))
            slopes[block] = log_draft
        losses, confidence, agreed = (torch.cat(column) for column in zip(*found, strict=True))
        drafted = self.plan.targets[level].labels[rows] >= 0
        losses = losses.where(drafted, 0.0)
        self.by_depth[level] += losses.sum() * self.shares[level]
        self.agreement[level] += (agreed & drafted).sum() * self.shares[level]
        self.pending.append((level, slopes, losses, confidence * drafted, drafted))

    def flush(self, rows: slice) -> None:
        """Weight the slopes that are kept, and turn them into gradients."""
        sure = torch.stack([confidence for _, _, _, confidence, _ in self.pending])
        factors = dpace_weights(sure) if self.plan.dpace else torch.ones_like(sure)
        for (level, slopes, losses, _, drafted), factor in zip(self.pending, factors, strict=True):
            scale = factor * drafted * (self.plan.weights[level] * self.shares[level])
            self.total += (losses * scale).sum()
            self.gradients.add(level, rows, slopes, scale)
            self.room.append(slopes)
        self.pending.clear()

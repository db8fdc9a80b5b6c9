"""Loss of all depths, fused with the vocabulary projection.

It projects one chunk of rows at a time and computes its loss and gradients, so logits of
shape (depth, row, vocab) or (row, vocab) are never in memory. The base's distribution is projected
from its hidden states in the same chunk, once for all depths that share it. See docs/losses.md.
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
from specheads.training.losses.row_losses import KINDS as KINDS
from specheads.training.losses.row_losses import LABELS_ONLY as LABELS_ONLY
from specheads.training.losses.row_losses import BaseRows, best_of, read_base

WEIGHTINGS = ("geometric", "dpace")
"""Weighting of depths: geometric by fixed weights, dpace also by each row's confidence."""

SMOOTHING = 0.5
"""Smoothing of the draft's confidence towards one in D-PACE."""

CHUNK_LOGITS = {"cpu": 2**24, "cuda": 2**28}
"""Logits of a chunk: small compared with the weights, and enough for a fast matrix product.

On a GPU each chunk reads and writes the weight's whole float32 gradient. With a vocabulary of 128k,
2**26 logits are 512 rows, whose products take as long as that traffic; 2048 rows take four times
as long.
"""

BLOCK_LOGITS = {"cpu": 2**19, "cuda": 2**26}
"""Logits processed at once in float32: the size of a core's cache, or 256 MiB on a GPU."""

TILE = 128
"""Rows of a chunk or block on a GPU are a multiple of this, the tile of matrix products."""


@dataclass(frozen=True, slots=True)
class Targets:
    """Targets of the depths, one row per label."""

    labels: Int[Tensor, " row"]
    """The token of the text; -1 excludes the row."""
    base_hidden: Float[Tensor, "row width"]
    """The base's final hidden state one position before the label."""
    project: Callable[[Tensor], Tensor] | None
    """Projects `base_hidden` to the base's logits. None if the loss needs labels only; agreement
    then compares with the labels."""
    count: Int[Tensor, ""] | None = None
    """Denominator of the mean; None counts these labels."""


@dataclass(frozen=True, slots=True)
class DepthLoss:
    """The total loss, and the metrics of each depth."""

    total: Float[Tensor, ""]
    """Weighted sum over depths of the mean over rows; carries the gradients."""
    by_depth: Float[Tensor, " depth"]
    """Mean loss of each depth, unweighted."""
    agreement: Float[Tensor, " depth"]
    """Share of rows where the draft's argmax equals the base's argmax."""


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
    """Return the loss of all depths without materialising all logits.

    Args:
        states: Hidden states per depth; row r belongs to label r.
        projections: Weight (vocab, width) and bias per depth; tied depths repeat them.
        targets: One for all depths, or one per depth.
        kind: Name of the loss, one of `KINDS`.
        decay: Weight of each depth relative to the previous one.
        depth_weights: Weight per depth, in place of `decay`.
        weighting: One of `WEIGHTINGS`. dpace multiplies by `dpace_weights`; row r of every depth
            must then come from the same position, which needs targets per depth.
        chunk_rows: Rows whose logits are in memory at once; None selects them for the device.
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
    """Return the number of rows whose logits are processed at once."""
    kind = "cpu" if weight.device.type == "cpu" else "cuda"
    rows = max(1, logits[kind] // len(weight))
    return rows if kind == "cpu" or rows < TILE else rows - rows % TILE


def depth_shares(depth: int, decay: float, depth_weights: Sequence[float]) -> list[float]:
    """Return the weight of each depth's loss."""
    return list(depth_weights) or [decay**level for level in range(depth)]


def dpace_weights(confidence: Float[Tensor, "depth row"]) -> Float[Tensor, "depth row"]:
    """Return the expected number of accepted tokens that depend on each depth of a chain.

    The weight of depth j is the sum over m >= j of the product over i <= m of the smoothed
    confidences, where a confidence is the draft's probability of the target. Carries no gradient.

    Source: Wu et al. 2026, arXiv:2605.18810, with smoothing 0.5.
    """
    reach = (SMOOTHING + (1 - SMOOTHING) * confidence.detach()).cumprod(0)
    return reach.flip(0).cumsum(0).flip(0)


def whole_chains(
    loss_mask: Bool[Tensor, "batch time"],
    depth: int,
    document_ids: Int[Tensor, "batch time"] | None = None,
) -> Bool[Tensor, "batch time"]:
    """Return the labels that start a chain of `depth` labels in one document.

    `document_ids` None: each row is one document.
    """
    whole = F.pad(loss_mask, (0, depth - 1)).unfold(-1, depth, 1).all(-1)
    if document_ids is None:
        return whole
    last = document_ids.new_full((len(document_ids), depth - 1), -1)
    return whole & (document_ids == torch.cat([document_ids, last], dim=1)[:, depth - 1 :])


def check_choices(kind: str, weighting: str) -> None:
    """Raise for an unknown loss or weighting."""
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
        raise InputError(f"targets must be one, or one per depth ({depth}), got {len(targets)}")
    if kind not in LABELS_ONLY and any(target.project is None for target in targets):
        raise InputError(
            f"loss {kind} needs the base's distribution, got project=None; pass a projection"
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
    """Whether gradients are enabled."""


def _slices(total: int, step: int) -> Iterator[slice]:
    for start in range(0, total, step):
        yield slice(start, min(start + step, total))


BLOCK_ROWS = {"cpu": 2**10}
"""Rows of a weight whose gradient is computed at once: the size of a core's cache."""


class Gradients:
    """Sums the gradients of states, weights and biases that require one.

    Products run in the states' dtype, which autocast selected; losses in at least float32.
    """

    def __init__(
        self, depth: int, tensors: Sequence[Tensor | None], wanted: Sequence[bool]
    ) -> None:
        self.states = [tensor for tensor in tensors[:depth] if tensor is not None]
        dtype = self.states[0].dtype
        self.precision = torch.promote_types(dtype, torch.float32)
        # a tensor shared by several depths has one gradient and one cast copy, at its first place
        self.place = [
            next(first for first, other in enumerate(tensors) if other is tensor)
            for tensor in tensors
        ]
        own = [first == place for place, first in enumerate(self.place)]
        self.sums = [
            torch.zeros_like(tensor) if want and first and tensor is not None else None
            for tensor, want, first in zip(tensors, wanted, own, strict=True)
        ]
        self.cast = [
            tensor.to(dtype) if first and tensor is not None else None
            for tensor, first in zip(tensors, own, strict=True)
        ]

    def _projection(self, level: int) -> tuple[Tensor, Tensor | None]:
        places = self._places(level)
        weight = self.cast[places[0]]
        assert weight is not None
        return weight, self.cast[places[1]]

    def _places(self, level: int) -> list[int]:
        """Return the indices of a depth's weight and bias."""
        first = len(self.states) + 2 * level
        return self.place[first : first + 2]

    def logits(self, level: int, rows: slice, room: Tensor | None = None) -> Tensor:
        """Return a depth's logits of some rows, in the buffer `room` if it is large enough."""
        state, (weight, bias) = self.states[level][rows], self._projection(level)
        if room is None or room.shape[1] != len(weight) or len(room) < len(state):
            return F.linear(state, weight, bias)
        logits = torch.mm(state, weight.T, out=room[: len(state)])
        return logits if bias is None else logits.add_(bias)

    def add(self, level: int, rows: slice, slopes: Tensor, scale: Tensor) -> None:
        """Add the gradients from the slopes of some rows' logits, each row times its scale."""
        state = self.states[level][rows]
        scale = scale.to(state.dtype)
        weight, bias = self._places(level)
        # scale rows of the states' width, which are shorter than the vocabulary
        if (sums := self.sums[self.place[level]]) is not None:
            sums[rows] += (slopes @ self._projection(level)[0]).mul_(scale[:, None])
        if (sums := self.sums[weight]) is not None:
            scaled = state * scale[:, None]
            # in place if the dtypes are equal: the product is as large as the weight
            if sums.dtype == state.dtype:
                sums.addmm_(slopes.T, scaled)
            else:
                _add_product(sums, slopes, scaled)
        if (sums := self.sums[bias]) is not None:
            sums += scale @ slopes


def _add_product(sums: Tensor, slopes: Tensor, states: Tensor) -> None:
    """Add `slopes.T @ states` to sums of another dtype, in blocks on a CPU.

    A whole product of vocabulary size, and its cast, would need new pages each time, which takes
    longer than the product itself.
    """
    size = BLOCK_ROWS.get(sums.device.type, len(sums))
    for start in range(0, len(sums), size):
        sums[start : start + size] += slopes[:, start : start + size].T @ states


class _FusedDepthLoss(torch.autograd.Function):
    """Computes gradients in the forward pass, chunk by chunk."""

    @staticmethod
    @torch.autocast("cuda", enabled=False)
    @torch.autocast("cpu", enabled=False)
    def forward(ctx: Any, plan: _Plan, depth: int, *tensors: Tensor | None) -> Any:
        """Return the total, the losses by depth and the agreement; store the gradients."""
        wanted = [plan.learns and needed for needed in ctx.needs_input_grad[2:]]
        gradients = Gradients(depth, tensors, wanted)
        scores = _Scores(plan, gradients)
        base_rows: list[BaseRows] = []
        # D-PACE needs the slopes of all depths at once, so its chunks are shorter
        chunk_rows = max(1, plan.chunk_rows // depth if plan.dpace else plan.chunk_rows)
        for rows in _slices(len(plan.targets[0].labels), chunk_rows):
            for level, target in enumerate(plan.targets):
                if level == 0 or target is not plan.targets[level - 1]:
                    base_rows.clear()  # free the memory before the next allocation
                    base_rows = _base_rows(plan, target, rows, gradients.precision)
                scores.add(level, rows, base_rows)
                if not plan.dpace or level == depth - 1:
                    scores.flush(rows)
        ctx.gradients = gradients.sums
        ctx.mark_non_differentiable(scores.by_depth, scores.agreement)
        return scores.total, scores.by_depth, scores.agreement

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """Return the stored gradients, scaled by the gradient of the loss; once."""
        if ctx.gradients is None:
            raise RuntimeError(
                "a loss supports one backward, got a second; pass retain_graph=True to the first"
            )
        scale = grad_outputs[0]
        if _get_current_graph_task_keep_graph():
            return None, None, *(None if grad is None else grad * scale for grad in ctx.gradients)
        # scale in place: a copy of every projection's gradient would dominate the memory
        given, ctx.gradients = ctx.gradients, None
        return None, None, *(None if grad is None else grad.mul_(scale) for grad in given)


def _base_rows(
    plan: _Plan, targets: Targets, rows: slice, precision: torch.dtype
) -> list[BaseRows]:
    """Return the targets of each block of a chunk."""
    labels = targets.labels[rows].clamp(min=0)
    logits = targets.project(targets.base_hidden[rows]) if targets.project else None
    return [
        read_base(plan.kind, labels[block], None if logits is None else logits[block].to(precision))
        for block in _slices(len(labels), plan.block_rows)
    ]


class _Scores:
    """Sums losses and agreement, and passes weighted slopes to the gradients."""

    def __init__(self, plan: _Plan, gradients: Gradients) -> None:
        self.plan, self.gradients = plan, gradients
        self.pending: list[tuple[int, Tensor, Tensor, Tensor, Tensor]] = []
        self.room: list[Tensor] = []
        """Buffers of earlier chunks, for reuse: on a CPU new pages take a third of a product."""
        self.precision = gradients.precision
        self.by_depth = gradients.states[0].new_zeros(len(plan.targets), dtype=self.precision)
        self.agreement, self.total = torch.zeros_like(self.by_depth), self.by_depth.new_zeros(())
        self.shares = list(1.0 / plan.rows.clamp(min=1).to(self.precision))

    def add(self, level: int, rows: slice, base_rows: list[BaseRows]) -> None:
        """Compute one depth's slopes of a chunk, and store them until they are weighted.

        Blocks are computed in at least float32 and stored in the precision of the products.
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
        """Weight the stored slopes and add their gradients."""
        confidence = torch.stack([one for _, _, _, one, _ in self.pending])
        factors = dpace_weights(confidence) if self.plan.dpace else torch.ones_like(confidence)
        for (level, slopes, losses, _, drafted), factor in zip(self.pending, factors, strict=True):
            scale = factor * drafted * (self.plan.weights[level] * self.shares[level])
            self.total += (losses * scale).sum()
            self.gradients.add(level, rows, slopes, scale)
            self.room.append(slopes)
        self.pending.clear()

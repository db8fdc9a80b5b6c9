"""Loss of all depths, fused with the vocabulary projection.

It projects one chunk of rows at a time and computes its loss and gradients, so logits of
shape (depth, row, vocab) or (row, vocab) are never in memory. The base's distribution is projected
from its hidden states in the same chunk, once for all depths that share it. See docs/losses.md.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from specheads.core.drafter import Head
from specheads.training.losses import LOSSES, BaseRows, Needs, RowLoss, argmax_of_rows

CHUNK_LOGITS = {"cpu": 2**24, "cuda": 2**28}
"""Logits of a chunk: small compared with the weights, and enough for a fast matrix product.

On a GPU each chunk reads and writes the weight's whole float32 gradient. With a vocabulary of 128k,
2**26 logits are 512 rows, whose products take as long as that traffic; 2048 rows take four times
as long.
"""
CONFIDENCE_LOGITS = {"cpu": 2**24, "cuda": 2**26}
"""Logits in memory at once for the confidence loss, of the draft and of the base each."""
BLOCK_LOGITS = {"cpu": 2**19, "cuda": 2**26}
"""Logits processed at once in float32: the size of a core's cache, or 256 MiB on a GPU."""
TILE = 128
"""Rows of a chunk or block on a GPU are a multiple of this, the tile of matrix products."""
WEIGHT_ROWS = 2**10
"""Rows of a weight whose gradient a CPU computes at once: the size of a core's cache."""
ABSENT = -2
"""Label of a row at a depth that its text does not reach."""
Projection = tuple[Tensor, Tensor | None]
"""Weight (vocab, width) and bias."""


@dataclass(frozen=True, slots=True)
class Targets:
    """Targets of one depth or of several, one row per label."""

    labels: Int[Tensor, " row"]
    """The token of the text. -1 excludes the row and rejects its draft, `ABSENT` only excludes."""
    base_hidden: Float[Tensor, "row width"]
    """The base's final hidden state one position before the label."""
    project: Callable[[Tensor], Tensor]
    """Projects `base_hidden` to the base's logits. Losses that need labels only do not call it; the
    agreement then compares with the labels."""
    num_labels: Int[Tensor, ""] | None = None
    """Denominator of the mean; None counts these labels."""

    def denominator(self) -> Int[Tensor, ""]:
        """Return the denominator of the mean."""
        return (self.labels >= 0).sum() if self.num_labels is None else self.num_labels


class DepthLoss(NamedTuple):
    """The total loss, and the metrics of each depth."""

    total: Float[Tensor, ""]
    """Weighted sum over depths of the mean over rows; carries the gradients."""
    by_depth: Float[Tensor, " depth"]
    """Mean loss of each depth, unweighted."""
    agreement: Float[Tensor, " depth"]
    """Share of rows where the draft's argmax equals the base's argmax."""


def depth_loss(
    states: Sequence[Float[Tensor, "row width"]],
    projections: Sequence[Projection],
    targets: Targets | Sequence[Targets],
    *,
    loss: RowLoss = LOSSES["soft_cross_entropy"],
    weights: Sequence[float] = (),
    chunk_rows: int | None = None,
) -> DepthLoss:
    """Return the loss of all depths without materialising all logits.

    Row r of the states of each depth belongs to label r. Tied depths repeat a projection. `weights`
    are those of the depths; empty weighs them equally. `chunk_rows` rows have their logits in
    memory at once; None selects them for the device.
    """
    depth, weight = len(states), projections[0][0]
    targets_by_depth = [targets] * depth if isinstance(targets, Targets) else list(targets)
    sums = partial(
        _LossSums,
        loss=loss,
        targets=targets_by_depth,
        weights=list(weights) or [1.0] * depth,
        chunk_rows=chunk_rows or rows_of(weight),
        block_rows=rows_of(weight, BLOCK_LOGITS),
    )
    tensors = [tensor for projection in projections for tensor in projection]
    return DepthLoss(*_FusedDepthLoss.apply(sums, torch.is_grad_enabled(), *states, *tensors))


def rows_of(weight: Float[Tensor, "vocab width"], logits: Mapping[str, int] = CHUNK_LOGITS) -> int:
    """Return the number of rows whose logits are processed at once."""
    kind = "cpu" if weight.device.type == "cpu" else "cuda"
    rows = max(1, logits[kind] // len(weight))
    return rows if kind == "cpu" or rows < TILE else rows - rows % TILE


def weights_of_depths(depth: int, decay: float) -> list[float]:
    """Return the weight of each depth's loss."""
    return [decay**level for level in range(depth)]


def confidence_loss(
    predicted: Sequence[Float[Tensor, " row"]],
    states: Sequence[Float[Tensor, "row width"]],
    projections: Sequence[Projection],
    targets: Sequence[Targets],
) -> Float[Tensor, " depth"]:
    """Return the binary cross-entropy per depth between the predicted and the true acceptance rate.

    The true rate carries no gradient. Rows without a label are excluded.

    Source: deepseek-ai/DeepSpec, deepspec/modeling/dspark/loss.py.
    """
    means = []
    for logits, state, projection, target in zip(
        predicted, states, projections, targets, strict=True
    ):
        rates = acceptance_rates(state, projection, target)
        losses = F.binary_cross_entropy_with_logits(logits.to(rates.dtype), rates, reduction="none")
        means.append(mean_over_labels(losses, target))
    return torch.stack(means)


def selector_loss(
    head: Head, states: Sequence[Float[Tensor, "row width"]], targets: Sequence[Targets]
) -> Float[Tensor, " depth"]:
    """Return the cross-entropy per depth of the base's best token among the head's candidates.

    Rows without a label are excluded.

    Source: vllm-project/speculators 0.9, models/dflash2/metrics.py.
    """
    means = []
    for level, (state, target) in enumerate(zip(states, targets, strict=True)):
        losses, rows = [], rows_of(head.projection(level).weight, CONFIDENCE_LOGITS)
        for chunk, hidden in zip(state.split(rows), target.base_hidden.split(rows), strict=True):
            best = target.project(hidden).argmax(-1)
            logits, labels = head.candidate_logits(chunk, level, best)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            losses.append(F.cross_entropy(logits, labels, reduction="none"))
        means.append(mean_over_labels(torch.cat(losses), target))
    return torch.stack(means)


def mean_over_labels(losses: Float[Tensor, " row"], targets: Targets) -> Float[Tensor, ""]:
    """Return the mean loss of the rows that have a label, over all processes and micro-batches."""
    return losses.where(targets.labels >= 0, 0.0).sum() / targets.denominator().clamp(min=1)


@torch.no_grad()
def acceptance_rates(
    states: Float[Tensor, "row width"], projection: Projection, targets: Targets
) -> Float[Tensor, " row"]:
    """Return the sum over tokens of the minimum of draft and base probability."""
    weight, bias = (None if tensor is None else tensor.to(states.dtype) for tensor in projection)
    assert weight is not None
    precision = torch.promote_types(states.dtype, torch.float32)
    chunk_rows = rows_of(weight, CONFIDENCE_LOGITS)
    chunks = zip(states.split(chunk_rows), targets.base_hidden.split(chunk_rows), strict=True)
    rates = [
        torch.minimum(
            F.linear(chunk, weight, bias).to(precision).softmax(-1),
            targets.project(base_hidden).to(precision).softmax(-1),
        ).sum(-1)
        for chunk, base_hidden in chunks
    ]
    return torch.cat(rates).clamp_(max=1.0)


class _FusedDepthLoss(torch.autograd.Function):
    """Computes gradients in the forward pass, chunk by chunk."""

    @staticmethod
    @torch.autocast("cuda", enabled=False)
    @torch.autocast("cpu", enabled=False)
    def forward(
        ctx: Any, make_sums: Callable[..., "_LossSums"], learns: bool, *tensors: Tensor | None
    ) -> Any:
        """Return the total, the losses by depth and the agreement; store the gradients."""
        sums = make_sums(tensors, [learns and needed for needed in ctx.needs_input_grad[2:]])
        sums.add_all()
        ctx.gradients = sums.gradients
        ctx.mark_non_differentiable(sums.by_depth, sums.agreement)
        return sums.total, sums.by_depth, sums.agreement

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """Return the stored gradients, scaled by the gradient of the loss; once."""
        # scale in place: a copy of every projection's gradient would dominate the memory
        gradients, ctx.gradients = ctx.gradients, None
        scale = grad_outputs[0]
        return None, None, *(None if value is None else value.mul_(scale) for value in gradients)


class _LossSums:
    """Sums losses, agreement, and the gradients of the tensors that require one.

    `tensors` are the states of all depths, and then the weight and bias of each depth. Products run
    in the states' dtype, which autocast selected; losses in at least float32.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor | None],
        needs_gradient: Sequence[bool],
        *,
        loss: RowLoss,
        targets: list[Targets],
        weights: list[float],
        chunk_rows: int,
        block_rows: int,
    ) -> None:
        self.loss, self.targets, self.weights = loss, targets, weights
        self.chunk_rows, self.block_rows = chunk_rows, block_rows
        self.states = [state for state in tensors[: len(targets)] if state is not None]
        dtype = self.states[0].dtype
        self.precision = torch.promote_types(dtype, torch.float32)
        # a tensor shared by several depths has one gradient and one cast copy, at its first index
        first_index: dict[int, int] = {}
        self.indices = [
            first_index.setdefault(id(tensor), index) for index, tensor in enumerate(tensors)
        ]
        self.gradients = [
            torch.zeros_like(tensor) if tensor is not None and needed and first == index else None
            for index, (tensor, needed, first) in enumerate(
                zip(tensors, needs_gradient, self.indices, strict=True)
            )
        ]
        self.cast_tensors = {
            index: None if (tensor := tensors[index]) is None else tensor.to(dtype)
            for index in sorted(set(self.indices))
        }
        self.total = self.states[0].new_zeros((), dtype=self.precision)
        self.by_depth = self.total.repeat(len(targets))
        self.agreement = torch.zeros_like(self.by_depth)
        num_labels = torch.stack([target.denominator() for target in targets])
        self.row_weights = list(1.0 / num_labels.clamp(min=1).to(self.precision))
        self.buffer: Tensor | None = None
        """Logits of the last chunk, for reuse: on a CPU new pages take a third of a product."""

    def add_all(self) -> None:
        """Add all rows, chunk by chunk."""
        base_rows = list[BaseRows]()
        for start in range(0, len(self.targets[0].labels), self.chunk_rows):
            rows = slice(start, start + self.chunk_rows)
            for level, target in enumerate(self.targets):
                if level == 0 or target is not self.targets[level - 1]:
                    base_rows.clear()  # free the memory before the next allocation
                    base_rows = self._base_rows(target, rows)
                self._add(level, rows, base_rows)

    def _base_rows(self, targets: Targets, rows: slice) -> list[BaseRows]:
        """Return the targets of each block of a chunk."""
        labels = targets.labels[rows].clamp(min=0).split(self.block_rows)
        if self.loss.needs == Needs.LABELS:
            return [BaseRows(block, block) for block in labels]
        logits = targets.project(targets.base_hidden[rows]).split(self.block_rows)
        return [
            self.loss.read_base(label_block, logit_block.to(self.precision))
            for label_block, logit_block in zip(labels, logits, strict=True)
        ]

    def _projection_indices(self, level: int) -> list[int]:
        """Return the indices of a depth's weight and bias."""
        first = len(self.states) + 2 * level
        return self.indices[first : first + 2]

    def _logits(self, level: int, rows: slice) -> Tensor:
        """Return a depth's logits of a chunk, in the last chunk's buffer if it is large enough."""
        weight, bias = map(self.cast_tensors.get, self._projection_indices(level))
        state, buffer = self.states[level][rows], self.buffer
        assert weight is not None
        if buffer is None or buffer.shape[1] != len(weight) or len(buffer) < len(state):
            self.buffer = None
            return F.linear(state, weight, bias)
        logits = torch.mm(state, weight.T, out=buffer[: len(state)])
        return logits if bias is None else logits.add_(bias)

    def _add(self, level: int, rows: slice, base_rows: list[BaseRows]) -> None:
        """Add one depth's losses, agreement and gradients of a chunk.

        Blocks are computed in at least float32 and stored in the precision of the products.
        """
        slopes = self._logits(level, rows)
        loss_blocks, agreement_blocks = [], []
        for block, base in zip(slopes.split(self.block_rows), base_rows, strict=True):
            log_draft = block.log_softmax(-1, dtype=self.precision)
            agreement_blocks.append(argmax_of_rows(log_draft) == base.argmax)
            loss_blocks.append(self.loss.compute(log_draft, base))
            block.copy_(log_draft)
        has_label = self.targets[level].labels[rows] >= 0
        losses = torch.cat(loss_blocks).where(has_label, 0.0)
        row_weight = self.row_weights[level]
        self.by_depth[level] += losses.sum() * row_weight
        self.agreement[level] += (torch.cat(agreement_blocks) & has_label).sum() * row_weight
        scale = has_label * (self.weights[level] * row_weight)
        self.total += (losses * scale).sum()
        self._add_gradients(level, rows, slopes, scale)
        self.buffer = slopes

    def _add_gradients(self, level: int, rows: slice, slopes: Tensor, scale: Tensor) -> None:
        """Add the gradients from the slopes of a chunk's logits, each row times its scale."""
        state = self.states[level][rows]
        scale = scale.to(state.dtype)
        weight_index, bias_index = self._projection_indices(level)
        # scale rows of the states' width, which are shorter than the vocabulary
        if (gradient := self.gradients[self.indices[level]]) is not None:
            weight = self.cast_tensors[weight_index]
            assert weight is not None
            gradient[rows] += (slopes @ weight).mul_(scale[:, None])
        if (gradient := self.gradients[weight_index]) is not None:
            _add_product(gradient, slopes, state * scale[:, None])
        if (gradient := self.gradients[bias_index]) is not None:
            gradient += scale @ slopes


def _add_product(sums: Tensor, slopes: Tensor, states: Tensor) -> None:
    """Add `slopes.T @ states` to sums, which may have another dtype.

    With equal dtypes this is in place. Otherwise a CPU adds in blocks: a whole product of
    vocabulary size, and its cast, would need new pages each time, which takes longer than the
    product itself.
    """
    if sums.dtype == states.dtype:
        # `addmm_` does the same, but torch does not count its FLOPs
        torch.addmm(sums, slopes.T, states, out=sums)
        return
    size = WEIGHT_ROWS if sums.device.type == "cpu" else len(sums)
    for start in range(0, len(sums), size):
        sums[start : start + size] += slopes[:, start : start + size].T @ states

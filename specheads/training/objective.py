"""A head and its loss as one module; it selects the state and the label of each depth."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.profiler import record_function

from specheads.config.training import Phase
from specheads.core.drafter import Features, Head
from specheads.core.features import document_positions
from specheads.core.kernels import product_dtype
from specheads.core.machine import to_device
from specheads.data.packing import TokenBatch
from specheads.decoding.noise import derive_seed
from specheads.training.depth_loss import (
    ABSENT,
    DepthLoss,
    Targets,
    confidence_loss,
    depth_loss,
    selector_loss,
    weights_of_depths,
)
from specheads.training.losses import loss_of_phase

FULL_ROWS = 128
"""The number of rows is padded to a multiple of this. Each step has another number of labels, and
oneDNN caches megabytes per size; padded rows count in no loss."""


class LabelCounts(NamedTuple):
    """Numbers of labels over all processes and micro-batches: the denominators of the means."""

    drafted: Int[Tensor, " depth"]
    """Labels of each depth that the head can draft."""
    labelled: Int[Tensor, " depth"]
    """All labels of each depth."""
    base: Int[Tensor, ""]
    """Labels of the base's own loss."""


@dataclass(frozen=True, slots=True)
class DraftLabels:
    """The labels of a batch in one step."""

    loss_mask: Bool[Tensor, "batch time"]
    """Labels that count in this step; the first labels of the anchors, for a head with anchors."""
    by_depth: Int[Tensor, "batch time depth"]
    """Label of each depth: a column of the head's logits, -1 for a token that the head cannot
    draft, or `ABSENT`."""

    def is_drafted(self) -> Bool[Tensor, "batch time"]:
        """Return where any depth has a label that the head can draft."""
        return (self.by_depth >= 0).any(-1)

    def count(self, batch: TokenBatch) -> LabelCounts:
        """Return the numbers of these labels."""
        base = next_token_labels(self.loss_mask, batch.document_ids).sum()
        drafted, labelled = (self.by_depth >= 0), (self.by_depth != ABSENT)
        return LabelCounts(drafted.sum((0, 1)), labelled.sum((0, 1)), base)


def sum_counts(
    counts: Iterable[LabelCounts],
    total: Callable[[Tensor], Tensor],
    depth: int,
    device: torch.device,
) -> LabelCounts:
    """Return the sum of counts over batches and, by `total`, over processes."""
    sums = torch.zeros(2 * depth + 1, dtype=torch.long, device=device)
    for count in counts:
        sums += torch.cat([count.drafted, count.labelled, count.base[None]])
    sums = total(sums)
    return LabelCounts(sums[:depth], sums[depth:-1], sums[-1])


@dataclass(frozen=True, slots=True)
class LabelRows:
    """The rows of the losses: for each depth its labels, and where its state and target are."""

    batch_rows: Int[Tensor, " row"]
    labels: Int[Tensor, "row depth"]
    state_positions: list[Int[Tensor, " row"]]
    """For each depth, the position whose state drafts the label."""
    base_positions: list[Int[Tensor, " row"]]
    """The positions before the labels: one for each depth, or for all if they share labels."""


def label_rows(labels: DraftLabels, *, from_anchors: bool) -> LabelRows:
    """Return the rows of the losses, padded with rows without labels.

    Depth k drafts label j from position j - 2 - k (docs/index_convention.md); with anchors each
    depth drafts another label from the anchor. The number of rows is a shape: this synchronises
    with a GPU once a step.
    """
    batch_rows, positions = labels.is_drafted().nonzero(as_tuple=True)
    count, missing = len(batch_rows), -len(batch_rows) % FULL_ROWS
    batch_rows, positions = (
        torch.cat([index, index[:1].expand(missing)]) for index in (batch_rows, positions)
    )
    is_filling = torch.arange(len(batch_rows), device=batch_rows.device) >= count
    by_depth = labels.by_depth[batch_rows, positions].masked_fill(is_filling[:, None], ABSENT)
    depths, last = range(by_depth.shape[1]), labels.loss_mask.shape[1] - 1
    if from_anchors:
        # a depth past the end of the row has no label, and any hidden state
        before = [(positions + depth - 1).clamp(max=last) for depth in depths]
        return LabelRows(batch_rows, by_depth, [positions - 2] * len(depths), before)
    state_positions = [positions - 2 - depth for depth in depths]
    return LabelRows(batch_rows, by_depth, state_positions, [positions - 1])


class Objective(nn.Module):
    """A head and its loss as one module, so that accelerate can wrap both together."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.head = head

    def forward(
        self,
        features: Features,
        batch: TokenBatch,
        labels: DraftLabels,
        project: Callable[[Tensor], Tensor],
        phase: Phase,
        counts: LabelCounts | None = None,
        progress: float = 1.0,
    ) -> DepthLoss:
        """Return the loss of every depth over `labels`, a part of the batch's.

        `project` turns the base's hidden states into its logits. None as `counts` counts the labels
        of this batch. `progress` in the phase is zero at its first step and one at its last.
        """
        counts = counts or labels.count(batch)
        drafting = drafting_positions(self.head, labels)
        rows = label_rows(labels, from_anchors=self.head.num_anchors > 0)
        hidden = features.hidden.detach()
        with record_function("head"):
            states = []
            by_depth = self.head.states(features, batch.tokens, drafting)
            for state, positions in zip(by_depth, rows.state_positions, strict=True):
                state = state[rows.batch_rows, positions]
                # to autocast's dtype: a norm may have returned float32
                states.append(state.to(product_dtype(state)))
        targets = []
        for depth, positions in enumerate(rows.base_positions):
            base_hidden, count = hidden[rows.batch_rows, positions], counts.drafted[depth]
            targets.append(Targets(rows.labels[:, depth], base_hidden, project, count))
        if len(targets) < len(states):
            targets *= len(states)
        with record_function("loss"):
            loss = self._loss(states, targets, phase, progress)
        # a label outside the draft vocabulary counts as rejected
        share = counts.drafted / counts.labelled.clamp(min=1)
        return loss._replace(agreement=loss.agreement * share)

    def _loss(
        self, states: list[Tensor], targets: list[Targets], phase: Phase, progress: float
    ) -> DepthLoss:
        """Return the loss of all depths, with the further losses of some kinds."""
        projections, loss = self.head.projections(), loss_of_phase(phase)
        weights = weights_of_depths(len(states), phase.decay)
        selects = self.head.num_candidates > 0
        hidden = [state[:, : self.head.width] for state in states] if selects else states
        result = depth_loss(hidden, projections, targets, loss=loss, weights=weights)
        if selects:
            by_depth = selector_loss(self.head, states, targets)
            return result._replace(total=result.total + weighted_sum(by_depth, weights))
        share = self.head.uncorrected_loss * (1 - progress)
        if share > 0:
            # a correction of zeros is none
            width = self.head.width
            plain = [F.pad(state[:, :width], (0, state.shape[1] - width)) for state in states]
            total = depth_loss(plain, projections, targets, loss=loss, weights=weights).total
            return result._replace(total=(1 - share) * result.total + share * total)
        confidence = [self.head.confidence_logits(state) for state in states]
        predicted = [logits for logits in confidence if logits is not None]
        if not predicted:
            return result
        by_depth = confidence_loss(predicted, states, projections, targets)
        return result._replace(total=result.total + weighted_sum(by_depth, weights))


def weighted_sum(by_depth: Float[Tensor, " depth"], weights: list[float]) -> Float[Tensor, ""]:
    """Return the sum over depths of a loss that is added to the total."""
    depth_weights = to_device(torch.tensor(weights, dtype=by_depth.dtype), by_depth.device)
    return (by_depth * depth_weights).sum()


def loss_metrics(loss: DepthLoss) -> dict[str, Tensor]:
    """Return the metrics of a head's loss, under the names of metrics.jsonl."""
    metrics = {"loss": loss.total.detach()}
    for name, values in (("loss", loss.by_depth), ("accept", loss.agreement)):
        metrics |= {f"{name}/depth_{depth}": value for depth, value in enumerate(values.unbind())}
    return metrics


def draw_labels(
    batch: TokenBatch, head: Head, phase: Phase, seed: int | None = None
) -> Bool[Tensor, "batch time"]:
    """Return the mask of labels that count in the losses of one step.

    It is a random part of the loss mask, drawn per sample from the step's seed and the sample's
    number. Without a seed all labels count; a head with `num_anchors` then gets the same anchors
    each time, because its cost grows with them.
    """
    loss_mask, num_anchors = batch.loss_mask, head.num_anchors
    share = 1.0 if seed is None else phase.scored_share
    is_limited = 0 < num_anchors < loss_mask.shape[1]
    if share == 1.0 and not is_limited:
        return loss_mask
    numbers = _random_numbers(batch, seed or 0).to(loss_mask.device)
    loss_mask = loss_mask & (numbers < share)
    if is_limited:
        masked = numbers.masked_fill(~loss_mask, 1.0)
        loss_mask &= numbers <= masked.kthvalue(num_anchors, dim=1, keepdim=True).values
    return loss_mask


def _random_numbers(batch: TokenBatch, seed: int) -> Float[Tensor, "batch time"]:
    """Return a uniform number for each label, drawn from the seed and the sample's number."""
    numbers = torch.empty(batch.tokens.shape)
    for row, sample in zip(numbers, batch.samples, strict=True):
        generator = torch.Generator().manual_seed(derive_seed(seed, sample))
        torch.rand(row.shape, generator=generator, out=row)
    return numbers


def draft_labels(
    head: Head, batch: TokenBatch, loss_mask: Bool[Tensor, "batch time"]
) -> DraftLabels:
    """Return the label of each depth at the positions of `loss_mask`.

    All depths have the same label. With anchors, a draft starts at each label of `loss_mask` and
    ends with the batch's loss mask or the document.
    """
    depth, document_ids = head.depth, batch.document_ids
    labels = head.to_drafted(batch.tokens)
    if head.num_anchors:
        labels = _following(labels, depth)
        inside = _following(batch.loss_mask, depth).cumprod(-1).bool()
        if document_ids is not None:
            inside &= _following(document_ids, depth) == document_ids[..., None]
        labels = labels.where(inside, ABSENT)
        # all depths draft from one position
        depth = 1
    else:
        labels = labels[..., None].expand(-1, -1, depth)
    is_draftable = draftable_labels(loss_mask, document_ids, depth)
    return DraftLabels(loss_mask, labels.where(is_draftable[..., None], ABSENT))


def drafting_positions(head: Head, labels: DraftLabels) -> Bool[Tensor, "batch time"]:
    """Return the positions from which any depth drafts one of the labels."""
    is_drafted = labels.is_drafted()
    # `draft_labels` excludes the labels whose position would wrap around
    distances = [2] if head.num_anchors else range(2, head.depth + 2)
    return torch.stack([is_drafted.roll(-distance, dims=1) for distance in distances]).any(0)


def _following(
    values: Shaped[Tensor, "batch time"], depth: int
) -> Shaped[Tensor, "batch time depth"]:
    """Return the `depth` values from each position on; zeros follow the row."""
    return F.pad(values, (0, depth - 1)).unfold(-1, depth, 1)


def draftable_labels(
    loss_mask: Bool[Tensor, "batch time"],
    document_ids: Int[Tensor, "batch time"] | None,
    depth: int,
) -> Bool[Tensor, "batch time"]:
    """Exclude the first labels of a text, for which there is no position `depth` + 1 before."""
    if document_ids is None:
        return loss_mask & (torch.arange(loss_mask.shape[1], device=loss_mask.device) > depth)
    return loss_mask & (document_positions(document_ids) > depth)


def next_token_labels(
    loss_mask: Bool[Tensor, "batch time"], document_ids: Int[Tensor, "batch time"] | None
) -> Bool[Tensor, "batch path"]:
    """Return the positions whose next token counts in the base's own loss."""
    inside = loss_mask[:, 1:]
    return inside if document_ids is None else inside & (document_ids.diff(dim=1) == 0)

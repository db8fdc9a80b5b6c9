"""A head and its loss as one module; it selects the state and the label of each depth."""

from collections.abc import Callable

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
from specheads.core.seeds import derive_seed
from specheads.data.packing import TokenBatch
from specheads.training.depth_loss import (
    ABSENT,
    DepthLoss,
    Targets,
    confidence_loss,
    depth_loss,
    depth_shares,
)
from specheads.training.own_drafts import OwnDrafts, draft, follow

FULL_ROWS = 128
"""The number of rows is padded to a multiple of this. Each step has another number of labels, and
oneDNN caches megabytes per size; padded rows count in no loss."""


class Objective(nn.Module):
    """A head and its loss as one module, so that accelerate can wrap both together."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.head = head

    def forward(
        self,
        features: Features,
        batch: TokenBatch,
        loss_mask: Bool[Tensor, "batch time"],
        logits_of: Callable[[Tensor], Tensor],
        phase: Phase,
        counts: Int[Tensor, " count"] | None = None,
        own: OwnDrafts | None = None,
    ) -> DepthLoss:
        """Return the loss of every depth over the labels in `loss_mask`, a part of the batch's.

        With `in_chains`, `loss_mask` marks the first label of each chain. `counts` (see
        `label_counts`) are the denominators of the means; None counts the labels of this batch.
        With `own`, the chains that it chooses read the head's own drafts.
        """
        depth, chains = self.head.depth, in_chains(self.head, phase)
        if counts is None:
            counts = label_counts(self.head, batch, loss_mask, phase)
        labels = depth_labels(self.head, batch, loss_mask, phase)
        learns = (labels >= 0).any(-1)
        # `depth_labels` excludes the labels whose position would wrap around
        ahead = [2] if chains else range(2, depth + 2)
        anchors = torch.stack([learns.roll(-places, dims=1) for places in ahead]).any(0)
        hidden, guesses = features.hidden.detach(), None
        if own is None:
            every = self.head.states(features, batch.tokens, anchors)
        else:
            texts = early_enough(batch.loss_mask, batch.document_ids, 1)
            with record_function("head"):
                every, guesses, visited = draft(self.head, features, batch, own, texts)
            learns &= visited | ~own.chosen
        # the number of rows is a shape: this synchronises with a GPU once a step
        rows, first = learns.nonzero(as_tuple=True)
        count, rows, first = len(rows), _filled(rows), _filled(first)
        with record_function("head"):
            states = []
            for level, state in enumerate(every):
                state = state[rows, first - 2 - (0 if chains else level)]
                # to autocast's dtype: a norm may have returned float32
                states.append(state.to(product_dtype(state)))
        is_filling = torch.arange(len(rows), device=rows.device) >= count
        aims = labels[rows, first].masked_fill(is_filling[:, None], ABSENT)
        # a level past the end of the row has no label, and any hidden state
        last = hidden.shape[1] - 1
        before = [
            hidden[rows, (first + level - 1).clamp(max=last)]
            for level in range(depth if chains else 1)
        ]
        if own is not None and guesses is not None:
            given = guesses, hidden, rows[:count], first[:count]
            some, expected, known = follow(own, self.head, batch, *given)
            expected = expected.T.where(aims[some] != ABSENT, ABSENT)
            aims = aims.index_copy(0, some, expected)
            before = [one.index_copy(0, some, known[k]) for k, one in enumerate(before)]
        targets = [
            Targets(aims[:, level], one, logits_of, counts[level])
            for level, one in enumerate(before)
        ]
        with record_function("loss"):
            loss = self._loss(states, targets if chains else targets * depth, phase)
        # a label outside the draft vocabulary counts as rejected
        share = counts[:depth] / counts[depth:-1].clamp(min=1)
        return loss._replace(agreement=loss.agreement * share)

    def _loss(self, states: list[Tensor], targets: list[Targets], phase: Phase) -> DepthLoss:
        """Return the loss of all depths, with that of the confidence head if there is one."""
        projections = self.head.projections()
        loss = depth_loss(
            states,
            projections,
            targets,
            kind=phase.loss,
            decay=phase.decay,
            depth_weights=phase.depth_weights,
            weighting=phase.weighting,
        )
        every = [self.head.confidence_logits(state) for state in states]
        confidence = [logits for logits in every if logits is not None]
        if not confidence:
            return loss
        by_depth = confidence_loss(confidence, states, projections, targets)
        weights = depth_shares(len(states), phase.decay, phase.depth_weights)
        shares = to_device(torch.tensor(weights, dtype=by_depth.dtype), by_depth.device)
        return loss._replace(total=loss.total + (by_depth * shares).sum())


def _filled(rows: Tensor) -> Tensor:
    """Pad rows to a multiple of `FULL_ROWS` with the first row."""
    return torch.cat([rows, rows[:1].expand(-len(rows) % FULL_ROWS)])


def figures(loss: DepthLoss) -> dict[str, Tensor]:
    """Return the metrics of a head's loss, under the names of metrics.jsonl."""
    found = {"loss": loss.total.detach()}
    for name, values in (("loss", loss.by_depth), ("accept", loss.agreement)):
        found |= {f"{name}/depth_{level}": value for level, value in enumerate(values.unbind())}
    return found


def drawn_labels(
    batch: TokenBatch, head: Head, phase: Phase, seed: int | None = None
) -> Bool[Tensor, "batch time"]:
    """Return the mask of labels that count in the losses of one step.

    It is a random part of the loss mask, drawn per sample from the step's seed and the sample's
    number. Without a seed all labels count; a head with `num_anchors` then gets the same anchors
    each time, because its cost grows with them.
    """
    loss_mask, most = batch.loss_mask, head.num_anchors
    share = 1.0 if seed is None else phase.scored_share
    is_limited = 0 < most < loss_mask.shape[1]
    if share == 1.0 and not is_limited:
        return loss_mask
    drawn = _drawn(batch, seed or 0).to(loss_mask.device)
    loss_mask = loss_mask & (drawn < share)
    if is_limited:
        least = drawn.masked_fill(~loss_mask, 1.0).kthvalue(most, dim=1, keepdim=True).values
        loss_mask &= drawn <= least
    return loss_mask


def own_chains(batch: TokenBatch, phase: Phase, seed: int) -> Bool[Tensor, "batch time"]:
    """Return the first labels of the chains that read the head's own drafts, drawn per sample."""
    # another seed than that of the labels, with which only the lowest numbers are drawn
    return _drawn(batch, derive_seed(seed, -1)) < phase.own_drafts


def _drawn(batch: TokenBatch, seed: int) -> Float[Tensor, "batch time"]:
    """Return a uniform number for each label, drawn from the seed and the sample's number."""
    drawn = torch.empty(batch.tokens.shape)
    for row, sample in zip(drawn, batch.samples, strict=True):
        generator = torch.Generator().manual_seed(derive_seed(seed, sample))
        torch.rand(row.shape, generator=generator, out=row)
    return drawn


def in_chains(head: Head, phase: Phase) -> bool:
    """Return whether all depths of a draft are labelled from one position."""
    return phase.weighting != "geometric" or phase.own_drafts > 0 or head.num_anchors > 0


def label_counts(
    head: Head, batch: TokenBatch, loss_mask: Bool[Tensor, "batch time"], phase: Phase
) -> Int[Tensor, " count"]:
    """Return the labels per depth that can be drafted, all per depth, and the base's own.

    They are the denominators of the depth losses, of the agreements and of the base's own loss.
    """
    labels = depth_labels(head, batch, loss_mask, phase)
    sums = [(labels >= 0).sum((0, 1)), (labels != ABSENT).sum((0, 1))]
    return torch.cat([*sums, own_labels(loss_mask, batch.document_ids).sum()[None]])


def depth_labels(
    head: Head, batch: TokenBatch, loss_mask: Bool[Tensor, "batch time"], phase: Phase
) -> Int[Tensor, "batch time depth"]:
    """Return the label of each depth: a column of the head's logits, -1 or `ABSENT`.

    -1 is a token that the head cannot draft. With `in_chains`, a chain starts at each label of
    `loss_mask` and ends with the batch's loss mask or the document; else all depths have one label.
    """
    depth, ids, nearest = head.depth, batch.document_ids, head.depth
    labels = head.to_drafted(batch.tokens)
    if in_chains(head, phase):
        # all depths draft from one position
        nearest = 1
        labels = _chains(labels, depth)
        inside = _chains(batch.loss_mask, depth).cumprod(-1).bool()
        if ids is not None:
            inside &= _chains(ids, depth) == ids[..., None]
        labels = labels.where(inside, ABSENT)
    else:
        labels = labels[..., None].expand(-1, -1, depth)
    return labels.where(early_enough(loss_mask, ids, nearest)[..., None], ABSENT)


def _chains(values: Shaped[Tensor, "batch time"], depth: int) -> Shaped[Tensor, "batch time depth"]:
    """Return the values from each position on; zeros follow the row."""
    return F.pad(values, (0, depth - 1)).unfold(-1, depth, 1)


def early_enough(
    loss_mask: Bool[Tensor, "batch time"],
    document_ids: Int[Tensor, "batch time"] | None,
    depth: int,
) -> Bool[Tensor, "batch time"]:
    """Exclude the first labels of a text, for which there is no position `depth` + 1 before."""
    if document_ids is None:
        return loss_mask & (torch.arange(loss_mask.shape[1], device=loss_mask.device) > depth)
    return loss_mask & (document_positions(document_ids) > depth)


def own_labels(
    loss_mask: Bool[Tensor, "batch time"], document_ids: Int[Tensor, "batch time"] | None
) -> Bool[Tensor, "batch path"]:
    """Return the positions whose next token counts in the base's own loss."""
    inside = loss_mask[:, 1:]
    return inside if document_ids is None else inside & (document_ids.diff(dim=1) == 0)

"""A head and its loss as one module; it selects the state and the label of each depth."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint

from specheads.core.attention import product_dtype
from specheads.core.drafter import Features, Head
from specheads.core.features import document_places
from specheads.core.machine import to_device
from specheads.heads.layers.block import BlockLayer
from specheads.heads.layers.common import ResidualBlock
from specheads.heads.layers.feedback import FeedbackLayer
from specheads.heads.layers.prefix import PrefixLayer
from specheads.training.losses.confidence import confidence_loss
from specheads.training.losses.depth_loss import (
    LABELS_ONLY,
    DepthLoss,
    Targets,
    depth_loss,
    depth_shares,
)
from specheads.training.settings import Phase

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
        tokens: Tensor,
        loss_mask: Bool[Tensor, "batch time"],
        logits_of: Callable[[Tensor], Tensor],
        phase: Phase,
        counts: Int[Tensor, " level"] | None = None,
    ) -> DepthLoss:
        """Return the loss of every depth over the labels in `loss_mask`.

        With `in_chains`, `loss_mask` marks the first label of each chain. `counts` (see
        `label_counts`) are the denominators of the means; None counts the labels of this batch.
        """
        depth, chains = self.head.depth, in_chains(self.head, phase)
        if counts is None:
            counts = label_counts(self.head, tokens, features.document_ids, loss_mask, phase)
        loss_mask = early_enough(loss_mask, features.document_ids, depth)
        drafted = self.head.to_drafted(tokens)
        loss_mask &= chains | (drafted >= 0)
        # `early_enough` excludes the labels whose position would wrap around
        ahead = [2] if chains else range(2, depth + 2)
        anchors = torch.stack([loss_mask.roll(-places, dims=1) for places in ahead]).any(0)
        # the number of rows is a shape: this synchronises with a GPU once a step
        rows, labels = loss_mask.nonzero(as_tuple=True)
        at = [labels + level if chains else labels for level in range(depth)]
        targets_at = [_filled(drafted[rows, each], -1) for each in at]
        rows, at = _filled(rows), [_filled(each) for each in at]
        sparing = recomputed(self.head) if phase.activation_checkpointing else nullcontext()
        with record_function("head"), sparing:
            states = [
                _as_products(state[rows, at[level] - 2 - level])
                for level, state in enumerate(self.head.states(features, tokens, anchors))
            ]
        project = None if phase.loss in LABELS_ONLY else logits_of
        targets = [
            Targets(one, features.hidden[rows, each - 1].detach(), project, count)
            for one, each, count in zip(
                targets_at, at[: depth if chains else 1], counts, strict=False
            )
        ]
        with record_function("loss"):
            loss = self._loss(states, targets, logits_of, phase)
        # a label outside the draft vocabulary counts as rejected
        share = counts[:depth] / counts[depth].clamp(min=1)
        return replace(loss, agreement=loss.agreement * share)

    def _loss(
        self,
        states: list[Tensor],
        targets: list[Targets],
        logits_of: Callable[[Tensor], Tensor],
        phase: Phase,
    ) -> DepthLoss:
        """Return the loss of all depths, with one target for all or one for each."""
        projections = self.head.projections()
        loss = depth_loss(
            states,
            projections,
            targets if len(targets) > 1 else targets[0],
            kind=phase.loss,
            decay=phase.decay,
            depth_weights=phase.depth_weights,
            weighting=phase.weighting,
        )
        every = [self.head.confidence_logits(state) for state in states]
        confidence = [logits for logits in every if logits is not None]
        if not confidence:
            return loss
        each = targets * (len(states) // len(targets))
        by_depth = confidence_loss(confidence, states, projections, each, logits_of)
        weights = depth_shares(len(states), phase.decay, phase.depth_weights)
        shares = to_device(torch.tensor(weights, dtype=by_depth.dtype), by_depth.device)
        return replace(loss, total=loss.total + (by_depth * shares).sum())


def _filled(rows: Tensor, value: int | None = None) -> Tensor:
    """Pad rows to a multiple of `FULL_ROWS` with `value`, or with the first row."""
    spare = -len(rows) % FULL_ROWS
    if value is not None:
        return F.pad(rows, (0, spare), value=value)
    return torch.cat([rows, rows[:1].expand(spare)])


def _as_products(state: Tensor) -> Tensor:
    """Cast a state to autocast's dtype; a norm may have returned float32."""
    return state.to(product_dtype(state))


def in_chains(head: Head, phase: Phase) -> bool:
    """Return whether all depths of a draft are labelled from one position."""
    return phase.weighting == "dpace" or head.num_anchors > 0


def figures(loss: DepthLoss) -> dict[str, Tensor]:
    """Return the metrics of a head's loss, under the names of metrics.jsonl."""
    by_depth, agreement = loss.by_depth.unbind(), loss.agreement.unbind()
    return (
        {"loss": loss.total.detach()}
        | {f"loss/depth_{level}": value for level, value in enumerate(by_depth)}
        | {f"accept/depth_{level}": value for level, value in enumerate(agreement)}
    )


def label_counts(
    head: Head,
    tokens: Int[Tensor, "batch time"],
    document_ids: Int[Tensor, "batch time"] | None,
    loss_mask: Bool[Tensor, "batch time"],
    phase: Phase,
) -> Int[Tensor, " level"]:
    """Return the number of labels per depth, the number of labels, and that of the base's own loss.

    They are the denominators of the depth losses, of the agreement and of the base's own loss.
    """
    labels = early_enough(loss_mask, document_ids, head.depth)
    drafted = head.to_drafted(tokens) >= 0
    # chains are complete, so values that wrap around the end are not used
    ahead = range(head.depth) if in_chains(head, phase) else [0] * head.depth
    of_depths = [(labels & drafted.roll(-places, dims=1)).sum() for places in ahead]
    return torch.stack([*of_depths, labels.sum(), own_labels(loss_mask, document_ids).sum()])


def early_enough(
    loss_mask: Bool[Tensor, "batch time"],
    document_ids: Int[Tensor, "batch time"] | None,
    depth: int,
) -> Bool[Tensor, "batch time"]:
    """Exclude the first labels of a text, which the deepest level has no position for."""
    if document_ids is None:
        return loss_mask & (torch.arange(loss_mask.shape[1], device=loss_mask.device) > depth)
    return loss_mask & (document_places(document_ids) > depth)


def own_labels(
    loss_mask: Bool[Tensor, "batch time"], document_ids: Int[Tensor, "batch time"] | None
) -> Bool[Tensor, "batch path"]:
    """Return the positions whose next token counts in the base's own loss."""
    return (
        loss_mask[:, 1:]
        if document_ids is None
        else loss_mask[:, 1:] & (document_ids.diff(dim=1) == 0)
    )


LAYERS = BlockLayer, FeedbackLayer, PrefixLayer, ResidualBlock
"""Recomputed layers: only their inputs are stored."""


@contextmanager
def recomputed(head: Head) -> Iterator[None]:
    """Checkpoint the activations of layers called inside the context; gradients are the same."""
    layers = [layer for layer in head.modules() if isinstance(layer, LAYERS)]
    for layer in layers:
        vars(layer)["forward"] = partial(checkpoint, layer.forward, use_reentrant=False)
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["forward"]

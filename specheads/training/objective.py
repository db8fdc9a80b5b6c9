"""A head and its loss as one module: which state of which position predicts which label."""

from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from specheads.config import Phase
from specheads.core.drafter import Features, Head
from specheads.training.losses.depth_loss import LABELS_ONLY, DepthLoss, Targets, depth_loss


class Objective(nn.Module):
    """A head and its loss as one module, so that accelerate can wrap both together."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.head = head

    def forward(
        self,
        features: Features,
        tokens: Tensor,
        scored: Bool[Tensor, "batch time"],
        logits_of: Callable[[Tensor], Tensor],
        phase: Phase,
    ) -> DepthLoss:
        """Return the loss of every depth over the labels that `scored` marks.

        With D-PACE those are first labels of whole chains, each drafted from one position.
        """
        depth, chains = self.head.depth, phase.weighting == "dpace"
        project = None if phase.loss in LABELS_ONLY else logits_of
        scored = early_enough(scored, features, depth)
        drafted = self.head.to_drafted(tokens)
        rows, labels = (scored & (chains | (drafted >= 0))).nonzero(as_tuple=True)
        at = [labels + level if chains else labels for level in range(depth)]
        predicted = torch.zeros_like(scored)  # with D-PACE all labels of the chains
        for places in at:
            predicted[rows, places] = True
        states = [
            state[rows, at[level] - 2 - level]
            for level, state in enumerate(self.head.states(features, tokens, predicted))
        ]
        targets = [
            Targets(drafted[rows, each], features.hidden[rows, each - 1].detach(), project)
            for each in at[: depth if chains else 1]
        ]
        loss = depth_loss(
            states,
            [self.head.projection(level) for level in range(depth)],
            targets if chains else targets[0],
            kind=phase.loss,
            decay=phase.decay,
            depth_weights=phase.depth_weights,
            weighting=phase.weighting,
        )
        # a label that cannot be drafted is a draft that the base will not accept
        drafted_labels = torch.stack([(target.labels >= 0).sum() for target in targets])
        return replace(loss, agreement=loss.agreement * drafted_labels / scored.sum().clamp(min=1))


def early_enough(
    scored: Bool[Tensor, "batch time"], features: Features, depth: int
) -> Bool[Tensor, "batch time"]:
    """Leave out a text's first labels: no position of it is early enough for the deepest head."""
    return scored & (features.places() > depth)

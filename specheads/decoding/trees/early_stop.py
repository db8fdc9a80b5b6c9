"""Stop drafting below a token with low confidence."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specheads.core.drafter import Drafter, State


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Probability that a drafted token is accepted: a logistic regression on traces.

    Source: Mamou et al. 2024, arXiv:2405.04304 (DISCO), for its inputs; DISCO uses a small network.
    """

    bias: float
    log_prob: float
    """Weight of the token's log-probability under the drafter."""
    entropy: float
    """Weight of the entropy of the drafter's distribution, in nats."""
    level: float
    """Weight of the number of drafted tokens above it."""

    def __call__(self, log_probs: Tensor, entropies: Tensor, level: int | Tensor) -> Tensor:
        """Return the probability, element by element."""
        weighed = self.log_prob * log_probs + self.entropy * entropies
        return (self.bias + self.level * level + weighed).sigmoid()


class Stop:
    """Which paths are continued: nothing is drafted below a token of low confidence.

    The token itself is still verified: dropping it would change the output's distribution
    (docs/losslessness.md). Checking whether any path continues saves calls of the drafter and costs
    one synchronisation per level on CUDA.

    The confidence is compared with the token's probability or with the estimate. A drafter with its
    own estimate of acceptance uses that for its best guess; other guesses get it in proportion to
    their probability.
    """

    def __init__(
        self,
        drafter: Drafter,
        confidence: float,
        batch: int,
        device: torch.device,
        estimate: Estimate | None = None,
    ) -> None:
        self.drafter, self.confidence, self.estimate = drafter, confidence, estimate
        if confidence:
            self.alive = torch.ones(batch, 1, dtype=torch.bool, device=device)
            self.present = [self.alive]

    def level(
        self,
        logits: Float[Tensor, "batch level vocab"],
        state: State,
        drafted: Int[Tensor, "batch node"],
        parents: Int[Tensor, " node"],
        inner: Tensor | None,
    ) -> None:
        """Update the paths with one level.

        Args:
            logits: The drafter's logits for the level above.
            state: The drafter's state after the level above.
            drafted: Columns of the logits of this level's nodes.
            parents: Parent of each node.
            inner: Nodes that the drafter reads next; None is all.
        """
        if self.confidence:
            present = self.alive[:, parents]
            logs = logits.log_softmax(-1)
            chosen = logs[:, parents].gather(-1, drafted[..., None])[..., 0]
            if self.estimate is not None:
                entropies = entropy(logs)[:, parents]
                chances = self.estimate(chosen, entropies, len(self.present) - 1)
            elif (sure := self.drafter.confidence(state)) is not None:
                chances = (chosen - logs.amax(-1)[:, parents]).exp() * sure[:, parents]
            else:
                chances = chosen.exp()
            self.present.append(present)
            alive = present & (chances >= self.confidence)
            self.alive = alive if inner is None else alive[:, inner]

    def everywhere(self) -> bool:
        """Return whether all paths of all rows have stopped."""
        return bool(self.confidence) and not self.alive.any()


def entropy(log_probs: Float[Tensor, "*any vocab"]) -> Float[Tensor, "*any"]:
    """Return the entropy of distributions in nats; probabilities of zero add nothing."""
    return torch.special.entr(log_probs.exp()).sum(-1)

"""Stop drafting below a token with low confidence."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specheads.core.drafter import Drafter, State


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceEstimate:
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


def acceptance_chances(
    drafter: Drafter,
    estimate: AcceptanceEstimate | None,
    logits: Float[Tensor, "batch level vocab"],
    state: State,
    drafted: Int[Tensor, "batch node"],
    parents: Int[Tensor, " node"],
    level: int,
) -> Float[Tensor, "batch node"]:
    """Return how likely each node of a level is to be accepted.

    This is the estimate, if there is one, or the token's probability under the drafter. A drafter
    with its own estimate uses that for its best guess, and for others in proportion to their
    probability. `logits` and `state` are those of the level above, `drafted` are the columns of
    this level's nodes, and `level` is the number of drafted tokens above them.
    """
    logs = logits.log_softmax(-1)
    chosen = logs[:, parents].gather(-1, drafted[..., None])[..., 0]
    if estimate is not None:
        return estimate(chosen, entropy(logs)[:, parents], level)
    if (sure := drafter.confidence(state)) is not None:
        return (chosen - logs.amax(-1)[:, parents]).exp() * sure[:, parents]
    return chosen.exp()


def entropy(log_probs: Float[Tensor, "*any vocab"]) -> Float[Tensor, "*any"]:
    """Return the entropy of distributions in nats; probabilities of zero add nothing."""
    return torch.special.entr(log_probs.exp()).sum(-1)

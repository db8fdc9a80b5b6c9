"""When to stop drafting: below a token that the drafter itself doubts."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specheads.core.drafter import Drafter, State


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The chance that a drafted token is right, learned from traces: a logistic regression.

    Source: Mamou et al. 2024, arXiv:2405.04304 (DISCO), for what it looks at; theirs is a small
    network.
    """

    bias: float
    log_prob: float
    """Weight of the logarithm of the probability that the drafter gives the token."""
    entropy: float
    """Weight of the entropy of the drafter's distribution, in nats."""
    level: float
    """Weight of the number of drafted tokens above it."""

    def __call__(self, log_probs: Tensor, entropies: Tensor, level: int) -> Tensor:
        """Return the chance, element by element."""
        weighed = self.log_prob * log_probs + self.entropy * entropies
        return (self.bias + self.level * level + weighed).sigmoid()


class Stop:
    """Which paths go on: nothing is drafted below a token the drafter doubts.

    The doubted token itself stays and is verified: to drop it for what it is would change the
    distribution of the output (docs/losslessness.md). Asking whether any path goes on at all saves
    calls of the drafter, and costs a synchronisation a level on CUDA.

    What is held against the confidence is the token's own probability, or an estimate from it. A
    drafter that says how likely the base is to accept its guess is believed: so likely is its best
    guess, and others are as much less as their probability is.
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
        """Look at one level: its nodes' columns of the logits, and which are read next (None: all).

        Logits and state are what the drafter answered for the level above.
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
        """Tell whether no path of any row goes on."""
        return bool(self.confidence) and not self.alive.any()


def entropy(log_probs: Float[Tensor, "*any vocab"]) -> Float[Tensor, "*any"]:
    """Return the entropy of distributions, in nats; what has no chance adds nothing."""
    return torch.special.entr(log_probs.exp()).sum(-1)

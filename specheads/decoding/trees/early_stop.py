"""When to stop drafting: below a token that the drafter itself doubts."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specheads.core.drafter import Drafter, State


class Stop:
    """Which paths go on: nothing is drafted below a token the drafter doubts.

    The doubted token itself stays and is verified: to drop it for what it is would change the
    distribution of the output (docs/losslessness.md). Asking whether any path goes on at all saves
    calls of the drafter, and costs a synchronisation a level on CUDA.

    A drafter that says how likely the base is to accept its guess is believed: so likely is its
    best guess, and others are as much less as their probability is.
    """

    def __init__(
        self, drafter: Drafter, confidence: float, batch: int, device: torch.device
    ) -> None:
        self.drafter, self.confidence = drafter, confidence
        self.alive = torch.ones(batch, 1, dtype=torch.bool, device=device)
        self.present = [self.alive]

    def level(
        self,
        logits: Float[Tensor, "batch level vocab"],
        state: State,
        drafted: Int[Tensor, "batch node"],
        parents: Int[Tensor, " node"],
        inner: Tensor | slice,
    ) -> None:
        """Look at one level: its nodes' columns of the logits, and which of them are read next.

        Logits and state are what the drafter answered for the level above.
        """
        if self.confidence:
            present = self.alive[:, parents]
            probs = logits.softmax(-1)
            if (sure := self.drafter.confidence(state)) is not None:
                probs = probs * (sure / probs.amax(-1))[..., None]
            probs = probs[:, parents].gather(-1, drafted[..., None])[..., 0]
            self.present.append(present)
            self.alive = (present & (probs >= self.confidence))[:, inner]

    def everywhere(self) -> bool:
        """Tell whether no path of any row goes on."""
        return bool(self.confidence) and not self.alive.any()

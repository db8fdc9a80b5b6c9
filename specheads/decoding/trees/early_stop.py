"""When to stop drafting: below a token that the drafter itself doubts."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


class Stop:
    """Which paths go on: nothing is drafted below a token the drafter doubts.

    The doubted token itself stays and is verified: to drop it for what it is would change the
    distribution of the output (docs/losslessness.md). Asking whether any path goes on at all saves
    calls of the drafter, and costs a synchronisation a level on CUDA.
    """

    def __init__(self, confidence: float, batch: int, device: torch.device) -> None:
        self.confidence = confidence
        self.alive = torch.ones(batch, 1, dtype=torch.bool, device=device)
        self.present = [self.alive]

    def level(
        self,
        logits: Float[Tensor, "batch level vocab"],
        drafted: Int[Tensor, "batch node"],
        parents: Int[Tensor, " node"],
        inner: Tensor | slice,
    ) -> None:
        """Look at one level: its nodes' columns of the logits, and which of them are read next."""
        if self.confidence:
            present = self.alive[:, parents]
            probs = logits.softmax(-1)[:, parents].gather(-1, drafted[..., None])[..., 0]
            self.present.append(present)
            self.alive = (present & (probs >= self.confidence))[:, inner]

    def everywhere(self) -> bool:
        """Tell whether no path of any row goes on."""
        return bool(self.confidence) and not self.alive.any()

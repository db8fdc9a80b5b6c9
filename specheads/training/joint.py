"""Joint training of a base and its head: what the base itself learns meanwhile (Medusa-2).

See docs/joint_training.md. Source: Cai et al. 2024, arXiv:2401.10774, section 2.2.2.
"""

import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from specheads.base.lora import Adapter
from specheads.base.model import FrozenBase
from specheads.config import Joint
from specheads.core.drafter import Features


def head_weight(joint: Joint, place: float) -> float:
    """Return the weight of the head's loss beside the base's own.

    Args:
        joint: Its settings.
        place: In the phase: 0 is its first step, 1 its last.

    Source: arXiv:2401.10774, section 2.3.2, for the sine.
    """
    share = math.sin(math.pi / 2 * place) if joint.ramp == "sine" else 1.0
    return joint.head_weight * share


class JointBase:
    """A frozen base with an adapter that learns, and what it learns from.

    Args:
        base: Gets the adapter's layers, until `adapter.remove`.
        joint: The adapter's settings.
        seed: Of the adapter's first factors.
    """

    def __init__(self, base: FrozenBase, joint: Joint, seed: int) -> None:
        self.base = base
        # taken before the adapter is in: the law of the weights as they are frozen
        self._frozen_law = base.projector()
        self.adapter = Adapter(base.model, joint, seed)

    def read(
        self,
        tokens: Int[Tensor, "batch time"],
        aux_layers: tuple[int, ...],
        counted: Bool[Tensor, "batch time"],
        joint: Joint,
    ) -> tuple[Features, Float[Tensor, ""]]:
        """Return features with gradients, and the base's own loss in nats a label.

        The loss is the text's surprise, or the KL divergence to the base without its adapter.

        Args:
            tokens: What is read.
            aux_layers: Layers whose residual stream the head reads.
            counted: Labels the loss covers; a row's first token is never one.
            joint: Says what is learned.
        """
        rows, places = counted[:, 1:].nonzero(as_tuple=True)
        aims = tokens[rows, places + 1]
        if joint.target == "base":
            # before the forward with gradients: switching off and on touches what they flow to
            with self.adapter.off():
                aims = self.base.read(tokens).hidden[rows, places]
        features = self.base.read(tokens, aux_layers, gradients=True)
        return features, chunked_loss(features.hidden[rows, places], aims, self._row_loss)

    def _row_loss(self, hidden: Tensor, aims: Tensor) -> Tensor:
        """Return the summed loss of states that aim at labels, or at the teacher's states."""
        logits = self.base.logits(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if aims.ndim == 1:
            return F.cross_entropy(logits, aims, reduction="sum")
        law = self._frozen_law(aims).to(logits.dtype).log_softmax(-1)
        return F.kl_div(logits.log_softmax(-1), law, reduction="sum", log_target=True)


def chunked_loss(
    hidden: Float[Tensor, "row width"],
    aims: Tensor,
    row_loss: Callable[[Tensor, Tensor], Tensor],
    chunk_rows: int = 512,
) -> Float[Tensor, ""]:
    """Return the mean over rows of a loss that sums over the rows it is given.

    A chunk's logits are made anew for its gradients, so that no more than one chunk's are ever
    held. Unlike `depth_loss.depth_loss` this keeps no gradient of a whole projection matrix: the
    base's own is frozen.
    """
    chunks = zip(hidden.split(chunk_rows), aims.split(chunk_rows), strict=True)
    sums = [checkpoint(row_loss, rows, goals, use_reentrant=False) for rows, goals in chunks]
    return torch.stack(sums).sum() / max(len(hidden), 1)


def average_gradients(parameters: Sequence[nn.Parameter], mean: Callable[[Tensor], Tensor]) -> None:
    """Average gradients over processes, all in one message; without gradients do nothing.

    Args:
        parameters: The adapter's: unlike the head they are in no module that does this itself.
        mean: Gives the mean of a tensor over all processes.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return
    averaged = mean(torch.cat([gradient.flatten() for gradient in gradients]))
    pieces = averaged.split([gradient.numel() for gradient in gradients])
    for gradient, piece in zip(gradients, pieces, strict=True):
        gradient.copy_(piece.view_as(gradient))

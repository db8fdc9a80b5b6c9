"""Loss of a confidence head, which predicts the acceptance rate of its own drafts.

Source: deepseek-ai/DeepSpec, deepspec/modeling/dspark/loss.py.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from specheads.training.losses.depth_loss import Targets, rows_of

CHUNK_LOGITS = {"cpu": 2**24, "cuda": 2**26}
"""Logits in memory at once, of the draft and of the base each."""


def confidence_loss(
    predicted: Sequence[Float[Tensor, " row"]],
    states: Sequence[Float[Tensor, "row width"]],
    projections: Sequence[tuple[Tensor, Tensor | None]],
    targets: Sequence[Targets],
    logits_of: Callable[[Tensor], Tensor],
) -> Float[Tensor, " depth"]:
    """Return the binary cross-entropy per depth between the predicted and the true acceptance rate.

    The true rate is the overlap of draft and base distribution, one minus their total variation
    distance. It carries no gradient. Rows without a label are excluded.
    """
    losses = []
    for logits, state, projection, target in zip(
        predicted, states, projections, targets, strict=True
    ):
        drafted = target.labels >= 0
        rates = acceptance_rates(state, projection, target.base_hidden, logits_of)
        found = F.binary_cross_entropy_with_logits(logits.to(rates.dtype), rates, reduction="none")
        count = drafted.sum() if target.count is None else target.count
        losses.append(found.where(drafted, 0.0).sum() / count.clamp(min=1))
    return torch.stack(losses)


@torch.no_grad()
def acceptance_rates(
    states: Float[Tensor, "row width"],
    projection: tuple[Tensor, Tensor | None],
    base_hidden: Float[Tensor, "row base"],
    logits_of: Callable[[Tensor], Tensor],
) -> Float[Tensor, " row"]:
    """Return the sum over tokens of the minimum of draft and base probability."""
    weight, bias = (None if one is None else one.to(states.dtype) for one in projection)
    assert weight is not None
    precision = torch.promote_types(states.dtype, torch.float32)
    chunk = rows_of(weight, CHUNK_LOGITS)
    rates = [
        torch.minimum(
            F.linear(some, weight, bias).to(precision).softmax(-1),
            logits_of(base).to(precision).softmax(-1),
        ).sum(-1)
        for some, base in zip(states.split(chunk), base_hidden.split(chunk), strict=True)
    ]
    return torch.cat(rates).clamp_(max=1.0)

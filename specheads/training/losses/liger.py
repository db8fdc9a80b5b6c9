"""Hard-label cross-entropy with liger-kernel's fused Triton kernels (extra `cuda`).

The kernels support one projection per depth and one label per row. Other losses, and depths that
share a projection, use the chunked loss of depth_loss.py: liger-kernel would need the base's whole
distribution of shape (row, vocab), and one gradient of the projection per depth.
"""

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

LEFT_OUT = -1
DEVICE = "cuda"


def fits(
    kind: str,
    states: Sequence[Float[Tensor, "row width"]],
    projections: Sequence[tuple[Tensor, Tensor | None]],
) -> bool:
    """Return whether liger-kernel is installed and supports this loss without more memory."""
    weights = [weight for weight, _ in projections]
    return (
        kind == "cross_entropy"
        and len(states[0]) > 0
        and all(weight.device.type == DEVICE for weight in weights)
        and all(weight.dtype == states[0].dtype for weight in weights)
        and len({id(weight) for weight in weights}) == len(weights)
        and find_spec("liger_kernel") is not None
    )


def cross_entropy(
    state: Float[Tensor, "row width"],
    weight: Float[Tensor, "vocab width"],
    bias: Float[Tensor, " vocab"] | None,
    labels: Int[Tensor, " row"],
    rows: Int[Tensor, ""],
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Return the mean cross-entropy in nats, and the share of rows whose argmax is the label.

    `rows` is the denominator of both. A label of -1 excludes its row.
    """
    ops: Any = import_module("liger_kernel.ops")
    rows = rows.clamp(min=1)
    # positional arguments, as torch requires: no class weights, ignored label, no z loss, no
    # smoothing, sum, no soft cap, no returned z loss, gradients in the weight's dtype, no scaling
    # by token, returned accuracy
    found = ops.LigerFusedLinearCrossEntropyFunction.apply(
        state, weight, labels, bias, None, LEFT_OUT, 0.0, 0.0, "sum", None, False, None, False, True
    )
    total, accuracy = found[0], found[2]
    return total / rows, torch.nan_to_num(accuracy) * (labels != LEFT_OUT).sum() / rows

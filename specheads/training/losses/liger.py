"""Hard-label cross-entropy by liger-kernel's fused Triton kernels, where they fit.

The optional extra `cuda` brings them. They score one projection at a time against one label a
row, so they serve cross-entropy on the text's labels. The base's distribution they would need
whole, (row, vocab), as `LigerFusedLinearKLDivFunction` reads it; and depths that share a
projection would each return a gradient of its size. Those go the chunked way of depth_loss.py.
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
    """Return whether liger-kernel is there and computes this loss in no more memory than ours."""
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
    """Return the mean surprise in nats, and the share of rows whose likeliest token is the label.

    Both are over so many `rows`, of which these may be some. A label of -1 leaves its row out.
    """
    ops: Any = import_module("liger_kernel.ops")
    rows = rows.clamp(min=1)
    # by position, as torch requires: no class weights, ignored label, no z loss, no smoothing,
    # a sum, no soft cap, no z loss returned, gradients in the weight's precision, no scaling by
    # the token, the accuracy returned
    found = ops.LigerFusedLinearCrossEntropyFunction.apply(
        state, weight, labels, bias, None, LEFT_OUT, 0.0, 0.0, "sum", None, False, None, False, True
    )
    total, accuracy = found[0], found[2]
    return total / rows, torch.nan_to_num(accuracy) * (labels != LEFT_OUT).sum() / rows

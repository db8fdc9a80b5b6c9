"""FLOPs of a computation, and the FLOP/s of this machine."""

import math
import statistics
import time
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from specheads.core.machine import synchronise

SIDES = {"cuda": 8192, "cpu": 1024}
"""Size of the square matrices that measure the machine FLOP/s, large enough for the full rate.
All products together take less than a second."""
PRODUCTS = 12
"""Number of timed products; the median counts."""


def flop_counter() -> FlopCounterMode:
    """Return torch's counter of floating-point operations, two per multiplication.

    It counts products and fused attention, also the products with packed weights on a CPU.
    """

    def linear(rows: torch.Size, *_: Any, out_shape: torch.Size, **__: Any) -> int:
        return 2 * rows[-1] * math.prod(out_shape)

    def attention(query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any) -> int:
        # two products
        return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])

    def attention_backward(_: torch.Size, *shapes: Any, **__: Any) -> int:
        # five products: the scores again, and the gradients of scores, queries, keys and values
        query, key, value = shapes[:3]
        return 2 * math.prod(query[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1])

    packed = (
        getattr(torch.ops.mkl, "_mkl_linear", None),
        getattr(torch.ops.mkldnn, "_linear_pointwise", None),
    )
    # torch 2.11 refuses to count queries with more heads than their keys
    fused = [f"_scaled_dot_product_{name}_attention" for name in ("flash", "efficient", "cudnn")]
    formulas = {one: linear for one in packed if one}
    formulas |= {getattr(torch.ops.aten, name): attention for name in fused}
    formulas |= {getattr(torch.ops.aten, f"{name}_backward"): attention_backward for name in fused}
    return FlopCounterMode(display=False, custom_mapping=formulas)


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the FLOP/s of this machine in large matrix products."""
    side = SIDES.get(device.type, SIDES["cuda"])
    # does not change the random state
    generator = torch.Generator(device).manual_seed(0)
    one = torch.randn(side, side, device=device, generator=generator).to(dtype)
    times = []
    for _ in range(PRODUCTS):
        synchronise(device)
        began = time.perf_counter()
        torch.mm(one, one)
        synchronise(device)
        times.append(time.perf_counter() - began)
    return 2 * side**3 / statistics.median(times)

"""Shows on the device "meta" whether code waits for a GPU.

Tensors there have shapes but no values, and reading a value raises. Copies from the host are
recorded, because torch waits for them too.
"""

import traceback
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

META = torch.device("meta")


class Waits(TorchDispatchMode):
    """Counts the operations that synchronise: `nonzero`, and copies of arrays from the host."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Counter[str]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        if func is torch.ops.aten.nonzero.default:
            self.found["nonzero"] += 1
            return torch.empty((8, args[0].ndim), dtype=torch.long, device=META)
        out = func(*args, **(kwargs or {}))
        read, made = _devices((args, kwargs)), _devices(out)
        if "cpu" in read and "meta" in read | made:
            frames = [frame for frame in traceback.extract_stack() if "specheads" in frame.filename]
            self.found[f"{func} of {frames[-1].filename}:{frames[-1].lineno}"] += 1
        return out


def _devices(values: Any) -> set[str]:
    arrays = (one for one in tree_leaves(values) if isinstance(one, Tensor) and one.ndim > 0)
    return {one.device.type for one in arrays}

"""Functions that a compiled graph calls as they are."""

from collections.abc import Callable

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("specheads", "FRAGMENT")


def opaque(
    name: str, function: Callable[..., Tensor], shaped: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """Return a function of tensors as an operator whose inside no compiler looks at.

    It takes what `function` does, by annotations that say all, and returns new memory. `shaped`
    returns an empty result. (`torch.library.custom_op` does this too, and adds 37 microseconds to
    each call where this adds 7: a step makes hundreds.)
    """
    _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()))
    for device in ("CPU", "CUDA"):
        _LIBRARY.impl(name, function, device)
    torch.library.register_fake(f"specheads::{name}", shaped, lib=_LIBRARY)
    return getattr(torch.ops.specheads, name).default

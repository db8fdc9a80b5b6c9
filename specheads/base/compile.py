"""Forwards as compiled graphs: one for all shapes on a CPU, a CUDA graph for each on a GPU.

See docs/compile.md.
"""

from collections.abc import Callable
from typing import Any

import torch

from specheads.core.errors import InputError

EXTENT = 256
"""On CUDA a forward looks at a multiple of so many slots: as many graphs as a text is long."""


def compiled(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Return the function compiled for this device; it is compiled when it is called first.

    On a CPU sizes are symbols: rows, nodes and slots may change from call to call. On CUDA every
    combination of them is recorded as a CUDA graph of its own, and what the function returns is
    overwritten by its next call. A ValueError that says what is missing to compile comes then.
    """
    # the compiler takes a second or two to import: whoever does not compile does without it
    from torch._inductor.exc import InductorError

    static = device.type == "cuda"
    mode = "reduce-overhead" if static else None
    graphs = torch.compile(function, dynamic=not static, mode=mode)

    def call(*args: Any, **settings: Any) -> Any:
        if static:
            torch.compiler.cudagraph_mark_step_begin()
        try:
            # beyond so many shapes a function runs as it is written
            with torch._dynamo.config.patch(recompile_limit=128):
                return graphs(*args, **settings)
        except InductorError as error:
            raise InputError(
                f"compile=true needs a working compiler, C++ on a CPU and Triton on CUDA: "
                f"{str(error).splitlines()[0]}; install one (g++), or leave compile=true out"
            ) from error

    return call

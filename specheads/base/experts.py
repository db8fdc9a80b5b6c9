"""The experts of a mixture-of-experts base: which code of transformers computes them, and how."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

GROUPED = "grouped_mm"
"""transformers' default: one grouped product for all experts. "eager" is one product for each."""
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def experts_of(model: nn.Module) -> list[Any]:
    """Return the modules whose implementation transformers chooses by a setting, one per layer."""
    # set by transformers' decorator use_experts_implementation
    return [module for module in model.modules() if hasattr(module, "is_transposed")]


def choose_experts(model: PreTrainedModel, modules: Sequence[Any]) -> None:
    """Use transformers' eager experts where torch has no grouped product for a base's weights.

    `modules` are those of `experts_of`, which are alike. torch lacks the product in float64, and
    for rows that are not a multiple of 16 bytes.
    """
    config: Any = model.config.get_text_config()
    if not modules or config._experts_implementation != GROUPED:
        return
    config._experts_implementation = implementation_for(modules[0])


def implementation_for(module: nn.Module) -> str:
    """Return transformers' implementation of experts that torch has for their weights."""
    # others are quantised, and have code of their own
    matrices = [
        matrix
        for matrix in module.parameters(recurse=False)
        if matrix.ndim == 3 and matrix.dtype in DTYPES
    ]
    lacks_product = any(
        matrix.dtype == torch.float64 or size * matrix.itemsize % 16
        for matrix in matrices
        for size in matrix.shape[1:]
    )
    return "eager" if lacks_product else GROUPED


@contextmanager
def double_tokens(experts: list[nn.Module]) -> Iterator[None]:
    """Give each token to its experts twice: torch can sum the only row of a product differently."""
    with ExitStack() as hooks:
        for module in experts:
            before = module.register_forward_pre_hook(_double_rows, with_kwargs=True)
            after = module.register_forward_hook(lambda _, __, out: out[: len(out) // 2])
            hooks.callback(before.remove)
            hooks.callback(after.remove)
        yield


def _double_rows(_: nn.Module, args: Any, settings: Any) -> tuple[Any, Any]:
    """Return the arguments of experts with every row, which stands for a token, twice."""
    doubled = [torch.cat([values, values]) for values in args]
    doubled_settings = {name: torch.cat([values, values]) for name, values in settings.items()}
    return tuple(doubled), doubled_settings

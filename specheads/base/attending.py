"""Attention of ours in the place of a model's own, for as long as a forward lasts."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from transformers import AttentionInterface, PreTrainedConfig

SPECIAL = ("softcap", "position_bias", "s_aux")
"""What some models add to attention, and plain products do not know."""


@contextmanager
def replaced(config: PreTrainedConfig, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Let the model of this config attend by a function, known to transformers by a name."""
    AttentionInterface.register(name, function)
    before, config._attn_implementation = config._attn_implementation, name
    try:
        yield
    finally:
        config._attn_implementation = before


def is_special(settings: Mapping[str, Any]) -> bool:
    """Return whether what a model calls its attention with asks for more than plain products."""
    return any(settings.get(name) is not None for name in SPECIAL)

"""Text engines: one module per engine, each with a function `build` like the one here."""

from importlib import import_module

from specheads.base.model import FrozenBase
from specheads.core.drafter import Head
from specheads.training.distill.engine import TextEngine
from specheads.training.settings import Distill


def build(
    settings: Distill, base: FrozenBase, head: Head | None = None, max_length: int = 0
) -> TextEngine:
    """Build the engine of the settings.

    Args:
        settings: Settings of generation.
        base: The loaded base.
        head: Drafter of the local engine.
        max_length: Maximum tokens of prompt and answer; zero if only the context limits
            them.
    """
    module = import_module(f"specheads.training.distill.engines.{settings.engine}")
    return module.build(settings, base, head, max_length)

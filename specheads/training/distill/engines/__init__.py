"""Text engines: one module per engine, each with `build(options) -> TextEngine`."""

from importlib import import_module

from specheads.training.distill.engine import EngineOptions, TextEngine


def build(name: str, options: EngineOptions) -> TextEngine:
    """Build an engine by its name, one of `ENGINES` in specheads/training/settings.py."""
    return import_module(f"specheads.training.distill.engines.{name}").build(options)

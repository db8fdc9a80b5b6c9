"""Who answers: a module an engine, each with `build(how: Writing) -> Engine`."""

from importlib import import_module

from specheads.training.distill.engine import Engine, Writing


def build(name: str, how: Writing) -> Engine:
    """Make an engine by its name, one of `ENGINES` in specheads/config/schedule.py."""
    return import_module(f"specheads.training.distill.engines.{name}").build(how)

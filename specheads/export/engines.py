"""The engines there are layouts for: one module of `layouts/` an engine, none registered."""

import dataclasses
import importlib
import pkgutil
from types import ModuleType

from specheads.base.model import FrozenBase
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.export import layouts
from specheads.export.layout import Layout


def engines() -> list[str]:
    """Return the engines there are layouts for: the modules of `layouts/`."""
    found = (module.name for module in pkgutil.iter_modules(layouts.__path__))
    return sorted(name for name in found if not name.startswith("_"))


def engine_module(engine: str) -> ModuleType:
    """Return an engine's module, with `ABOUT` and `LAYOUTS`."""
    if engine not in engines():
        raise InputError(f"engine must be one of {', '.join(engines())}; got {engine!r}")
    return importlib.import_module(f"specheads.export.layouts.{engine}")


def find_layout(head: Head, base: FrozenBase, engine: str) -> Layout:
    """Return the layout that can hold this head; where there is none, name engines that have."""
    layout = _of(engine, head)
    if reason := objection(head, base, layout):
        others = [name for name in engines() if not objection(head, base, _of(name, head))]
        raise InputError(
            f"engine {engine} cannot serve this {head.kind} head: {reason}; engines that can: "
            f"{', '.join(others) or 'none'}"
        )
    assert layout is not None
    return layout


def objection(head: Head, base: FrozenBase, layout: Layout | None) -> str:
    """Return why a layout cannot hold a head; empty where it can."""
    if layout is None:
        return "it does not load this kind"
    for item in dataclasses.fields(head.config):
        value, allowed = getattr(head.config, item.name), layout.settings.get(item.name, ())
        named = item.name in layout.settings
        made = item.default_factory
        default = item.default if made is dataclasses.MISSING else made()
        if not (allowed is None or value in allowed or (not named and value == default)):
            return f"it cannot hold {item.name}={value!r}"
    return layout.objection(head, base) if layout.objection else ""


def _of(engine: str, head: Head) -> Layout | None:
    return engine_module(engine).LAYOUTS.get(head.kind)

"""Heads in the layouts of serving engines: one module of `layouts/` an engine, none registered.

An engine's module has `ABOUT` and `LAYOUTS`, by kind of head. A layout says what it can hold,
writes it, and names the reader that loads it back for the parity gate (see parity.py): readers
follow the engine's documented formulas and share no code with the heads. The runtime of vLLM's
plug-in is specheads/export/vllm.py; `layouts/vllm.py` is what it is given. See
docs/export_matrix.md.
"""

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from specheads.base import FrozenBase
from specheads.drafter import Head
from specheads.export import layouts
from specheads.export.readers import Reader

RECORD = "specheads.json"
"""In every export: which head for which base, and what the gate counted. Engines ignore it."""

VERIFIED = ("run", "layout")
"""How far a layout is verified: by running the engine, or by reading it back as documented."""


@dataclass(frozen=True, slots=True)
class Folder:
    """What an export consists of, before it is written."""

    config: dict[str, Any]
    """config.json."""
    tensors: dict[str, Tensor]
    serve: tuple[str, ...]
    """Command lines that serve it."""
    weights_file: str = "model.safetensors"
    files: dict[str, str] = field(default_factory=dict)
    """Further text files, by name."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How one engine has one kind of head."""

    write: Callable[[Head, FrozenBase, Path], Folder]
    """Takes the folder's future place too, for command lines."""
    read: Reader
    """Loads it back as the engine would: see readers.py."""
    settings: Mapping[str, Collection[Any] | None]
    """Which values of the kind's `Config` it can hold, None being all. What is not named must
    stand at its default, so that no option is ever left out silently."""
    verified: str
    """One of `VERIFIED`."""
    note: str
    """What was verified, against which version."""
    objection: Callable[[Head, FrozenBase], str] | None = None
    """Says why this head on this base does not fit, where its settings alone do not tell."""
    limits: str = ""
    """The rule behind `objection`, for people."""


def engines() -> list[str]:
    """Return the engines there are layouts for: the modules of `layouts/`."""
    found = (module.name for module in pkgutil.iter_modules(layouts.__path__))
    return sorted(name for name in found if not name.startswith("_"))


def engine_module(engine: str) -> ModuleType:
    """Return an engine's module, with `ABOUT` and `LAYOUTS`.

    Raises:
        ValueError: There is no such engine.
    """
    if engine not in engines():
        raise ValueError(f"engine must be one of {', '.join(engines())}; got {engine!r}")
    return importlib.import_module(f"{layouts.__name__}.{engine}")


def find_layout(head: Head, base: FrozenBase, engine: str) -> Layout:
    """Return the layout that can hold this head.

    Raises:
        ValueError: The engine has none; names the engines that do.
    """
    layout = _of(engine, head)
    if reason := objection(head, base, layout):
        others = [name for name in engines() if not objection(head, base, _of(name, head))]
        raise ValueError(
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
        if not (allowed is None or value in allowed or (not named and value == item.default)):
            return f"it cannot hold {item.name}={value!r}"
    return layout.objection(head, base) if layout.objection else ""


def _of(engine: str, head: Head) -> Layout | None:
    return engine_module(engine).LAYOUTS.get(head.kind)

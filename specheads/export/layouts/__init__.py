"""Layouts of serving engines: one module per engine, found by listing this folder.

Each module has `ABOUT` (the engine and its version) and `LAYOUTS` (one `Layout` per kind of head).
See docs/export_matrix.md.
"""

import importlib
import pkgutil
from dataclasses import asdict
from types import ModuleType

from specheads.base.ends import BaseEnds
from specheads.base.recurrent import SERVED, layer_kinds
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.export.layouts._shared import Layout

STATEFUL_ENGINES = ("base", "sglang", "speculators", "vllm")
"""Layouts for engines that roll back the states of the bases in `SERVED`."""


def engines() -> list[str]:
    """Return the names of all engines."""
    names = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(name for name in names if not name.startswith("_"))


def engine_module(engine: str) -> ModuleType:
    """Import the module of an engine."""
    if engine not in engines():
        raise InputError(f"engine must be one of {', '.join(engines())}; got {engine!r}")
    return importlib.import_module(f"{__name__}.{engine}")


def find_layout(head: Head, base: BaseEnds, engine: str) -> Layout:
    """Return the engine's layout for this head; the error names the engines that can serve it."""
    if reason := objection(head, base, engine):
        engines_that_can = [name for name in engines() if not objection(head, base, name)]
        raise InputError(
            f"engine {engine} cannot serve this {head.kind} head: {reason}; engines that can: "
            f"{', '.join(engines_that_can) or 'none'}"
        )
    return engine_module(engine).LAYOUTS[head.kind]


def objection(head: Head, base: BaseEnds, engine: str) -> str:
    """Return why an engine cannot serve a base with a head, or an empty string."""
    layout, kind = engine_module(engine).LAYOUTS.get(head.kind), base.config.model_type
    if layout is None:
        return "it does not load this kind"
    if layer_kinds(base.config) and not (kind in SERVED and engine in STATEFUL_ENGINES):
        return f"it drafts for no base of type {kind}, whose layers keep states"
    return _layout_objection(head, base, layout)


def _layout_objection(head: Head, base: BaseEnds, layout: Layout) -> str:
    if head.drafts_blocks and base.projection.bias is not None:
        return "it applies the base's lm_head to such heads without its bias"
    if head.adds_to_base_logits and base.projection.scale != 1.0 and head.draft_ids is None:
        return "its correction adds to logits that the engine does not scale as the base does"
    if layout.settings is not None:
        defaults = asdict(type(head.config)())
        for name, value in asdict(head.config).items():
            allowed = layout.settings.get(name, (defaults[name],))
            if allowed is not None and value not in allowed:
                return f"it cannot hold {name}={value!r}"
    if layers := list(head.aux_layers):
        if layout.num_aux not in (0, len(layers)):
            return f"the engine reads {layout.num_aux} layers, head.aux_layers are {layers}"
        if not layout.lowest <= min(layers) <= max(layers) < base.num_layers:
            outputs = f"{layout.lowest} to {base.num_layers - 1}"
            return (
                f"the engine reads the streams after layers {outputs}, head.aux_layers are {layers}"
            )
    return layout.objection(head, base) if layout.objection else ""

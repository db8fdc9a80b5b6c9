"""Import rules: folders are layers, imports go to the same or a lower layer, without cycles."""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
import torch
from jaxtyping import TypeCheckError

from specheads.core.files import local_path
from specheads.decoding.accept import draw

PACKAGE = Path(__file__).parents[1] / "specheads"
FLOORS = (
    ("core",),
    ("config",),
    ("base", "data"),
    ("heads", "decoding", "runs"),
    ("training", "measure"),
    ("export",),
    ("commands",),
)
"""Lowest first: a folder imports from its own layer and from lower ones."""

FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

LIBRARIES = {
    "hydra": {"config.compose"},
    "omegaconf": {"config.compose"},
    "pydantic": {"core", "measure.results"},
    "accelerate": {"commands", "training", "runs.trackers"},
    "peft": {"base.lora"},
    "jinja2": {"measure.report"},
    "wandb": {"runs.trackers"},
    "openai": {"training.distill.openai", "training.feature_server"},
}
"""Folders or modules that may import a library."""

# __init__ and __main__ are above all layers: the public names and the command line
FILES = [
    path for path in sorted(PACKAGE.rglob("*.py")) if path.parent != PACKAGE or path.stem[0] != "_"
]


def name(path: Path) -> str:
    """Return the name of a module within the package; an __init__ has that of its folder."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name(path): path for path in FILES}
KINDS = sorted(module for module in MODULES if module.startswith("heads.kinds."))


def imported(path: Path) -> Iterator[str]:
    """Yield the imports of a module, including late ones and type-only ones."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def inside(path: Path) -> set[str]:
    """Return the modules of the package that one module imports."""
    found = set()
    for full in imported(path):
        inner = full.removeprefix("specheads.")
        # in `from specheads.a.b import c` either a.b.c or a.b is the module
        found |= {inner, inner.rpartition(".")[0]} if inner != full else set()
    return (found & MODULES.keys()) - {name(path)}


@cache
def graph() -> dict[str, set[str]]:
    """Return the import graph of the package."""
    return {module: inside(path) for module, path in MODULES.items()}


def room(module: str) -> str:
    return module.partition(".")[0]


def test_modules_import_only_their_own_layer_and_lower_ones():
    pairs = [(module, other) for module in MODULES for other in graph()[module]]
    assert [pair for pair in pairs if FLOOR[room(pair[1])] > FLOOR[room(pair[0])]] == []


def test_folders_and_modules_form_no_cycle():
    folders: dict[str, set[str]] = {folder: set() for folder in FLOOR}
    for module, targets in graph().items():
        folders[room(module)] |= {room(target) for target in targets} - {room(module)}
    for imports in (folders, graph()):
        # raises CycleError, which shows the cycle
        TopologicalSorter(imports).prepare()


def test_libraries_are_imported_only_where_allowed():
    strangers = [
        (module, library)
        for module, path in MODULES.items()
        for full in imported(path)
        for library, allowed in LIBRARIES.items()
        if f"{full}.".startswith(f"{library}.") and not {room(module), module} & allowed
    ]
    assert strangers == []


def test_heads_do_not_import_each_other():
    assert [(kind, other) for kind in KINDS for other in graph()[kind] if other in KINDS] == []


def test_shapes_and_types_are_checked_in_tests():
    probs, uniforms = torch.full((2, 3, 4), 0.25), torch.rand(2, 5)
    with pytest.raises(TypeCheckError, match="uniforms"):
        draw(probs, uniforms)
    wrong: Any = 3
    with pytest.raises(TypeError, match="parameter path"):
        local_path(wrong)

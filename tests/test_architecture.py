"""Imports go up the page of layers only, and each outside library has its room."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "specheads"
LAYERS = (
    (
        "tree",
        "accept",
        "noise",
        "losses",
        "row_losses",
        "gradients",
        "liger",
        "metrics",
        "muon",
        "layout",
        "interrupt",
    ),
    (
        "config",
        "detokenize",
        "drafter",
        "features",
        "feedback",
        "sampling",
        "rules",
        "attention",
        "cache",
        "compiled",
        "paged",
        "flex",
        "mask",
        "adapter",
        "base",
        "loading",
        "selfcheck",
        "joint",
        "prefix",
        "weights",
    ),
    (
        "heads",
        "baselines",
        "graft",
        "shape",
        "stop",
        "grow",
        "sampled",
        "product",
        "text",
        "schedule",
    ),
    (
        "decode",
        "engine",
        "loop",
        "stream",
        "measure",
        "tune",
        "trainer",
        "objective",
        "meter",
        "checkpoint",
        "export",
        "track",
    ),
    ("commands",),
)
LAYER = {room: layer for layer, rooms in enumerate(LAYERS) for room in rooms}
ROOMS = {
    "hydra": {"commands"},
    "omegaconf": {"commands"},
    "accelerate": {"commands", "trainer"},
    "peft": {"adapter"},
    "wandb": {"track"},
    "trackio": {"track"},
    "tensorboard": {"track"},
    "torch.utils.tensorboard": {"track"},
}
# __init__ and __main__ stand above the layers: the public names and the command line
MODULES = [
    path for path in sorted(PACKAGE.rglob("*.py")) if path.parent != PACKAGE or path.stem[0] != "_"
]
HEADS = sorted(path.stem for path in (PACKAGE / "heads").glob("[!_]*.py"))


def name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rooms(path: Path) -> set[str]:
    return {module.split(".")[1] for module in imported(path) if module.startswith("specheads.")}


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_every_module_imports_only_its_own_layer_and_those_below(path):
    layer = LAYER[name(path).split(".")[0]]
    assert {room for room in rooms(path) if LAYER.get(room, len(LAYERS)) > layer} == set()


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_outside_libraries_stay_in_their_rooms(path):
    room = name(path).split(".")[0]
    strangers = {
        library
        for library, allowed in ROOMS.items()
        for module in imported(path)
        if f"{module}.".startswith(f"{library}.") and room not in allowed
    }
    assert strangers == set()


@pytest.mark.parametrize("path", [path for path in MODULES if path.stem in LAYERS[0]], ids=name)
def test_the_lowest_layer_knows_torch_and_nothing_heavier(path):
    known = {"specheads", "torch", "jaxtyping", *sys.stdlib_module_names}
    assert {module.split(".")[0] for module in imported(path)} <= known


@pytest.mark.parametrize("kind", HEADS)
def test_no_head_imports_another(kind):
    others = {f"specheads.heads.{other}" for other in HEADS if other != kind}
    modules = set(imported(PACKAGE / "heads" / f"{kind}.py"))
    assert not any(f"{module}.".startswith(f"{other}.") for module in modules for other in others)

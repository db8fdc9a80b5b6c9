"""Checkpoints that are whole or absent: checksums say which, and the newest whole one counts."""

import hashlib
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specheads.core.errors import InputError
from specheads.core.files import atomic_folder
from specheads.runs.directory import as_json

SUMS = "checksums.json"


class Checkpoint(NamedTuple):
    """What a checkpoint holds."""

    state: dict[str, Any]
    """JSON-able; holds at least `step`."""
    weights: dict[str, Tensor]
    """Tensors of the head."""
    optimizer: dict[str, Any]
    """State dicts of tensors and plain values."""
    adapter: dict[str, Tensor]
    """Tensors of the base's adapter; empty where no phase trains the base."""


def save(folder: Path, held: Checkpoint, kept: int = 2) -> None:
    """Write a checkpoint as `step-N` into a folder, and remove those that count no more.

    These are all but the newest `kept`, at least one, and those of later steps: training goes on
    from before them only where they are damaged.
    """
    target = folder / f"step-{held.state['step']}"
    with atomic_folder(target) as scratch:
        for name, tensors in (("head", held.weights), ("adapter", held.adapter)):
            if tensors:
                whole = {key: value.contiguous() for key, value in tensors.items()}
                save_file(whole, scratch / f"{name}.safetensors")
        # through a stream of ours, so that a full disk is told as such
        with (scratch / "optimizer.pt").open("wb") as stream:
            torch.save(held.optimizer, stream)
        (scratch / "state.json").write_text(as_json(held.state), encoding="utf-8")
        sums = {file.name: _sha256(file) for file in sorted(scratch.iterdir())}
        (scratch / SUMS).write_text(as_json(sums), encoding="utf-8")
    steps = _steps(folder)
    for other in {*steps} - {*steps[: steps.index(target) + 1][-kept:]}:
        shutil.rmtree(other)


def newest(folder: Path, tell: Callable[[str], object] = warnings.warn) -> Checkpoint | None:
    """Return the newest checkpoint of a folder that is whole, None where there is none at all.

    Damaged ones after it are named in a line for people.

    Raises:
        ValueError: There are some, and none is whole.
    """
    damaged: list[str] = []
    for found in reversed(_steps(folder)):
        try:
            held = _read(found)
        except ValueError as error:
            damaged.append(f"{found.name} ({error})")
            continue
        if damaged:
            told = f"damaged checkpoints in {folder}: {', '.join(damaged)}"
            tell(f"{told}; going on from {found.name}")
        return held
    if damaged:
        raise InputError(
            f"a run goes on from a whole checkpoint, and those in {folder} are damaged: "
            f"{', '.join(damaged)}; put back what was written, or remove the folder to train anew"
        )
    return None


def _read(folder: Path) -> Checkpoint:
    """Return a checkpoint.

    Raises:
        ValueError: It is not what was written; in a few words.
    """
    try:
        sums = json.loads((folder / SUMS).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        sums = None
    if not isinstance(sums, dict):
        raise ValueError(f"no readable {SUMS}")
    there = {item.name for item in folder.iterdir()} - {SUMS}
    if strangers := there ^ set(sums):
        raise ValueError(f"{min(strangers)} is {'too much' if there - set(sums) else 'missing'}")
    for name, expected in sums.items():
        if not (folder / name).is_file() or _sha256(folder / name) != expected:
            raise ValueError(f"{name} is not what was written")
    try:
        adapter = folder / "adapter.safetensors"
        held = Checkpoint(
            json.loads((folder / "state.json").read_text(encoding="utf-8")),
            load_file(folder / "head.safetensors"),
            torch.load(folder / "optimizer.pt", weights_only=True, map_location="cpu"),
            load_file(adapter) if adapter.is_file() else {},
        )
        whole = held.state["step"] == int(folder.name.removeprefix("step-"))
    # whoever made the checksums, too: files that cannot be read raise whatever there is
    except Exception as error:
        raise ValueError("another program wrote it") from error
    if not whole:
        raise ValueError("state.json is of another step")
    return held


def _steps(folder: Path) -> list[Path]:
    numbered = [
        (int(step.name.removeprefix("step-")), step)
        for step in folder.glob("step-*")
        if step.is_dir() and step.name.removeprefix("step-").isdecimal()
    ]
    return [step for _, step in sorted(numbered)]


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()

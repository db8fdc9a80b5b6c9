"""Checkpoints with checksums; the newest valid one counts."""

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

from specheads.core.errors import InputError, first_line
from specheads.core.files import atomic_folder

SUMS = "checksums.json"
KEPT = 2
"""Newest checkpoints that are kept: if the last is damaged, the one before it is used."""


class Checkpoint(NamedTuple):
    """The content of a checkpoint."""

    state: dict[str, Any]
    """JSON values; `step` is required."""
    weights: dict[str, Tensor]
    """Tensors of the head."""
    optimizer: dict[str, Any]
    """State dicts of tensors and plain values."""
    adapter: dict[str, Tensor]
    """Tensors of the base's adapter; empty if no phase trains the base."""


def save(folder: Path, content: Checkpoint) -> None:
    """Write a checkpoint as `step-N` into a folder, and keep the newest `KEPT` up to it."""
    target = folder / f"step-{content.state['step']}"
    with atomic_folder(target) as scratch:
        for name, tensors in (("head", content.weights), ("adapter", content.adapter)):
            if tensors:
                whole = {key: value.contiguous() for key, value in tensors.items()}
                save_file(whole, scratch / f"{name}.safetensors")
        # torch.save to our own stream raises the OSError of a full disk
        with (scratch / "optimizer.pt").open("wb") as stream:
            torch.save(content.optimizer, stream)
        (scratch / "state.json").write_text(json.dumps(content.state), encoding="utf-8")
        (scratch / SUMS).write_text(json.dumps(_sums(scratch)), encoding="utf-8")
    steps = _steps(folder)
    # of later steps there are checkpoints only if they are damaged
    for other in {*steps} - {*steps[: steps.index(target) + 1][-KEPT:]}:
        shutil.rmtree(other)


def load_newest(folder: Path, log: Callable[[str], object] = warnings.warn) -> Checkpoint | None:
    """Return the newest valid checkpoint of a folder; None if the folder has no checkpoint.

    Damaged checkpoints after it are logged in one line. If all are damaged, they are refused.
    """
    damaged: list[str] = []
    for found in reversed(_steps(folder)):
        try:
            content = _read(found)
        # a damaged file can raise any error
        except Exception as error:
            damaged.append(f"{found.name} ({first_line(error)})")
            continue
        if damaged:
            names = ", ".join(damaged)
            log(f"damaged checkpoints in {folder}: {names}; resuming from {found.name}")
        return content
    if damaged:
        raise InputError(
            f"a run resumes from a valid checkpoint, and those in {folder} are damaged: "
            f"{', '.join(damaged)}; restore one, or remove the folder to train from the start"
        )
    return None


def _read(folder: Path) -> Checkpoint:
    """Return a checkpoint; raise any error if it is damaged."""
    sums, found = json.loads((folder / SUMS).read_bytes()), _sums(folder)
    changed = [name for name in {*sums, *found} if sums.get(name) != found.get(name)]
    if changed:
        raise ValueError(f"{min(changed)} does not match {SUMS}")
    state = json.loads((folder / "state.json").read_bytes())
    if f"step-{state['step']}" != folder.name:
        raise ValueError("state.json is of another step")
    adapter = folder / "adapter.safetensors"
    return Checkpoint(
        state,
        load_file(folder / "head.safetensors"),
        torch.load(folder / "optimizer.pt", weights_only=True, map_location="cpu"),
        load_file(adapter) if adapter.is_file() else {},
    )


def _sums(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file but the list of them."""
    found: dict[str, str] = {}
    for file in sorted(folder.iterdir()):
        if file.name != SUMS:
            with file.open("rb") as stream:
                found[file.name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return found


def _steps(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder in the order of their steps."""
    numbers = {step: step.name.removeprefix("step-") for step in folder.glob("step-*")}
    found = [step for step, number in numbers.items() if step.is_dir() and number.isdecimal()]
    return sorted(found, key=lambda step: int(numbers[step]))

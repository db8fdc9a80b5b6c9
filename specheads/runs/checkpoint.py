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

CHECKSUMS_FILE = "checksums.json"
NUM_CHECKPOINTS = 2
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
    """Write a checkpoint as `step-N` into a folder, and keep the newest ones up to it."""
    target = folder / f"step-{content.state['step']}"
    with atomic_folder(target) as scratch:
        for name, tensors in (("head", content.weights), ("adapter", content.adapter)):
            if tensors:
                contiguous = {key: value.contiguous() for key, value in tensors.items()}
                save_file(contiguous, scratch / f"{name}.safetensors")
        # torch.save to our own stream raises the OSError of a full disk
        with (scratch / "optimizer.pt").open("wb") as stream:
            torch.save(content.optimizer, stream)
        (scratch / "state.json").write_text(json.dumps(content.state), encoding="utf-8")
        (scratch / CHECKSUMS_FILE).write_text(json.dumps(_checksums(scratch)), encoding="utf-8")
    steps = _step_folders(folder)
    # of later steps there are checkpoints only if they are damaged
    for old in {*steps} - {*steps[: steps.index(target) + 1][-NUM_CHECKPOINTS:]}:
        shutil.rmtree(old)


def load_newest(folder: Path, log: Callable[[str], object] = warnings.warn) -> Checkpoint | None:
    """Return the newest valid checkpoint of a folder; None if the folder has no checkpoint.

    Damaged checkpoints after it are logged in one line. If all are damaged, they are refused.
    """
    damaged: list[str] = []
    for path in reversed(_step_folders(folder)):
        try:
            content = _read_checkpoint(path)
        # a damaged file can raise any error
        except Exception as error:
            damaged.append(f"{path.name} ({first_line(error)})")
            continue
        if damaged:
            names = ", ".join(damaged)
            log(f"damaged checkpoints in {folder}: {names}; resuming from {path.name}")
        return content
    if damaged:
        raise InputError(
            f"a run resumes from a valid checkpoint, and those in {folder} are damaged: "
            f"{', '.join(damaged)}; restore one, or remove the folder to train from the start"
        )
    return None


def remove_from(folder: Path, step: int) -> None:
    """Remove the checkpoints of a step and later ones."""
    for checkpoint in _step_folders(folder):
        if int(checkpoint.name.removeprefix("step-")) >= step:
            shutil.rmtree(checkpoint)


def _read_checkpoint(folder: Path) -> Checkpoint:
    """Return a checkpoint; raise any error if it is damaged."""
    sums, actual = json.loads((folder / CHECKSUMS_FILE).read_bytes()), _checksums(folder)
    changed = [name for name in {*sums, *actual} if sums.get(name) != actual.get(name)]
    if changed:
        raise ValueError(f"{min(changed)} does not match {CHECKSUMS_FILE}")
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


def _checksums(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file but the list of them."""
    sums: dict[str, str] = {}
    for file in sorted(folder.iterdir()):
        if file.name != CHECKSUMS_FILE:
            with file.open("rb") as stream:
                sums[file.name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return sums


def _step_folders(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder in the order of their steps."""
    numbers = {step: step.name.removeprefix("step-") for step in folder.glob("step-*")}
    checkpoints = [step for step, number in numbers.items() if step.is_dir() and number.isdecimal()]
    return sorted(checkpoints, key=lambda step: int(numbers[step]))

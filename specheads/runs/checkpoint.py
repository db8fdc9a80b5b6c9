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

from specheads.core.errors import InputError
from specheads.core.files import atomic_folder
from specheads.runs.directory import as_json

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


def save(folder: Path, content: Checkpoint, kept: int = KEPT) -> None:
    """Write a checkpoint as `step-N` into a folder, and remove others.

    The newest `kept` are kept. Those of later steps are removed too: training resumes from before
    them only if they are damaged.
    """
    target = folder / f"step-{content.state['step']}"
    with atomic_folder(target) as scratch:
        for name, tensors in (("head", content.weights), ("adapter", content.adapter)):
            if tensors:
                whole = {key: value.contiguous() for key, value in tensors.items()}
                save_file(whole, scratch / f"{name}.safetensors")
        # torch.save to our own stream raises the OSError of a full disk
        with (scratch / "optimizer.pt").open("wb") as stream:
            torch.save(content.optimizer, stream)
        (scratch / "state.json").write_text(as_json(content.state), encoding="utf-8")
        sums = {file.name: _sha256(file) for file in sorted(scratch.iterdir())}
        (scratch / SUMS).write_text(as_json(sums), encoding="utf-8")
    steps = _steps(folder)
    for other in {*steps} - {*steps[: steps.index(target) + 1][-kept:]}:
        shutil.rmtree(other)


def newest(folder: Path, log: Callable[[str], object] = warnings.warn) -> Checkpoint | None:
    """Return the newest valid checkpoint of a folder; None if the folder has no checkpoint.

    Damaged checkpoints after it are logged in one line.

    Raises:
        InputError: There are checkpoints, and all of them are damaged.
    """
    damaged: list[str] = []
    for found in reversed(_steps(folder)):
        try:
            content = _read(found)
        except ValueError as error:
            damaged.append(f"{found.name} ({error})")
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
    """Return a checkpoint.

    Raises:
        ValueError: It is damaged; the message is a few words.
    """
    try:
        sums = json.loads((folder / SUMS).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        sums = None
    if not isinstance(sums, dict):
        raise ValueError(f"no readable {SUMS}")
    present = {item.name for item in folder.iterdir()} - {SUMS}
    if missing := set(sums) - present:
        raise ValueError(f"{min(missing)} is missing")
    if extra := present - set(sums):
        raise ValueError(f"{min(extra)} does not belong to it")
    for name, expected in sums.items():
        if not (folder / name).is_file() or _sha256(folder / name) != expected:
            raise ValueError(f"{name} has another checksum")
    try:
        adapter = folder / "adapter.safetensors"
        content = Checkpoint(
            json.loads((folder / "state.json").read_text(encoding="utf-8")),
            load_file(folder / "head.safetensors"),
            torch.load(folder / "optimizer.pt", weights_only=True, map_location="cpu"),
            load_file(adapter) if adapter.is_file() else {},
        )
        matches = content.state["step"] == int(folder.name.removeprefix("step-"))
    # files that another program wrote can raise any error
    except Exception as error:
        raise ValueError("another program wrote it") from error
    if not matches:
        raise ValueError("state.json is of another step")
    return content


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

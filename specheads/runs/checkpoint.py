"""Checkpoints that are whole or absent: checksums say which, and the newest whole one counts."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specheads.runs.directory import as_json, atomic_folder


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


def save(folder: Path, held: Checkpoint) -> None:
    """Write a checkpoint as `step-N` into a folder, and remove the older ones."""
    target = folder / f"step-{held.state['step']}"
    with atomic_folder(target) as scratch:
        for name, tensors in (("head", held.weights), ("adapter", held.adapter)):
            if tensors:
                whole = {key: value.contiguous() for key, value in tensors.items()}
                save_file(whole, scratch / f"{name}.safetensors")
        torch.save(held.optimizer, scratch / "optimizer.pt")
        (scratch / "state.json").write_text(as_json(held.state), encoding="utf-8")
        sums = {file.name: _sha256(file) for file in sorted(scratch.iterdir())}
        (scratch / "checksums.json").write_text(as_json(sums), encoding="utf-8")
    for other in _steps(folder):
        if other != target:
            shutil.rmtree(other)


def newest(folder: Path) -> Checkpoint | None:
    """Return the newest checkpoint of a folder that is whole, None where there is none."""
    for found in reversed(_steps(folder)):
        sums = found / "checksums.json"
        expected = json.loads(sums.read_text(encoding="utf-8")) if sums.is_file() else {}
        files = {name: found / name for name in expected}
        if expected and all(
            file.is_file() and _sha256(file) == expected[name] for name, file in files.items()
        ):
            adapter = found / "adapter.safetensors"
            return Checkpoint(
                json.loads((found / "state.json").read_text(encoding="utf-8")),
                load_file(found / "head.safetensors"),
                torch.load(found / "optimizer.pt", weights_only=True, map_location="cpu"),
                load_file(adapter) if adapter.is_file() else {},
            )
    return None


def _steps(folder: Path) -> list[Path]:
    found = [step for step in folder.glob("step-*") if step.is_dir()]
    return sorted(found, key=lambda step: int(step.name.removeprefix("step-")))


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()

"""Checkpoints: the newest valid one counts, damaged ones are named, two are kept."""

import json
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from specheads.core.errors import InputError
from specheads.runs import checkpoint
from specheads.runs.checkpoint import Checkpoint


def save(folder: Path, step: int) -> None:
    weights = {"a": torch.full((3,), float(step))}
    state = Checkpoint({"step": step}, weights, {"momentum": torch.ones(2)}, {})
    checkpoint.save(folder, state)


def steps(folder: Path) -> list[str]:
    return sorted(item.name for item in folder.iterdir())


def newest(folder: Path, messages: list[str] | None = None) -> int:
    checkpoint_found = checkpoint.load_newest(
        folder, (messages if messages is not None else []).append
    )
    assert checkpoint_found is not None
    assert checkpoint_found.weights["a"].tolist() == [float(checkpoint_found.state["step"])] * 3
    return checkpoint_found.state["step"]


def test_newest_checkpoint_is_read_and_two_are_kept(tmp_path: Path):
    assert checkpoint.load_newest(tmp_path) is None
    for step in (3, 20, 100):
        save(tmp_path, step)
    assert newest(tmp_path) == 100
    assert steps(tmp_path) == ["step-100", "step-20"]


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def forge(folder: Path, state: str) -> None:
    (folder / "state.json").write_text(state)
    sums = {
        file.name: sha256(file.read_bytes()).hexdigest()
        for file in folder.iterdir()
        if file.name != "checksums.json"
    }
    (folder / "checksums.json").write_text(json.dumps(sums))


NAMES = ("head.safetensors", "optimizer.pt", "state.json", "checksums.json")
DAMAGES: dict[str, Callable[[Path], object]] = {
    **{f"{name} flipped": lambda at, name=name: flip(at / name) for name in NAMES},
    **{f"{name} empty": lambda at, name=name: (at / name).write_bytes(b"") for name in NAMES},
    **{f"{name} missing": lambda at, name=name: (at / name).unlink() for name in NAMES},
    "all files missing": lambda at: [file.unlink() for file in at.iterdir()],
    "a file too much": lambda at: (at / "adapter.safetensors").write_bytes(b"{}"),
    "a folder for a file": lambda at: ((at / "state.json").unlink(), (at / "state.json").mkdir()),
    "no sums": lambda at: (at / "checksums.json").write_text("{}\n"),
    "sums of another type": lambda at: (at / "checksums.json").write_text("[1]\n"),
    "sums too deep": lambda at: (at / "checksums.json").write_text("[" * 100_000),
    "sums that are no text": lambda at: (at / "checksums.json").write_bytes(b"\xff\xfe"),
    "state without its step": lambda at: forge(at, "{}"),
    "state of another step": lambda at: forge(at, '{"step": 7}'),
    "state of another type": lambda at: forge(at, "[]"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_named_and_the_one_before_is_read(damage: str, tmp_path: Path):
    save(tmp_path, 3)
    save(tmp_path, 4)
    DAMAGES[damage](tmp_path / "step-4")
    messages: list[str] = []
    assert newest(tmp_path, messages) == 3
    assert len(messages) == 1
    assert "step-4 (" in messages[0]
    assert messages[0].endswith("resuming from step-3")
    shutil.rmtree(tmp_path / "step-3")
    with pytest.raises(InputError, match=r"are damaged: step-4 \(.*remove the folder"):
        checkpoint.load_newest(tmp_path)


def test_checkpoints_of_later_steps_are_removed(tmp_path: Path):
    for step in (3, 4):
        save(tmp_path, step)
    shutil.copytree(tmp_path / "step-4", tmp_path / "step-9")
    assert newest(tmp_path) == 4
    save(tmp_path, 5)
    assert steps(tmp_path) == ["step-4", "step-5"]

"""Checkpoints: whole or absent, the newest whole one counts, older ones go."""

from pathlib import Path

import pytest
import torch

from specheads.runs import checkpoint
from specheads.runs.checkpoint import Checkpoint


def save(folder: Path, step: int) -> None:
    weights = {"a": torch.full((3,), float(step))}
    checkpoint.save(folder, Checkpoint({"step": step}, weights, {"momentum": torch.ones(2)}, {}))


def test_the_newest_checkpoint_comes_back_and_older_ones_go(tmp_path: Path):
    assert checkpoint.newest(tmp_path) is None
    for step in (3, 20):
        save(tmp_path, step)
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert found[0] == {"step": 20}
    assert found[1]["a"].tolist() == [20.0] * 3
    assert [folder.name for folder in tmp_path.iterdir()] == ["step-20"]


@pytest.mark.parametrize("damage", ["head.safetensors", "state.json", "checksums.json"])
def test_a_damaged_checkpoint_is_passed_over(damage: str, tmp_path: Path):
    save(tmp_path, 3)
    good = tmp_path / "step-3"
    kept = {file.name: file.read_bytes() for file in good.iterdir()}
    save(tmp_path, 4)
    good.mkdir()
    for name, content in kept.items():
        (good / name).write_bytes(content)
    bad = tmp_path / "step-4" / damage
    if damage == "checksums.json":
        bad.unlink()
    else:
        bad.write_bytes(bad.read_bytes()[:-1] + b"?")
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert found[0]["step"] == 3

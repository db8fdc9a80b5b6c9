"""Several processes train one head, and a launcher shows what we say and nothing of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

REPOSITORY = Path(__file__).parents[2]
IN_PROCESSES = "tests.training.in_processes"
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc_per_node", "2")

pytestmark = pytest.mark.slow


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a module as a user would, without GPUs, in the checkout."""
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPOSITORY),
    }
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )


def test_two_processes_train_the_head_that_one_trains_with_twice_the_batch(tmp_path: Path):
    for folder, launcher in (("two", (*TORCHRUN, "-m")), ("one", ())):
        found = python(*launcher, IN_PROCESSES, str(tmp_path / folder), "4", "train")
        assert found.returncode == 0, found.stderr
    first, second, alone = (
        torch.load(tmp_path / folder / f"head-{rank}.pt")
        for folder, rank in (("two", 0), ("two", 1), ("one", 0))
    )
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
        # sums in another order, through Adam's square roots
        torch.testing.assert_close(value, alone[name], rtol=1e-3, atol=1e-4)


def test_an_error_in_one_process_ends_them_all(tmp_path: Path):
    found = python(*TORCHRUN, "-m", IN_PROCESSES, str(tmp_path), "4", "fail")
    assert found.returncode == 1
    assert "ValueError: text is at its end" in found.stderr
    assert not list(tmp_path.glob("head-*"))


def test_a_signal_that_one_process_gets_stops_all_of_them_at_one_checkpoint(tmp_path: Path):
    found = python(*TORCHRUN, "-m", IN_PROCESSES, str(tmp_path), "4", "stop")
    assert found.returncode == 1
    assert "KeyboardInterrupt" in found.stderr
    assert [folder.name for folder in (tmp_path / "checkpoints").iterdir()] == ["step-3"]


def test_the_smoke_recipe_in_two_processes_shares_out_its_text_and_says_how_many_they_are(
    tmp_path: Path,
):
    run = tmp_path / "run"
    found = python(*TORCHRUN, "train.py", "recipe=smoke", f"run_dir={run}", "evaluate_after=false")
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("training with 2 processes") == 1
    assert (run / "head" / "model.safetensors").is_file()
    shards = [pq.read_table(file) for file in sorted((run / "text").glob("shard-*.parquet"))]
    assert [shard.num_rows for shard in shards] == [8, 8]
    texts = [tuple(text) for shard in shards for text in shard["tokens"].to_pylist()]
    assert len(set(texts)) == 16


def test_accelerate_launch_shows_one_line_for_a_mistake(tmp_path: Path):
    """With --quiet no traceback follows; accelerate itself turns every exit code into 1."""
    found = python(
        "accelerate.commands.launch", "--quiet", "--num_processes", "1", "--num_machines", "1",
        "--mixed_precision", "no", "--dynamo_backend", "no",
        "train.py", "recipe=smoke", "schedule.phases.corpus.steps=0", f"run_dir={tmp_path / 'run'}",
    )  # fmt: skip
    assert found.returncode == 1
    assert "Traceback" not in found.stderr
    assert "error: phase 'corpus' needs steps >= 1, got 0" in found.stderr
    assert not (tmp_path / "run").exists()

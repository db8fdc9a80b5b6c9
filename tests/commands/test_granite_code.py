"""The recipe granite_code with small sizes, in two processes that accelerate launches."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

import specheads
from specheads.runs.directory import RunDirectory
from specheads.runs.trackers import read_metrics
from tests import tiny
from tests.training.test_processes import ACCELERATE, REPOSITORY

pytestmark = pytest.mark.slow

PHASES = "schedule.phases"
SMALL = (
    "base.device=cpu", "base.dtype=float32", "head.inner_dim=32", "checkpoint_every=2",
    "log_every=1", f"{PHASES}.corpus.steps=3", f"{PHASES}.corpus.batch_size=4",
    f"{PHASES}.corpus.sequence_length=64", f"{PHASES}.distilled.steps=3",
    f"{PHASES}.distilled.batch_size=6", f"{PHASES}.distilled.distill.num_samples=12",
    f"{PHASES}.distilled.distill.prompt_tokens=16", f"{PHASES}.distilled.distill.new_tokens=16",
    f"{PHASES}.distilled.distill.shard_size=4", f"{PHASES}.distilled.distill.batch_size=4",
    "evaluation.prompts=python_stdlib", "evaluation.num_prompts=4",
    "evaluation.max_new_tokens=16", "evaluation.speed_prompts=2", "evaluation.repeats=1",
)  # fmt: skip
"""Small sizes; prompts of the standard library, because HumanEval is on the Hub."""


def stack(folder: Path) -> Path:
    """Write a small data set with the folders, files and columns of the Stack."""
    rows = [
        "".join(f"def f_{number}_{line}(a):\n    return a + {line}\n\n" for line in range(12))
        for number in range(200)
    ]
    (folder / "data" / "python").mkdir(parents=True)
    for number in range(2):
        text = rows[number::2]
        table = pa.table({"content": text, "lang": ["Python"] * len(text)})
        pq.write_table(table, folder / "data" / "python" / f"data-0000{number}-of-00002.parquet")
    (folder / "data" / "java").mkdir()
    # not selected by the patterns, and with another column
    pq.write_table(pa.table({"code": ["class A {}"]}), folder / "data" / "java" / "data-0.parquet")
    return folder


def test_two_processes_train_both_phases_and_log_to_wandb_offline(tmp_path: Path):
    base = tiny.saved(tmp_path / "granite", "granite", num_hidden_layers=2)
    data, run = stack(tmp_path / "the-stack-dedup"), tmp_path / "run"
    paths = f"base.model={base}", f"data.path={data}", f"run_dir={run}"
    # no network, no key of wandb, and no variable that sets it offline
    environment = {name: os.environ[name] for name in os.environ if not name.startswith("WANDB_")}
    environment |= {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [*ACCELERATE, str(REPOSITORY / "train.py"), "recipe=granite_code", *paths, *SMALL]
    process = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=tmp_path,
        env=environment | {"CUDA_VISIBLE_DEVICES": "", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout.count("training with 2 processes") == 1
    trained = RunDirectory(run)
    results = json.loads((trained.report / "results.json").read_text())
    assert results["lossless"]["identical"] == results["prompts"]["count"] == 4
    assert trained.finished
    rows = read_metrics(trained.metrics)
    assert [(row["step"], row["phase"]) for row in rows] == [
        *((step, "corpus") for step in (1, 2, 3)), *((step, "distilled") for step in (4, 5, 6)),
    ]  # fmt: skip
    assert rows[-1]["tokens"] == 3 * 4 * 64 + 3 * 6 * 32
    shards = [pq.read_table(file) for file in sorted(trained.text.glob("shard-*.parquet"))]
    assert [shard.num_rows for shard in shards] == [4, 4, 4]
    assert len(list(trained.path.glob("wandb/offline-run-*"))) == 1
    heads = [load_file(folder / "model.safetensors") for folder in trained.phases.iterdir()]
    assert len(heads) == 2
    assert any(not torch.equal(value, heads[1][name]) for name, value in heads[0].items())
    loaded = specheads.FrozenBase.load(base, dtype="float32", device="cpu")
    head = specheads.load_head(trained.head, loaded)
    prompts = [[11, 300, 42, 7], [5, 6]]
    drafted = specheads.generate(loaded, head, prompts, max_new_tokens=12)
    assert drafted.tokens == specheads.generate(loaded, None, prompts, max_new_tokens=12).tokens

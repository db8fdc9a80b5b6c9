"""The recipe granite_code from training to the Hub with small sizes, one process a step."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
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
from tests.export.hub_server import OWNER, HubServer
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

Run = Callable[..., subprocess.CompletedProcess[str]]


def stack(folder: Path) -> Path:
    """Write a small data set with the folders, files and columns of the Stack."""
    rows = [
        "".join(f"def f_{number}_{one}(a):\n    return a + {one}\n\n" for one in range(12))
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


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a function that runs a module in a working folder and shows its output on failure."""
    work = tmp_path_factory.mktemp("work")

    def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        # no network, no key of wandb, and no variable that sets it offline
        left = {name: os.environ[name] for name in os.environ if not name.startswith("WANDB_")}
        found = subprocess.run(
            [sys.executable, "-m", *words],
            cwd=work,
            env=left
            | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
            | {"CUDA_VISIBLE_DEVICES": "", "HOME": str(work), "HF_HUB_OFFLINE": "1"}
            | environment,
            capture_output=True,
            text=True,
        )
        assert found.returncode == 0, found.stdout + found.stderr
        return found

    return run


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a granite model with two layers."""
    return tiny.saved(tmp_path_factory.mktemp("granite"), "granite", num_hidden_layers=2)


@pytest.fixture(scope="module")
def trained(python: Run, base: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Train in two processes that accelerate launches."""
    data = stack(tmp_path_factory.mktemp("the-stack-dedup"))
    run = tmp_path_factory.mktemp("runs") / "granite_code"
    where = f"base.model={base}", f"data.path={data}", f"run_dir={run}"
    said = python(*ACCELERATE, str(REPOSITORY / "train.py"), "recipe=granite_code", *where, *SMALL)
    assert said.stdout.count("training with 2 processes") == 1
    return RunDirectory(run)


def test_two_processes_train_both_phases_and_log_to_wandb_offline(
    trained: RunDirectory, base: Path
):
    assert trained.finished
    rows = read_metrics(trained.metrics)
    assert [(row["step"], row["phase"]) for row in rows] == [
        *((step, "corpus") for step in (1, 2, 3)), *((step, "distilled") for step in (4, 5, 6)),
    ]  # fmt: skip
    assert rows[-1]["tokens"] == 3 * 4 * 64 + 3 * 6 * 32
    shards = [pq.read_table(file) for file in sorted(trained.text.glob("shard-*.parquet"))]
    assert [shard.num_rows for shard in shards] == [4, 4, 4]
    assert len(list(trained.path.glob("wandb/offline-run-*"))) == 1
    heads = [load_file(one / "model.safetensors") for one in trained.phases.iterdir()]
    assert len(heads) == 2
    assert any(not torch.equal(value, heads[1][name]) for name, value in heads[0].items())
    loaded = specheads.FrozenBase.load(base, dtype="float32", device="cpu")
    head = specheads.load_head(trained.head, loaded)
    prompts = [[11, 300, 42, 7], [5, 6]]
    ours = specheads.generate(loaded, head, prompts, max_new_tokens=12)
    assert ours.tokens == specheads.generate(loaded, None, prompts, max_new_tokens=12).tokens


def test_head_is_evaluated_again(trained: RunDirectory, python: Run, tmp_path: Path):
    for out, words in ((trained.report, ()), (tmp_path / "again", ("tree=chain",))):
        if words:
            python("specheads", "evaluate", f"run={trained.path}", f"out={out}", *words)
        results = json.loads((out / "results.json").read_text())
        assert results["lossless"]["identical"] == results["prompts"]["count"] == 4
        assert results["replay"]["equal"] is True
        assert results["online"]["tokens_per_forward"] >= 1
        assert len(results["offline"]["top_k_accuracy"]) == 3
        assert results["speed"]["base_tokens_per_second"] > 0
        assert [row["phase"] for row in results["phases"]] == ["corpus", "distilled"]


@pytest.mark.parametrize("engine", ["vllm", "tgi"])
def test_head_is_exported_for_each_engine(
    engine: str, trained: RunDirectory, base: Path, python: Run, tmp_path: Path
):
    out = tmp_path / engine
    said = python("specheads", "export", f"run={trained.path}", f"engine={engine}", f"out={out}")
    assert str(base) in said.stdout if engine == "vllm" else str(out) in said.stdout
    loaded = specheads.FrozenBase.load(base, dtype="float32", device="cpu")
    ours, theirs = specheads.load_head(trained.head, loaded), specheads.load_head(out, loaded)
    found = theirs.state_dict()
    for name, value in ours.state_dict().items():
        assert torch.equal(found[name], value), name


def test_push_uploads_all_files_and_shows_no_token(
    trained: RunDirectory, base: Path, python: Run, tmp_path: Path
):
    with HubServer() as hub:
        said = python(
            "specheads", "push", f"run={trained.path}", f"repo={OWNER}/granite", "private=true",
            "base_repo=ibm-granite/granite-3b-code-base-2k", "licence=apache-2.0",
            "data_licence=other", **hub.environment(tmp_path / "home", hub.token),
        )  # fmt: skip
        files = hub.files(f"{OWNER}/granite")
    assert f"pushed: {hub.url}/{OWNER}/granite" in said.stdout
    assert hub.token not in said.stdout + said.stderr
    assert files["model.safetensors"] == (trained.head / "model.safetensors").read_bytes()
    assert {"config.json", "README.md", "training.json", "results.json"} <= {*files}
    told = b"".join(files.values())
    assert hub.token.encode() not in told
    assert str(base).encode() not in told
    assert b"ibm-granite/granite-3b-code-base-2k" in files["README.md"]

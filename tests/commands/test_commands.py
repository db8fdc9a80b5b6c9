"""The commands on one run, and mistakes; tests/test_wheel.py runs them in their own processes."""

import json
import math
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

import specheads
from specheads.commands._call import call
from specheads.export.layouts._shared import VLLM_SERVER
from specheads.measure import step_times
from specheads.runs import checkpoint
from specheads.runs.directory import RunDirectory
from specheads.runs.trackers import read_metrics
from specheads.training.step import StepRunner

pytestmark = pytest.mark.usefixtures("one_base", "fixed_flop_count")

ROOT = Path(__file__).resolve().parents[2]
Execute = Callable[..., None]
Refusal = Callable[..., str]
SMALL = ["evaluation.num_prompts=2", "evaluation.max_new_tokens=8", "evaluation.speed_prompts=1"]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a working folder with a finished smoke run."""
    cwd = tmp_path_factory.mktemp("work")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(cwd)
        patch.setattr(sys, "argv", ["train"])
        call("train", ["recipe=smoke", *SMALL])
    return cwd


def results_of(folder: Path) -> Any:
    return json.loads((folder / "results.json").read_text())


@pytest.fixture
def execute(work: Path, monkeypatch: pytest.MonkeyPatch) -> Execute:
    """Return a function that runs a command in the folder of the finished run, in this process."""
    monkeypatch.chdir(work)
    monkeypatch.setenv("COLUMNS", "160")

    def run(command: str, *arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", [command, *arguments])
        call(command, arguments)

    return run


def test_run_directory_has_the_files_of_the_contract(work: Path):
    run = RunDirectory(work / "runs" / "smoke")
    assert sorted(item.name for item in run.path.iterdir()) == [
        "best", "checkpoints", "config.yaml", "head", "metrics.jsonl", "phases",
        "provenance.json", "report", "text",
    ]  # fmt: skip
    assert sorted(item.name for item in run.head.iterdir()) == [
        "README.md", "config.json", "model.safetensors",
    ]  # fmt: skip
    assert {"results.json", "report.html", "acceptance.png", "loss.png"} <= {
        item.name for item in run.report.iterdir()
    }
    card = (run.head / "README.md").read_text()
    assert "| identical to the base alone | 2 of 2 prompts |" in card
    assert str(ROOT) not in card
    rows = read_metrics(run.metrics)
    assert [row["step"] for row in rows] == [2, 4, 6, 8, 10]
    assert [row["phase"] for row in rows] == ["corpus"] * 3 + ["distilled"] * 2
    provenance = json.loads(run.provenance.read_text())
    assert provenance["end"] >= provenance["start"]
    assert len(provenance["base_fingerprint"]) == 32


def test_results_are_lossless_and_replay_equals_decoding(work: Path):
    results = results_of(work / "runs/smoke/report")
    lossless = results["lossless"]
    assert (lossless["verdict"], lossless["compared"], lossless["wrong"]) == ("identical", 2, 0)
    assert lossless["first_divergence_logit_gap"] is None
    for name in ("forwards", "per_depth"):
        assert results["offline"][name] == results["online"][name]
    assert [row["phase"] for row in results["phases"]] == ["corpus", "distilled"]
    assert results["prompts"]["count"] == 2
    assert results["speed"]["base_tokens_per_second"] > 0


@pytest.mark.usefixtures("execute")
def test_finished_run_is_refused_and_unchanged(work: Path, refusal: Refusal):
    run = work / "runs" / "smoke"
    before = {file: file.stat().st_mtime_ns for file in run.rglob("*")}
    line = refusal("train", "recipe=smoke", *SMALL)
    assert "a finished run is never overwritten" in line
    assert "; choose another name=" in line
    assert before == {file: file.stat().st_mtime_ns for file in run.rglob("*")}


def test_train_again_measures_a_finished_run_without_results(
    work: Path, execute: Execute, refusal: Refusal, tmp_path: Path
):
    run = tmp_path / "run"
    shutil.copytree(work / "runs" / "smoke", run)
    results = run / "report" / "results.json"
    expected = results_of(results.parent)
    results.unlink()
    # training would begin again without them
    shutil.rmtree(run / "checkpoints")
    words = "recipe=smoke", *SMALL, f"run_dir={run}"
    line = refusal("train", *words, "evaluate_after=false")
    assert f"is finished; measure it with specheads evaluate run={run}, choose" in line
    changed = refusal("train", *words, "schedule.weight_decay=0.5")
    assert "schedule.weight_decay was 0.1, now 0.5" in changed
    kept = [run / name for name in ("head/model.safetensors", "metrics.jsonl")]
    before = [(file.read_bytes(), file.stat().st_mtime_ns) for file in kept]
    execute("train", *words)
    assert results_of(results.parent)["offline"]["forwards"] == expected["offline"]["forwards"]
    assert before == [(file.read_bytes(), file.stat().st_mtime_ns) for file in kept]
    assert "a finished run is never overwritten" in refusal("train", *words)


def test_evaluate_keeps_the_settings_of_the_run_except_overrides(
    work: Path, execute: Execute, refusal: Refusal, capsys: Any
):
    rows = [{"prompt": "def f(a):\n"}, {"prompt": "def g(b):\n"}]
    (work / "two.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    overrides = "run=runs/smoke", "temperature=0.9", "num_prompts=3", "seed=5", "mode=online"
    more_overrides = "tree=best_first", "base.dtype=float64", "contexts=[64,48]", "out=warm"
    execute("evaluate", *overrides, *more_overrides, "prompts=two.jsonl")
    line = "two.jsonl has 2 usable prompts, fewer than num_prompts=3\n"
    assert capsys.readouterr().out.count(line) == 1
    results = results_of(work / "warm")
    settings = results["settings"]
    assert (settings["temperature"], settings["seed"]) == (0.9, 5)
    assert (settings["tree"], settings["dtype"]) == ("best_first", "float64")
    # the run was made with 8 new tokens, the default is 128
    assert settings["max_new_tokens"] == 8
    assert (results["prompts"]["name"], results["prompts"]["count"]) == ("two.jsonl", 2)
    assert settings["coupled"] is True
    assert results["speed"] is None
    assert [(row["context"], row["speed"]) for row in results["contexts"]] == [
        (48, None),
        (64, None),
    ]
    for words in ("base=elsewhere", "base=smollm2_135m", "data.column=x", "data=chat data.path=x"):
        line = refusal("evaluate", *overrides, *words.split(), "out=never")
        assert "measured on its own base and data, got " in line
    for contexts, message in (
        (2041, "can be at most 2040, as 8 new tokens"),
        (20, "got 20; leave it"),
    ):
        assert message in refusal("evaluate", *overrides, f"contexts=[{contexts}]", "out=never")
    assert not (work / "never").exists()


def test_interrupted_command_resumes_to_the_same_head(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    arguments = ["recipe=smoke", f"run_dir={tmp_path}/run", "evaluate_after=false"]
    step = StepRunner.step

    def interrupted(self, batch, phase, number):
        if number == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, batch, phase, number)

    with monkeypatch.context() as patch:
        patch.setattr(StepRunner, "step", interrupted)
        with pytest.raises(SystemExit) as stop:
            call("train", arguments)
    assert stop.value.code == 130
    snapshot = checkpoint.load_newest(tmp_path / "run" / "checkpoints")
    assert snapshot is not None
    assert snapshot.state["step"] == 8
    call("train", arguments)
    weights = load_file(tmp_path / "run" / "head" / "model.safetensors")
    expected = load_file(work / "runs" / "smoke" / "head" / "model.safetensors")
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)
    capsys.readouterr()


def test_a_dry_run_prints_settings_and_plan_as_two_documents_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    monkeypatch.chdir(tmp_path)
    overrides = ["schedule.phases.corpus.steps=720", "~schedule.phases.distilled"]
    call("train", ["recipe=smoke", "dry_run=true", *overrides])
    settings, document = yaml.safe_load_all(capsys.readouterr().out)
    assert settings["head"]["kind"] == "mlp_speculator"
    phase = document["plan"]["phases"]["corpus"]
    assert (
        phase["tokens"]
        == 720 * phase["batch_size"] * settings["schedule"]["phases"]["corpus"]["sequence_length"]
    )
    assert 0 < document["plan"]["hours"]["corpus"] < 1
    assert document["plan"]["fits"]
    assert list(tmp_path.iterdir()) == []


def test_export_writes_a_folder_and_prints_the_serving_command(
    work: Path, execute: Execute, capsys: Any
):
    cwd = work
    execute("export", "run=runs/smoke", "engine=vllm", "out=served")
    (line,) = capsys.readouterr().out.splitlines()
    assert VLLM_SERVER in line
    assert str(cwd / "served") in line
    record = json.loads((cwd / "served" / "specheads.json").read_text())
    assert record["parity"]["texts"] == 8
    assert specheads.load_head(cwd / "served").kind == "mlp_speculator"


def test_training_starts_from_init(work: Path, execute: Execute):
    cwd = work
    execute(
        "train", "recipe=smoke", "name=further", "init=runs/smoke/head", "evaluate_after=false",
        "schedule.phases.corpus.steps=2", "~schedule.phases.distilled",
        # the depth of the loaded head counts, not this one, which needs longer rows
        "head.depth=200",
    )  # fmt: skip
    first = read_metrics(cwd / "runs" / "smoke" / "metrics.jsonl")[0]["loss"]
    assert read_metrics(cwd / "runs" / "further" / "metrics.jsonl")[0]["loss"] < first


@pytest.mark.slow
def test_a_watched_run_ends_with_its_best_head_and_draws_its_learning_curve(
    work: Path, execute: Execute
):
    execute(
        "train", "recipe=smoke", "name=watched", "validation.every=1", "validation.keep=best",
        "schedule.phases.corpus.learning_rate=0", "tracker=tensorboard", *SMALL,
    )  # fmt: skip
    run = RunDirectory(work / "runs" / "watched")
    rows = read_metrics(run.metrics)
    scores = {row["step"]: row["validation/tokens_per_forward"] for row in rows}
    best = json.loads(run.best_score.read_text())
    assert best["tokens_per_forward"] == max(scores.values()) == scores[best["step"]]
    weights = load_file(run.head / "model.safetensors")
    for name, value in load_file(run.best / "model.safetensors").items():
        assert torch.equal(weights[name], value), name
    assert not (run.head / "best.json").exists()
    assert [row["hours"] for row in rows] == sorted(row["hours"] for row in rows)
    assert all(row["mfu"] > 0 and 0 <= row["data_wait_share"] <= 1 for row in rows)
    assert "learning.png" in {item.name for item in run.report.iterdir()}
    assert list((run.path / "tensorboard").iterdir())


def test_compare_holds_the_head_of_a_run_against_what_needs_no_training(
    work: Path, execute: Execute, capsys: Any
):
    run = work / "runs" / "smoke"
    before = {file.name for file in (run / "report").iterdir()}
    execute(
        "compare", "run=runs/smoke", "tree=chain", "num_prompts=2", "max_new_tokens=8",
        "evaluation.speed_prompts=1", "evaluation.repeats=1",
        f"draft_model={ROOT / 'recipes/tiny_code/base'}",
    )  # fmt: skip
    output = capsys.readouterr().out
    assert "comparison: runs/smoke/report/compare.json" in output
    new_files = {file.name for file in (run / "report").iterdir()} - before
    assert new_files == {"compare.json"}
    comparison = json.loads((run / "report" / "compare.json").read_text())
    (condition,) = comparison["conditions"]
    drafters = condition["drafters"]
    assert [*drafters] == [
        "head", "prompt_lookup", "hybrid", "suffix", "suffix_hybrid", "streaming", "draft_model",
        "transformers", "transformers_lookup", "transformers_assisted",
    ]  # fmt: skip
    assert {*condition["ranking"]} == {*drafters}
    for name, row in drafters.items():
        assert name in output
        assert row["lossless"]["identical"] == row["lossless"]["compared"] == 2
        assert row["speed"]["tokens_per_second"] > 0
    # 7 tokens after the first: a base that drafts for itself needs two forwards for each prompt
    assert drafters["draft_model"]["online"]["forwards"] == 2 * 2
    assert comparison["prompts"]["count"] == 2
    assert comparison["provenance"]["command"][1] == "run=runs/smoke"


def test_tune_writes_the_head_s_trees_which_decoding_and_evaluation_take(
    work: Path, execute: Execute, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # which tree is the fastest does not matter here
    monkeypatch.setattr(step_times, "BURST", 2)
    monkeypatch.setattr(step_times, "MAX_COST_ERROR", math.inf)
    folder = work / "runs" / "smoke" / "head"
    small = ["max_nodes=6", "batch_sizes=[1]", "contexts=[24]", "num_prompts=4", "new_tokens=12"]
    try:
        execute("tune", "run=runs/smoke", *small)
        output = capsys.readouterr().out
        assert "tuned: runs/smoke/head/tuned.json" in output
        assert all(word in output for word in ("off by", "speed-up", "best_first"))
        tuned = json.loads((folder / "tuned.json").read_text())
        assert [(tree["batch"], tree["context"]) for tree in tuned["trees"]] == [(1, 24)]
        assert sum(tree["chosen"] for tree in tuned["tried"]) == 1
        assert max(tree["num_nodes"] for tree in tuned["tried"] if tree["tree"] == "tree") <= 6
        # a tree that no measurement here would choose shows who takes it
        tree = tuned["trees"][0]
        tree |= {"kind": "static", "paths": [[0], [5]], "num_nodes": 3, "depth": 1, "copied": 4}
        # a tree that stops where the head is unsure is not replayed
        tree |= {"confidence": 0.0, "stop": None}
        (folder / "tuned.json").write_text(json.dumps(tuned))
        base = specheads.FrozenBase.load(ROOT / "recipes/tiny_code/base")
        head = specheads.load_head(folder, base)
        tree: Any = specheads.Engine(base, head).tree
        assert (tree.head_tree.paths, tree.num_copied) == (((0,), (5,)), 4)
        few = ["num_prompts=1", "max_new_tokens=8", "mode=online", f"out={tmp_path}"]
        execute("evaluate", "run=runs/smoke", *few)
        results = results_of(tmp_path)
        settings = results["settings"]
        assert (settings["tree"], settings["paths"]) == ("tuned+lookup", [[0], [5]])
        assert (settings["copied_tokens"], settings["num_nodes"]) == (4, 7)
        assert results["offline"]["per_depth"] == results["online"]["per_depth"]
    finally:
        (folder / "tuned.json").unlink(missing_ok=True)


@pytest.mark.usefixtures("execute")
def test_compare_refuses_unfinished_runs_and_missing_draft_models(
    work: Path, refusal: Refusal, tmp_path: Path
):
    shutil.copy(work / "runs" / "smoke" / "config.yaml", tmp_path)
    few = ["num_prompts=1", "max_new_tokens=4", "out=refused"]
    assert "only a finished run can be compared" in refusal("compare", f"run={tmp_path}", *few)
    overrides = ["run=runs/smoke", "drafters=[draft_model]", "draft_model=no/such/folder"]
    assert "no/such/folder" in refusal("compare", *overrides, *few)
    assert not (work / "refused").exists()

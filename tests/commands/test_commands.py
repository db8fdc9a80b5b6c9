"""The command line: complete runs in their own processes, and mistakes."""

import json
import os
import shutil
import signal
import subprocess
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
from specheads.runs import checkpoint
from specheads.runs.directory import RunDirectory
from specheads.runs.trackers import read_metrics
from specheads.training.step import Stepper

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["evaluation.num_prompts=2", "evaluation.max_new_tokens=8", "evaluation.speed_prompts=1"]


def specheads_command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    environment["PYTHONPATH"] = str(ROOT)
    return subprocess.run(
        [sys.executable, "-m", "specheads", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return a working folder with a finished smoke run, and the output of the run."""
    cwd = tmp_path_factory.mktemp("work")
    done = specheads_command("train", "recipe=smoke", *SMALL, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return cwd, done.stdout


@pytest.fixture
def here(finished: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that runs a command in the folder of the finished run, in this process."""

    def run(command: str, *arguments: str) -> None:
        monkeypatch.chdir(finished[0])
        monkeypatch.setenv("COLUMNS", "160")
        monkeypatch.setattr(sys, "argv", [command, *arguments])
        call(command, arguments)

    return run


def test_run_directory_has_the_files_of_the_contract(finished: tuple[Path, str]):
    run = RunDirectory(finished[0] / "runs" / "smoke")
    assert sorted(item.name for item in run.path.iterdir()) == [
        "best", "checkpoints", "config.yaml", "head", "metrics.jsonl", "phases",
        "provenance.json", "report", "text",
    ]  # fmt: skip
    assert sorted(item.name for item in run.head.iterdir()) == [
        "README.md", "config.json", "model.safetensors",
    ]  # fmt: skip
    assert {"results.json", "report.html", "acceptance.png", "loss.png", "speed.png"} <= {
        item.name for item in run.report.iterdir()
    }
    card = (run.head / "README.md").read_text()
    assert "| identical to the base alone | 2 of 2 prompts |" in card
    assert str(ROOT) not in card
    rows = read_metrics(run.metrics)
    assert [row["step"] for row in rows] == [2, 4, 6, 8, 10]
    assert [row["phase"] for row in rows] == ["corpus"] * 3 + ["distilled"] * 2
    told = json.loads(run.provenance.read_text())
    assert told["end"] >= told["start"]
    assert len(told["base_fingerprint"]) == 32


def test_results_are_lossless_and_replay_equals_decoding(finished: tuple[Path, str]):
    results = json.loads((finished[0] / "runs/smoke/report/results.json").read_text())
    lossless = results["lossless"]
    assert (lossless["verdict"], lossless["compared"], lossless["wrong"]) == ("identical", 2, 0)
    assert lossless["first_divergence_logit_gap"] is lossless["float32"] is None
    assert results["replay"]["equal"] is True
    assert [row["phase"] for row in results["phases"]] == ["corpus", "distilled"]
    assert results["prompts"]["count"] == 2
    assert results["speed"]["base_tokens_per_second"] > 0


def test_the_trained_head_decodes_through_the_public_interface(finished: tuple[Path, str]):
    base = specheads.FrozenBase.load(ROOT / "recipes/tiny_code/base", dtype="float32", device="cpu")
    head = specheads.load_head(finished[0] / "runs/smoke/head", base)
    prompts = [[11, 300, 42, 7], [5, 6]]
    ours = specheads.generate(base, head, prompts, max_new_tokens=12)
    alone = specheads.generate(base, None, prompts, max_new_tokens=12)
    assert ours.tokens == alone.tokens
    assert alone.forwards == [11, 11]


def test_finished_run_is_refused_and_unchanged(
    finished: tuple[Path, str], refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(finished[0])
    run = finished[0] / "runs" / "smoke"
    before = {file: file.stat().st_mtime_ns for file in run.rglob("*")}
    said = refusal("train", "recipe=smoke", *SMALL)
    assert "a finished run is never overwritten" in said
    assert before == {file: file.stat().st_mtime_ns for file in run.rglob("*")}


def test_evaluate_measures_a_run_again_elsewhere(
    finished: tuple[Path, str], here: Callable[..., None]
):
    here(
        "evaluate", "run=runs/smoke", "tree=best_first", "evaluation.mode=online", "out=again",
        *SMALL,
    )  # fmt: skip
    results = json.loads((finished[0] / "again" / "results.json").read_text())
    assert results["settings"]["tree"] == "best_first"
    assert results["lossless"]["identical"] == 2
    assert results["speed"] is None


def test_head_without_a_run_is_measured_by_short_names(
    finished: tuple[Path, str], here: Callable[..., None]
):
    here(
        "evaluate", "head=runs/smoke/head", f"base={ROOT / 'recipes/tiny_code/base'}", "tree=chain",
        "prompts=python_stdlib", "num_prompts=2", "max_new_tokens=8", "mode=offline", "out=third",
    )  # fmt: skip
    results = json.loads((finished[0] / "third" / "results.json").read_text())
    assert (results["prompts"]["count"], results["settings"]["max_new_tokens"]) == (2, 8)
    assert results["offline"]["forwards"] > 0
    assert results["online"] is None
    assert results["provenance"]["command"][1] == "head=runs/smoke/head"


def test_evaluate_keeps_the_settings_of_the_run_except_overrides(
    finished: tuple[Path, str], here: Callable[..., None]
):
    asked = "tree=chain", "temperature=0.9", "num_prompts=1", "seed=5", "mode=online"
    here("evaluate", "run=runs/smoke", *asked, "out=warm")
    results = json.loads((finished[0] / "warm" / "results.json").read_text())
    assert results["settings"]["temperature"] == 0.9
    assert results["settings"]["seed"] == 5
    # the run was made with 8 new tokens, the default is 128
    assert results["settings"]["max_new_tokens"] == 8
    assert results["prompts"]["count"] == 1
    assert results["settings"]["coupled"] is True
    assert results["offline"]["replayed"] == "chain"
    assert results["online"]["tokens_per_forward"] >= 1.0


def test_sampling_reports_coupled_uncoupled_and_rejection(
    finished: tuple[Path, str], here: Callable[..., None], capsys: pytest.CaptureFixture[str]
):
    here(
        "evaluate", "run=runs/smoke", "tree=chain", "temperature=0.7", "num_prompts=2",
        "max_new_tokens=8", "mode=online", "base.dtype=float64", "out=drawn",
    )  # fmt: skip
    results = json.loads((finished[0] / "drawn" / "results.json").read_text())
    ways = results["drafting"]
    assert list(ways) == ["coupled", "uncoupled", "rejection"]
    assert ways["coupled"]["tokens_per_forward"] == results["online"]["tokens_per_forward"]
    assert [ways[name]["identical"] for name in ways] == [2, 2, 0]
    assert ways["coupled"]["gain_of_coupled"] is None
    assert ways["rejection"]["gain_of_coupled"]["ratio"] > 0
    # in float64 the replay of the base's text gives the same counts as decoding
    assert results["replay"]["equal"] is True
    assert results["offline"]["forwards"] == results["online"]["forwards"]
    page = (finished[0] / "drawn" / "report.html").read_text()
    for text in (capsys.readouterr().out, page):
        for name, tree in (("coupled", "chain"), ("uncoupled", "chain"), ("rejection", "sampled")):
            assert f"tokens per forward, {name} {tree} of 4 nodes" in text


def test_evaluate_measures_a_run_on_its_own_base_in_another_way(
    finished: tuple[Path, str], here: Callable[..., None], refusal: Callable[..., str]
):
    wanted = ("run=runs/smoke", "num_prompts=1", "max_new_tokens=4", "mode=online")
    here("evaluate", *wanted, "base.dtype=float64", "tree=chain", "out=fine")
    results = json.loads((finished[0] / "fine" / "results.json").read_text())
    assert results["settings"]["dtype"] == "float64"
    for other in ("base=elsewhere", "base=smollm2_135m"):
        said = refusal("evaluate", *wanted, other, "out=never")
        assert "measured on its own base, got base" in said
    assert not (finished[0] / "never").exists()


def test_interrupted_command_resumes_to_the_same_head(
    finished: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    arguments = ["recipe=smoke", f"run_dir={tmp_path}/run", "evaluate_after=false"]
    step = Stepper.step

    def interrupted(self, batch, phase, number):
        if number == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, batch, phase, number)

    with monkeypatch.context() as patch:
        patch.setattr(Stepper, "step", interrupted)
        with pytest.raises(SystemExit) as left:
            call("train", arguments)
    assert left.value.code == 130
    held = checkpoint.newest(tmp_path / "run" / "checkpoints")
    assert held is not None
    assert held.state["step"] == 8
    call("train", arguments)
    ours = load_file(tmp_path / "run" / "head" / "model.safetensors")
    whole = load_file(finished[0] / "runs" / "smoke" / "head" / "model.safetensors")
    for name, value in whole.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5)
    capsys.readouterr()


def test_a_dry_run_prints_settings_and_plan_as_two_documents_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    monkeypatch.chdir(tmp_path)
    overrides = ["schedule.phases.corpus.steps=720", "~schedule.phases.distilled"]
    call("train", ["recipe=smoke", "dry_run=true", *overrides])
    settings, shown = yaml.safe_load_all(capsys.readouterr().out)
    assert settings["head"]["kind"] == "mlp_speculator"
    phase = shown["plan"]["phases"]["corpus"]
    assert (
        phase["tokens"]
        == 720 * phase["batch_size"] * settings["schedule"]["phases"]["corpus"]["sequence_length"]
    )
    assert 0 < shown["plan"]["hours"]["corpus"] < 1
    assert shown["plan"]["fits"]
    assert list(tmp_path.iterdir()) == []


def test_export_writes_a_folder_and_prints_the_serving_command(
    finished: tuple[Path, str], here: Callable[..., None], capsys: Any
):
    cwd = finished[0]
    here("export", "run=runs/smoke", "engine=vllm", "out=served")
    (line,) = capsys.readouterr().out.splitlines()
    assert "vllm serve" in line
    assert str(cwd / "served") in line
    record = json.loads((cwd / "served" / "specheads.json").read_text())
    assert record["parity"]["texts"] == 8
    assert specheads.load_head(cwd / "served").kind == "mlp_speculator"


def test_training_starts_from_init(finished: tuple[Path, str], here: Callable[..., None]):
    cwd = finished[0]
    here(
        "train", "recipe=smoke", "name=further", "init=runs/smoke/head", "evaluate_after=false",
        "schedule.phases.corpus.steps=2", "~schedule.phases.distilled",
        # the depth of the loaded head counts, not this one
        "head.depth=2", "schedule.phases.corpus.depth_weights=[1,1,1]",
    )  # fmt: skip
    first = read_metrics(cwd / "runs" / "smoke" / "metrics.jsonl")[0]["loss"]
    assert read_metrics(cwd / "runs" / "further" / "metrics.jsonl")[0]["loss"] < first


@pytest.mark.slow
def test_a_watched_run_ends_with_its_best_head_and_draws_its_learning_curve(
    finished: tuple[Path, str], here: Callable[..., None]
):
    here(
        "train", "recipe=smoke", "name=watched", "validation.every=1", "validation.keep=best",
        "schedule.phases.corpus.learning_rate=0", "tracker=tensorboard", *SMALL,
    )  # fmt: skip
    run = RunDirectory(finished[0] / "runs" / "watched")
    rows = read_metrics(run.metrics)
    scores = {row["step"]: row["validation/tokens_per_forward"] for row in rows}
    best = json.loads(run.best_score.read_text())
    assert best["tokens_per_forward"] == max(scores.values()) == scores[best["step"]]
    ours = load_file(run.head / "model.safetensors")
    for name, value in load_file(run.best / "model.safetensors").items():
        assert torch.equal(ours[name], value), name
    assert not (run.head / "best.json").exists()
    assert [row["hours"] for row in rows] == sorted(row["hours"] for row in rows)
    assert all(row["mfu"] > 0 and 0 <= row["data_wait_share"] <= 1 for row in rows)
    assert "learning.png" in {item.name for item in run.report.iterdir()}
    assert list((run.path / "tensorboard").iterdir())


def test_compare_holds_the_head_of_a_run_against_what_needs_no_training(
    finished: tuple[Path, str], here: Callable[..., None], capsys: Any
):
    run = finished[0] / "runs" / "smoke"
    before = {file.name for file in (run / "report").iterdir()}
    here(
        "compare", "run=runs/smoke", "tree=chain", "num_prompts=2", "max_new_tokens=8",
        "evaluation.speed_prompts=1", "evaluation.repeats=1",
        f"draft_model={ROOT / 'recipes/tiny_code/base'}",
    )  # fmt: skip
    told = capsys.readouterr().out
    assert "comparison: runs/smoke/report/compare.json" in told
    written = {file.name for file in (run / "report").iterdir()} - before
    assert written == {"compare.json"}
    found = json.loads((run / "report" / "compare.json").read_text())
    (condition,) = found["conditions"]
    drafters = condition["drafters"]
    assert [*drafters] == [
        "head", "prompt_lookup", "hybrid", "streaming", "draft_model",
        "transformers", "transformers_lookup", "transformers_assisted",
    ]  # fmt: skip
    assert {*condition["ranking"]} == {*drafters}
    for name, row in drafters.items():
        assert name in told
        assert row["lossless"]["identical"] == row["lossless"]["compared"] == 2
        assert row["speed"]["tokens_per_second"] > 0
    # 7 tokens after the first: a base that drafts for itself needs two forwards for each prompt
    assert drafters["draft_model"]["online"]["forwards"] == 2 * 2
    assert found["prompts"]["count"] == 2
    assert found["provenance"]["command"][1] == "run=runs/smoke"


def test_tune_writes_the_head_s_trees_which_decoding_and_evaluation_take(
    finished: tuple[Path, str], here: Callable[..., None], capsys: Any, tmp_path: Path
):
    folder = finished[0] / "runs" / "smoke" / "head"
    small = ["max_nodes=6", "batch_sizes=[1]", "contexts=[24]", "num_prompts=4", "new_tokens=12"]
    try:
        here("tune", "run=runs/smoke", *small)
        told = capsys.readouterr().out
        assert "tuned: runs/smoke/head/tuned.json" in told
        assert all(word in told for word in ("off by", "speed-up", "best_first"))
        found = json.loads((folder / "tuned.json").read_text())
        assert [(one["batch"], one["context"]) for one in found["trees"]] == [(1, 24)]
        assert sum(one["chosen"] for one in found["tried"]) == 1
        assert max(one["num_nodes"] for one in found["tried"] if one["tree"] == "tree") <= 6
        # a tree that no measurement here would choose shows who takes it
        one = found["trees"][0]
        one |= {"kind": "static", "paths": [[0], [5]], "num_nodes": 3, "depth": 1, "copied": 4}
        (folder / "tuned.json").write_text(json.dumps(found))
        base = specheads.FrozenBase.load(ROOT / "recipes/tiny_code/base")
        head = specheads.load_head(folder, base)
        tree: Any = specheads.Engine(base, head).tree
        assert (tree.inner.paths, tree.size) == (((0,), (5,)), 4)
        few = ["num_prompts=1", "max_new_tokens=8", "mode=online", f"out={tmp_path}"]
        here("evaluate", "run=runs/smoke", *few)
        results = json.loads((tmp_path / "results.json").read_text())
        settings = results["settings"]
        assert (settings["tree"], settings["paths"]) == ("tuned+lookup", [[0], [5]])
        assert (settings["copied_tokens"], settings["num_nodes"]) == (4, 7)
        assert results["offline"]["per_depth"] == results["online"]["per_depth"]
    finally:
        (folder / "tuned.json").unlink(missing_ok=True)


@pytest.mark.slow
def test_compare_ranks_several_heads_at_several_temperatures_and_batches(
    finished: tuple[Path, str], here: Callable[..., None], capsys: pytest.CaptureFixture[str]
):
    shutil.copytree(finished[0] / "runs" / "smoke" / "head", finished[0] / "other")
    here(
        "compare", "heads=[runs/smoke,other]", "tree=chain", "num_prompts=2", "max_new_tokens=8",
        "drafters=[head]", "evaluation.speed_prompts=2", "evaluation.repeats=1", "out=several",
        "temperatures=[0,1]", "batch_sizes=[1,2]",
    )  # fmt: skip
    found = json.loads((finished[0] / "several" / "compare.json").read_text())
    assert [*found["heads"]] == ["smoke", "other"]
    assert found["heads"]["smoke"] == found["heads"]["other"] == found["head"]
    told = [(one["temperature"], one["batch_size"]) for one in found["conditions"]]
    assert told == [(0, 1), (0, 2), (1, 1), (1, 2)]
    for one in found["conditions"]:
        rows = one["drafters"]
        # the same weights draft the same
        assert rows["smoke"]["online"] == rows["other"]["online"]
        assert {*rows["smoke"]["over"]} == {*rows} - {"smoke"}
    assert "tokens per second, row over column" in capsys.readouterr().out


def test_compare_refuses_unfinished_runs_and_missing_draft_models(
    finished: tuple[Path, str], here: Callable[..., None], tmp_path: Path, capsys: Any
):
    begun = tmp_path / "begun"
    begun.mkdir()
    shutil.copy(finished[0] / "runs" / "smoke" / "config.yaml", begun)
    for arguments, told in (
        ([f"run={begun}"], "only a finished run can be compared"),
        (
            ["run=runs/smoke", "drafters=[draft_model]", "draft_model=no/such/folder"],
            "no/such/folder",
        ),
    ):
        with pytest.raises(SystemExit) as left:
            here("compare", *arguments, "num_prompts=1", "max_new_tokens=4", "out=refused")
        assert left.value.code == 2
        (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
        assert told in line
    assert not (finished[0] / "refused").exists()

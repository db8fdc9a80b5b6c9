"""The Python functions: they print nothing, return objects and raise ValueError."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import specheads
from specheads.config import data_dir
from specheads.core.drafter import Head
from specheads.core.files import to_json
from specheads.measure.results import Results, read
from specheads.runs.directory import RunDirectory

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["evaluation.num_prompts=2", "evaluation.max_new_tokens=8", "evaluation.speed_prompts=1"]
SHORT = ["schedule.phases.corpus.steps=2", "~schedule.phases.distilled", *SMALL]


@pytest.fixture(scope="module")
def base() -> specheads.FrozenBase:
    return specheads.FrozenBase.load(data_dir("recipes") / "tiny_code" / "base", device="cpu")


@pytest.fixture(scope="module")
def run(
    base: specheads.FrozenBase, tmp_path_factory: pytest.TempPathFactory
) -> tuple[RunDirectory, list[str]]:
    """Return a trained run, and the lines that it announced."""
    announced: list[str] = []
    place = f"run_dir={tmp_path_factory.mktemp('secret_place') / 'run'}"
    made = specheads.train(
        "smoke", [*SHORT, place, "tree=chain"], base=base, announce=announced.append
    )
    return made, announced


def test_train_returns_the_run_and_announces_the_head(
    run: tuple[RunDirectory, list[str]],
):
    made, announced = run
    assert made.finished
    assert announced[-1] == f"head: {made.head}"
    results = read(Results, made.report / "results.json")
    assert results is not None
    assert results.lossless is not None
    assert results.lossless.identical == 2


@pytest.mark.slow
def test_evaluation_after_training_writes_tuned_json(
    run: tuple[RunDirectory, list[str]], base: specheads.FrozenBase, tmp_path: Path
):
    assert not (run[0].head / "tuned.json").exists()
    few = [*SHORT, f"run_dir={tmp_path / 'run'}", "tree=tuned"]
    made = specheads.train("smoke", [*few, "evaluation.mode=offline"], base=base)
    results = json.loads((made.report / "results.json").read_text())
    tuned = json.loads((made.head / "tuned.json").read_text())
    timed = results["tree_candidates"]
    assert [one["tree"] for one in timed] == [one["tree"] for one in tuned["tried"]]
    assert (timed[0]["tree"], timed[0]["speedup"]) == ("none", 1.0)
    (chosen,) = [one for one in timed if one["chosen"]]
    assert chosen["speedup"] == max(one["speedup"] for one in timed)
    assert chosen["num_nodes"] == results["settings"]["num_nodes"]
    (tree,) = tuned["trees"]
    assert (tree["predicted_speedup"], tree["batch"]) == (chosen["speedup"], 1)
    assert specheads.load_head(made.head, base).tuned.trees[0].kind == tree["kind"]


def test_results_and_card_have_no_absolute_path(
    run: tuple[RunDirectory, list[str]],
):
    made, _ = run
    for file in (
        made.report / "results.json",
        made.report / "report.html",
        made.head / "README.md",
    ):
        text = file.read_text()
        assert "secret_place" not in text, file
        assert str(ROOT) not in text, file
    results = read(Results, made.report / "results.json")
    assert results is not None
    assert results.base.name == "recipes/tiny_code/base"


def test_run_and_loaded_objects_give_the_same_results(
    run: tuple[RunDirectory, list[str]], base: specheads.FrozenBase, tmp_path: Path, capsys: Any
):
    made, _ = run
    before = (made.report / "results.json").read_bytes()
    asked = ["tree=chain", "mode=online", *SMALL]
    of_run = specheads.evaluate(made.path, asked, base=base, out=tmp_path / "again")
    head = specheads.load_head(made.head, base)
    of_head = specheads.evaluate(overrides=asked, base=base, head=head)
    assert of_run.online == of_head.online
    assert (made.report / "results.json").read_bytes() == before
    stored = json.loads((tmp_path / "again" / "results.json").read_text())
    assert stored == to_json(of_run)
    given = specheads.evaluate(
        overrides=asked, base=base, head=head, prompts=[[11, 300, 42], [5, 6]]
    )
    assert (given.prompts.name, given.prompts.count) == ("given", 2)
    assert capsys.readouterr().out == ""


def test_head_is_compared_exported_and_listed_for_push(
    run: tuple[RunDirectory, list[str]], base: specheads.FrozenBase, tmp_path: Path, capsys: Any
):
    made, _ = run
    head = specheads.load_head(made.head, base)
    asked = ["tree=chain", "drafters=[head,prompt_lookup]", "evaluation.repeats=1", *SMALL]
    compared = specheads.compare(overrides=asked, base=base, head=head)
    assert list(compared.drafters) == ["head", "prompt_lookup"]
    assert compared.drafters["head"].lossless.identical == 2
    exported = specheads.export(made.path, "vllm", tmp_path / "served", base=base)
    assert (exported.folder / "specheads.json").is_file()
    assert "vllm serve" in exported.serve[0]
    listed = specheads.push(made.path, "ada/head", dry_run=True)
    assert listed.files["README.md"] > 0
    assert listed.address == ""
    assert capsys.readouterr().out == ""


def test_head_of_other_weights_needs_force(
    run: tuple[RunDirectory, list[str]], base: specheads.FrozenBase, tmp_path: Path
):
    made = RunDirectory(shutil.copytree(run[0].path, tmp_path / "run"))
    file = made.head / "config.json"
    known = json.loads(file.read_text())
    file.write_text(json.dumps(known | {"base_fingerprint": "0" * 16 + "-" + "0" * 16}))
    few, out = ["tree=chain", "mode=offline", *SMALL], tmp_path / "out"
    for call, words in (
        (lambda more: specheads.evaluate(made.path, more, base=base, out=out), few),
        (lambda more: specheads.export(made.path, "vllm", tmp_path / "x", more, base=base), []),
    ):
        with pytest.raises(ValueError, match="override with force=true"):
            call(words)
        assert call([*words, "force=true"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: specheads.train("nope"), "there is no recipe 'nope'"),
        (lambda: specheads.train("smoke", ["stepz=3"]), "stepz"),
        (lambda: specheads.evaluate("nowhere"), "needs a config.yaml, got nowhere"),
        (lambda: specheads.evaluate(), "name what to evaluate"),
        (lambda: specheads.evaluate("a", ["head=b"]), "got run=a and head=b; leave one out"),
        *(
            (lambda call=call: call("a", head=Mock(spec=Head)), "got run=a and a head; give one")
            for call in (specheads.evaluate, specheads.compare, specheads.tune)
        ),
        (lambda: specheads.compare(), "name what to compare"),
        (lambda: specheads.export("nowhere", "oven", "out"), "engine must be one of"),
        (lambda: specheads.push("nowhere", "no id"), "repo=USER/NAME"),
    ],
)
def test_mistake_raises_value_error(
    call: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        call()
    assert list(tmp_path.iterdir()) == []


def test_export_is_a_function_whatever_is_imported_first():
    code = (
        "from specheads.export.layouts import engines; import specheads\n"
        "assert 'vllm' in engines() and callable(specheads.export)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_specheads_does_not_import_torch():
    code = (
        "import sys, specheads; assert 'torch' not in sys.modules; assert 'train' in dir(specheads)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in specheads.__all__:
        assert callable(getattr(specheads, name))
    with pytest.raises(AttributeError, match="no attribute 'brew'"):
        specheads.brew  # pyright: ignore[reportAttributeAccessIssue]  # noqa: B018

"""The Python functions: they print nothing, return objects and raise ValueError."""

import csv
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import specheads
from specheads.config import data_dir
from specheads.core.files import to_json
from specheads.export.layouts import engines
from specheads.export.layouts._shared import VLLM_SERVER
from specheads.export.write import RECORD
from specheads.measure.results import Results, read_results
from specheads.measure.summary import print_results
from specheads.runs.directory import RunDirectory
from tests import tiny
from tests.data.conftest import CATEGORIES, ENTROPIES, LENGTHS, speed_bench, write_jsonl

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["evaluation.num_prompts=2", "evaluation.max_new_tokens=8", "evaluation.speed_prompts=1"]
SHORT = ["schedule.phases.corpus.steps=2", "~schedule.phases.distilled", *SMALL]


@pytest.fixture(scope="module")
def announced() -> list[str]:
    """Return the lines that the training announced."""
    return []


@pytest.fixture(scope="module")
def run(
    base: specheads.FrozenBase, announced: list[str], tmp_path_factory: pytest.TempPathFactory
) -> RunDirectory:
    """Return a trained run."""
    run_dir = f"run_dir={tmp_path_factory.mktemp('secret_place') / 'run'}"
    overrides = [*SHORT, run_dir, "tree=chain"]
    return specheads.train("smoke", overrides, base=base, announce=announced.append)


def test_train_returns_the_run_and_announces_the_head(run: RunDirectory, announced: list[str]):
    assert run.finished
    assert announced[-2:] == [f"head: {run.head}", "stage 2 of 2: evaluation"]
    results = read_results(Results, run.report / "results.json")
    assert results is not None
    assert results.lossless is not None
    assert results.lossless.identical == 2
    assert results.base.name == "recipes/tiny_code/base"
    for file in (run.report / "results.json", run.report / "report.html", run.head / "README.md"):
        # no absolute path of this machine
        assert not re.search(f"secret_place|{ROOT}", file.read_text()), file


@pytest.mark.slow
def test_evaluation_after_training_writes_tuned_json(
    run: RunDirectory, base: specheads.FrozenBase, tmp_path: Path
):
    assert not (run.head / "tuned.json").exists()
    overrides = [*SHORT, f"run_dir={tmp_path / 'run'}", "tree=tuned"]
    new_run = specheads.train("smoke", [*overrides, "evaluation.mode=offline"], base=base)
    results = json.loads((new_run.report / "results.json").read_text())
    tuned = json.loads((new_run.head / "tuned.json").read_text())
    timed = tuned["tried"]
    assert (timed[0]["tree"], timed[0]["speedup"]) == ("none", 1.0)
    (chosen,) = [row for row in timed if row["chosen"]]
    assert chosen["speedup"] == max(row["speedup"] for row in timed)
    assert chosen["num_nodes"] == results["settings"]["num_nodes"]
    (tree,) = tuned["trees"]
    assert (tree["predicted_speedup"], tree["batch"]) == (chosen["speedup"], 1)
    assert specheads.load_head(new_run.head, base).tuned.trees[0].kind == tree["kind"]


def test_run_and_head_give_the_same_results(
    run: RunDirectory, base: specheads.FrozenBase, tmp_path: Path, capsys: Any
):
    before = (run.report / "results.json").read_bytes()
    overrides = ["tree=chain", "mode=online", *SMALL]
    of_run = specheads.evaluate(run.path, overrides, base=base, out=tmp_path / "again")
    of_head = specheads.evaluate(overrides=[*overrides, f"head={run.head}"], base=base)
    assert of_run.online == of_head.online
    assert (run.report / "results.json").read_bytes() == before
    stored = json.loads((tmp_path / "again" / "results.json").read_text())
    assert stored == to_json(of_run)
    assert capsys.readouterr().out == ""


def test_head_of_other_weights_needs_force(
    run: RunDirectory, base: specheads.FrozenBase, tmp_path: Path
):
    copy = RunDirectory(shutil.copytree(run.path, tmp_path / "run"))
    file = copy.head / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"base_fingerprint": "0" * 16 + "-" + "0" * 16}))
    settings, out = ["tree=chain", "mode=offline", *SMALL], tmp_path / "out"
    for call, words in (
        (lambda words: specheads.evaluate(copy.path, words, base=base, out=out), settings),
        (lambda words: specheads.export(copy.path, "vllm", tmp_path / "x", words, base=base), []),
    ):
        with pytest.raises(ValueError, match="override with force=true"):
            call(words)
        assert call([*words, "force=true"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: specheads.train("nope"), "got 'nope'"),
        (lambda: specheads.train("smoke", ["stepz=3"]), "stepz"),
        (lambda: specheads.evaluate("nowhere"), "needs a config.yaml, got nowhere"),
        (lambda: specheads.evaluate(), "name a run as run=DIR, or a head as head=PATH and base"),
        (lambda: specheads.evaluate("a", ["head=b"]), "got run=a, head=b; drop one"),
        (lambda: specheads.export("", "vllm", "x", ["head=b"]), "got none; add base=PATH"),
        (lambda: specheads.tune(overrides=["head=b"]), "or head=FOLDER and base=PATH; got head='b"),
        (lambda: specheads.compare(), "name what to compare"),
        (lambda: specheads.export("", "oven", "out"), "engine must be one of"),
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


def test_training_names_a_base_without_a_tokenizer(tmp_path: Path):
    folder = tiny.saved(tmp_path / "base")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ValueError, match=r"got no tokenizer in .*base; add its files, such as"):
        specheads.train("smoke", [f"base={folder}", f"run_dir={tmp_path / 'run'}"])
    assert not (tmp_path / "run").exists()


def test_importing_specheads_does_not_import_torch_and_export_stays_a_function():
    code = (
        "import sys, specheads.export, specheads; assert 'torch' not in sys.modules\n"
        "assert 'train' in dir(specheads) and 'export' not in vars(specheads)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert "vllm" in engines()
    assert all(callable(getattr(specheads, name)) for name in specheads.__all__)
    with pytest.raises(AttributeError, match="no attribute 'brew'"):
        specheads.brew  # pyright: ignore[reportAttributeAccessIssue]  # noqa: B018


def test_speed_bench_shows_categories_and_lengths_in_results_report_and_csv(
    run: RunDirectory, base: specheads.FrozenBase, tmp_path: Path
):
    folder = speed_bench(tmp_path / "speed")
    overrides = ["tree=chain", "mode=online", *SMALL, "num_prompts=100", f"prompts={folder}"]
    overrides.append("evaluation.batch_size=30")
    results = specheads.evaluate(run.path, overrides, base=base, out=tmp_path / "out")
    assert results.online is not None
    stored = json.loads((tmp_path / "out/results.json").read_text())["online"]
    assert {*stored["by_input_length"]} == {"", *LENGTHS}
    assert {*stored["by_category"]} == {*CATEGORIES, *ENTROPIES}
    assert stored["by_category"]["mixed"]["count"] == len(LENGTHS)
    rows = list(csv.DictReader((tmp_path / "out/acceptance.csv").read_text().splitlines()))
    assert [(row["input_length"], row["category"]) for row in rows] == [
        *(("", category) for category in CATEGORIES),
        *((length, entropy) for length in LENGTHS for entropy in ENTROPIES),
    ]
    assert (rows[0]["subset"], rows[-1]["subset"]) == ("speed/coding", f"speed/{LENGTHS[-1]}/mixed")
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert sum(int(row[name]) for row in rows) == getattr(results.online, name)
    page = (tmp_path / "out/report.html").read_text()
    assert all(f"<td>{name}</td>" in page for name in [*CATEGORIES, *ENTROPIES, *LENGTHS])
    console = Console(record=True, width=120)
    print_results(results, console)
    assert "by input length" in (output := console.export_text())
    assert all(name in output for name in [*CATEGORIES, *ENTROPIES, *LENGTHS])


def test_traces_train_and_give_prompts_but_are_not_answered_again(
    base: specheads.FrozenBase, tmp_path: Path
):
    rows = [
        {"input_ids": [*range(number, number + 40)], "loss_mask": [0] * 8 + [1] * 32}
        for number in range(400)
    ]
    data = ["data=traces", f"data.path={write_jsonl(tmp_path / 'a.jsonl', rows)}", "tree=chain"]
    data += ["data.max_documents=0", "evaluation.prompts=held_out"]
    new_run = specheads.train("smoke", [*data, *SHORT, f"run_dir={tmp_path / 'run'}"], base=base)
    results = read_results(Results, new_run.report / "results.json")
    assert results is not None
    assert (results.prompts.name, results.prompts.categories) == ("held_out", {"traces": 2})
    with pytest.raises(ValueError, match="traces hold what the base wrote already"):
        specheads.train("smoke", [*data, *SMALL, f"run_dir={tmp_path / 'other'}"], base=base)
    assert not (tmp_path / "other").exists()


PHASE = "schedule.phases.joint"
JOINT = [
    "head=medusa",
    "schedule=medusa2",
    *(f"~schedule.phases.{name}" for name in ("heads", "corpus", "distilled")),
    *(f"{PHASE}.{word}" for word in ("steps=2", "batch_size=2", "sequence_length=32")),
    *(f"{PHASE}.joint.{word}" for word in ("rank=2", "learning_rate=0.05")),
]


@pytest.mark.slow
def test_export_after_joint_training_has_the_merged_base(tmp_path: Path):
    folder = data_dir("recipes") / "tiny_code" / "base"
    words = [*JOINT, *SMALL, f"run_dir={tmp_path / 'run'}", "tree=chain"]
    new_run = specheads.train("smoke", words)
    out = tmp_path / "served"
    exported = specheads.export(new_run.path, "vllm", out)
    # the serving command names the merged base
    assert f"{VLLM_SERVER} {out / 'base'} " in exported.serve[0]
    merged = specheads.FrozenBase.load(out / "base", device="cpu")
    adapted = specheads.FrozenBase.load(folder, adapter=new_run.adapter, device="cpu")
    plain = specheads.FrozenBase.load(folder, device="cpu")
    assert merged.fingerprint == adapted.fingerprint != plain.fingerprint
    assert json.loads((out / RECORD).read_text())["base"]["fingerprint"] == merged.fingerprint
    prompts = [[11, 300, 42], [5, 6]]
    head = specheads.load_head(out, merged)
    drafted = specheads.generate(merged, head, prompts, max_new_tokens=12)
    assert drafted.tokens == specheads.generate(adapted, None, prompts, max_new_tokens=12).tokens
    # export again into the same folder, with names only
    again = [f"head_path={new_run.head}", f"base.model={folder}", f"base.adapter={new_run.adapter}"]
    lines = specheads.export("", "vllm", out, again).serve
    assert lines == exported.serve
    assert (out / "base" / "tokenizer.json").is_file()

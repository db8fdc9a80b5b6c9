"""The bench of variants: its reading of a file and of a run, and (slow) one small run."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from specheads.config import compose

ROOT = Path(__file__).parents[2]
ABLATIONS = ROOT / "recipes" / "smollm2" / "ablations.yaml"
FILES = sorted(set(ROOT.glob("recipes/*/*.yaml")) - set(ROOT.glob("recipes/*/recipe.yaml")))
PHASE = "schedule.phases.distilled"


def test_how_a_head_was_trained_is_read_from_its_log(script: ModuleType, tmp_path: Path):
    speeds = enumerate((10.0, 100.0, 120.0, 90.0), start=1)
    rows: list[dict[str, float]] = [
        {"tokens": 400 * step, "tokens_per_second": speed, "peak_gib": 1 + step / 16}
        for step, speed in speeds
    ]
    # validation has rows of its own
    rows.insert(2, {"validation/loss": 3.0})
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    trained = {"tokens": 1600, "tokens_per_second": 100.0, "peak_gib": 1.25}
    assert script.trained(tmp_path) == trained


def test_an_ablation_is_the_recipe_but_for_what_it_names(script: ModuleType, tmp_path: Path):
    options = script._parse([str(ABLATIONS), "--out", str(tmp_path)])
    plan = script.read_plan(options)

    def settings(name: str) -> dict[str, Any]:
        values = asdict(compose.settings_of("train", script.training_of(plan, name, options)))
        return {key: value for key, value in values.items() if key not in ("name", "run_dir")}

    def changed(before: Any, after: Any, path: str = "") -> set[str]:
        if not isinstance(before, dict) or before.keys() != after.keys():
            return {path.removeprefix(".")} if before != after else set()
        return {
            name for key in before for name in changed(before[key], after[key], f"{path}.{key}")
        }

    as_it_is = settings("as_it_is")
    text = as_it_is["schedule"]["phases"]["distilled"]["distill"]["folder"]
    assert text == str(tmp_path / "text")
    names = ("hard_labels", "text_10", "corpus_alone")
    changes = {name: sorted(changed(as_it_is, settings(name))) for name in names}
    assert changes["hard_labels"] == [f"{PHASE}.loss"]
    assert changes["text_10"] == [f"{PHASE}.distill.folder", f"{PHASE}.distill.num_samples"]
    corpus_settings = ["data.path", "data.source", "head.draft_tokens", "schedule.phases"]
    assert changes["corpus_alone"] == corpus_settings
    assert settings("corpus_first")["init"] == str(tmp_path / "corpus_alone" / "head")


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=[f"{file.parent.name}/{file.stem}" for file in FILES])
def test_every_file_of_variants_asks_for_settings_that_exist(
    script: ModuleType, monkeypatch: Any, file: Path
):
    monkeypatch.setattr(script, "find_spec", lambda _: file)
    options = script._parse([str(file)])
    plan = script.read_plan(options)
    for name in plan["variants"]:
        compose.settings_of("train", script.training_of(plan, name, options))
    for words in plan["compare"].values():
        compose.settings_of("compare", ["heads=[a,b]", *words])


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (None, [], "needs a YAML file"),
        ("a: [", [], "must be YAML"),
        ("recipe: smoke", [], "must have recipe, variants and compare"),
        ("{recipe: a, variants: {b: []}, compare: {}}", ["--only", "c"], "among b, got c"),
        ("{recipe: a, variants: {b: []}, compare: {}, speculators: c}", [], "among b, got c"),
        ("{recipe: a, variants: {b: []}, compare: {}, speculators: b}", [], "must be installed"),
    ],
)
def test_a_mistake_is_one_line(
    script: ModuleType, tmp_path: Path, capsys: Any, monkeypatch: Any, text, arguments, message
):
    monkeypatch.setattr(script, "find_spec", lambda _: None)
    file = tmp_path / "plan.yaml"
    if text is not None:
        file.write_text(text)
    assert script.main([str(file), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.slow
def test_variants_share_text_and_prompts_and_finished_parts_are_kept(tmp_path: Path):
    plan = {
        "recipe": "smoke",
        "train": [f"{PHASE}.distill.folder={{text}}", "log_every=1"],
        "variants": {kind: [f"head={kind}"] for kind in ("medusa", "redrafter")},
        "compare": {
            "chain": ["tree=chain", "temperatures=[0,1]"],
            "tuned": ["tree=tuned", "temperatures=[0]"],
        },
    }
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    command = [
        *(sys.executable, str(ROOT / "scripts" / "bench_heads.py"), "plan.yaml", "--out", "out"),
        *("--measure", "evaluation.num_prompts=2", "evaluation.max_new_tokens=8"),
        "evaluation.speed_prompts=1",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

    def bench() -> str:
        process = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert process.returncode == 0, process.stderr
        return process.stdout

    output = bench()
    assert (output.count("$ specheads train"), output.count("$ specheads compare")) == (2, 2)
    table = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert table["variants"] == plan["variants"]
    tokens = {kind: training["tokens"] for kind, training in table["training"].items()}
    assert tokens["medusa"] == tokens["redrafter"] > 0
    for name, temperatures in (("chain", [0.0, 1.0]), ("tuned", [0.0])):
        assert [condition["temperature"] for condition in table[name]["conditions"]] == temperatures
        for condition in table[name]["conditions"]:
            assert [*condition["drafters"]] == ["medusa", "redrafter"]
            assert [*condition["drafters"]["medusa"]["accepted_over"]] == ["redrafter"]
    # the base wrote once, for both
    assert len(list((tmp_path / "out" / "text").glob("shard-*.parquet"))) == 1
    assert not (tmp_path / "out" / "redrafter" / "text").exists()
    assert "$ specheads" not in bench()

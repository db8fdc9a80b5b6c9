"""The bench of all kinds: its reading of a run, and (slow) one small run."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from specheads.config import compose

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "bench_heads.py"


def test_how_a_head_was_trained_is_read_from_its_log(script: ModuleType, tmp_path: Path):
    (tmp_path / "training.json").write_text('{"peak_gib": 1.25}')
    speeds = enumerate((10.0, 100.0, 120.0, 90.0), start=1)
    rows = [{"tokens": 400 * step, "tokens_per_second": speed} for step, speed in speeds]
    # validation has rows of its own
    rows.insert(2, {"validation/loss": 3.0})
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    trained = {"tokens": 1600, "tokens_per_second": 100.0, "peak_gib": 1.25}
    assert script.trained(tmp_path) == trained


def test_an_ablation_is_the_recipe_but_for_what_it_names(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def trained(name: str) -> dict[str, Any]:
        options = script._parse(["--ablate", name, "--out", str(tmp_path)])
        said: list[str] = []

        def failing(_: str, *words: str) -> tuple[int, float, float]:
            said.extend(words)
            return 1, 0.0, 0.0

        monkeypatch.setattr(script, "_run", failing)
        assert script._train(tmp_path / name, script._changes(options)[name], options) == 1
        settings = asdict(compose.settings_of("train", said))
        del settings["name"], settings["run_dir"]
        return settings

    def changed(one: Any, other: Any, path: str = "") -> set[str]:
        if not isinstance(one, dict) or one.keys() != other.keys():
            return {path.removeprefix(".")} if one != other else set()
        return {found for key in one for found in changed(one[key], other[key], f"{path}.{key}")}

    phase, as_it_is = "schedule.phases.distilled", trained("as_it_is")
    assert as_it_is["schedule"]["phases"]["distilled"]["distill"]["folder"] == str(
        tmp_path / "text"
    )
    text = [f"{phase}.distill.folder", f"{phase}.distill.num_samples"]
    found = {name: sorted(changed(as_it_is, trained(name))) for name in script.ABLATIONS}
    # each one changes something, and most of them one setting
    assert {name for name, names in found.items() if not names} == {"as_it_is"}
    assert found["hard_labels"] == [f"{phase}.loss"]
    assert found["depth_5"] == ["head.depth"]
    assert found["text_10"] == text
    assert found["corpus_alone"] == ["data.source", "head.draft_tokens", "schedule.phases"]
    assert {name for name, names in found.items() if len(names) > 1} == {
        "text_10", "text_30", "corpus_alone",
    }  # fmt: skip
    assert trained("corpus_first")["init"] == str(tmp_path / "corpus_alone" / "head")
    one = script._parse(["--ablate"])
    assert [*script._changes(one)] == [*script.ABLATIONS]


@pytest.mark.slow
def test_two_kinds_are_trained_on_the_same_text_and_finished_parts_are_kept(tmp_path: Path):
    command = [
        sys.executable, str(SCRIPT), "--recipe", "smoke", "--out", str(tmp_path / "out"),
        "--kinds", "medusa", "redrafter", "--set", "log_every=1",
        "--measure", "evaluation.num_prompts=2", "evaluation.max_new_tokens=8",
        "evaluation.speed_prompts=1",
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

    def bench() -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    said = bench()
    assert (said.count("$ specheads train"), said.count("$ specheads compare")) == (2, 2)
    table = json.loads((tmp_path / "out" / "heads.json").read_text())
    tokens = {kind: how["tokens"] for kind, how in table["training"].items()}
    assert tokens["medusa"] == tokens["redrafter"] > 0
    for name, temperatures in (("chain", [0.0, 1.0]), ("tuned", [0.0])):
        assert [one["temperature"] for one in table[name]["conditions"]] == temperatures
        for one in table[name]["conditions"]:
            assert [*one["drafters"]] == ["medusa", "redrafter"]
            assert [*one["drafters"]["medusa"]["accepted_over"]] == ["redrafter"]
    # the base wrote once, for both
    assert len(list((tmp_path / "out" / "text").glob("shard-*.parquet"))) == 1
    assert not (tmp_path / "out" / "redrafter" / "text").exists()
    assert "$ specheads" not in bench()

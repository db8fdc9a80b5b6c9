"""The bench of all kinds: what it reads out of a run, and (slow) a whole small one."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from specheads.measure.results import Lossless, Online, Results, Speed
from specheads.measure.store import dumps
from tests.results import bare

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "bench_heads.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_heads", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def report(tokens_per_forward: float) -> Results:
    interval: Any = (1.0, 2.0)
    online = Online(
        tokens_per_forward=tokens_per_forward, interval=interval, per_depth=[], by_category={},
        tokens_per_forward_without_bonus=0.0, forwards=1, new_tokens=1,
    )  # fmt: skip
    speed = Speed(
        draft_milliseconds=0.5, speedup=1.1, interval=(1.0, 1.2), base_tokens_per_second=1.0,
        tokens_per_second=1.0, step_overhead=1.0, step_milliseconds=1.0,
        base_step_milliseconds=1.0, new_tokens=1, forwards=1,
    )  # fmt: skip
    lossless = Lossless(compared=80, identical=80, first_divergence_logit_gap=None)
    return replace(bare(), online=online, speed=speed, lossless=lossless)


def test_a_row_says_of_each_figure_which_evaluation_it_is_from(script: ModuleType, tmp_path: Path):
    for name, figure in [("greedy", 1.5), ("sampled", 1.3), ("chain", 1.4), ("tuned", 1.6)]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(dumps(report(figure)))
    (tmp_path / "training.json").write_text('{"peak_gib": 1.25}')
    (tmp_path / "metrics.jsonl").write_text('{"tokens": 400}\n{"tokens": 1300}\n')
    speeds = [{"tokens_per_second": speed} for speed in (10.0, 100.0, 120.0, 90.0)]
    (tmp_path / "speed.jsonl").write_text("\n".join(map(json.dumps, speeds)) + "\n")
    row = script.row(tmp_path)
    assert row["training_tokens"] == 1300
    assert row["training_tokens_per_second"] == 100.0
    assert [row[name]["tokens_per_forward"] for name in ("greedy", "sampled", "tuned")] == [
        1.5,
        1.3,
        1.6,
    ]
    assert row["speed"] == {"speedup": 1.1, "interval": [1.0, 1.2]}
    assert (row["training_peak_gib"], row["draft_milliseconds"]) == (1.25, 0.5)


@pytest.mark.slow
def test_two_kinds_are_trained_on_the_same_text_and_finished_parts_are_kept(tmp_path: Path):
    command = [
        sys.executable, str(SCRIPT), "--recipe", "smoke", "--out", str(tmp_path / "out"),
        "--prompts", "2", "--kinds", "medusa", "redrafter",
        "--set", "evaluation.max_new_tokens=8", "evaluation.speed_prompts=1",
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

    def bench() -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    # two whole runs, and two short ones for their speed
    assert bench().count("$ specheads train") == 4
    table = json.loads((tmp_path / "out" / "heads.json").read_text())
    medusa, redrafter = table["rows"]
    assert (medusa["kind"], redrafter["kind"]) == ("medusa", "redrafter")
    assert medusa["training_tokens"] == redrafter["training_tokens"] > 0
    assert medusa["identical"] == [2, 2]
    assert medusa["draft_milliseconds"] > 0
    # the base wrote once, for both
    assert len(list((tmp_path / "out" / "text").glob("shard-*.parquet"))) == 1
    assert not (tmp_path / "out" / "redrafter" / "text").exists()
    assert "$ specheads" not in bench()

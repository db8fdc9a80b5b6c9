"""The benchmarks of decoding, of drafts and of training, at toy size."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.scripts.loading import load_script

BASE = Path(__file__).parents[2] / "recipes" / "tiny_code" / "base"
DECODE = (
    "--base tiny --device cpu --parts steps batch graphs --turns 2 --context 8 --new-tokens 3 "
    "--nodes 1 3 --batches 1 2"
)
TRAIN = (
    "--bases tiny --heads mlp_speculator eagle3 --device cpu --turns 2 --batch-size 2 "
    "--sequence-length 32 --plain"
)


DRAFT = (
    f"--base {BASE} --heads medusa eagle_gru --batches 1 2 --depth 2 --draft-tokens 64 "
    "--context 16 --turns 2 --dtype float32 --device cpu"
)


def run(script: str, arguments: str, out: Path) -> dict[str, Any]:
    """Return the file that a benchmark writes."""
    assert load_script(script).main([*arguments.split(), "--out", str(out)]) == 0
    return json.loads(out.read_text())


def test_steps_and_batches_are_timed(tmp_path: Path):
    results = run("bench_decode", DECODE, tmp_path / "decode.json")
    assert [row["nodes"] for row in results["steps"]] == [1, 3]
    assert [row["batch"] for row in results["batch"]] == [1, 2]
    for row in results["graphs"]:
        assert {*row["step_milliseconds"]} == {*row["first_token_seconds"]} == {"recorded", "eager"}
        assert row["interval"][0] <= row["recorded_over_eager"] <= row["interval"][1]


def test_drafts_in_the_plug_in_are_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = run("bench_draft", DRAFT, tmp_path / "draft.json")["rows"]
    heads = [(row["head"], row["batch"]) for row in rows]
    assert heads == [("medusa", 1), ("medusa", 2), ("eagle_gru", 1), ("eagle_gru", 2)]
    assert all(row["quartiles"] == sorted(row["quartiles"]) for row in rows)
    assert "eagle_gru" in capsys.readouterr().out


@pytest.mark.slow
def test_a_step_of_training_is_timed(tmp_path: Path):
    rows = run("bench_train", TRAIN, tmp_path / "train.json")["rows"]
    assert [row["head"] for row in rows] == ["mlp_speculator", "eagle3"]
    for row in rows:
        assert row["over_floor"] > 1
        assert row["interval"][0] <= row["over_floor"] <= row["interval"][1]
        assert row["mfu"] == pytest.approx(1 / row["over_floor"])
        assert row["plain_over_step"] > 0

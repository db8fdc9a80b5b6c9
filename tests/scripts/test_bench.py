"""The benchmarks run where little more than torch and transformers is installed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WITHOUT = """
import runpy, sys
from importlib.machinery import PathFinder

MISSING = {MISSING}

class Elsewhere(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        missing = name.partition(".")[0] in MISSING
        return None if missing else super().find_spec(name, path, target)

    @classmethod
    def find_distributions(cls, context):
        return [] if context.name in MISSING else super().find_distributions(context)

sys.meta_path[:] = [Elsewhere if one is PathFinder else one for one in sys.meta_path]
"""
TRAINING = {"datasets", "hydra", "omegaconf", "wandb"}
"""What a machine lent to us for its GPU lacks."""

DECODE = (
    "--base tiny --device cpu --parts steps batch --turns 2 --context 8 --new-tokens 3 --nodes 1 3 "
    "--batches 1 2"
)

TRAIN = (
    "--bases tiny --heads mlp_speculator eagle3 --device cpu --turns 2 --batch-size 2 "
    "--sequence-length 32 --plain"
)


def run(missing: set[str], tmp_path: Path, *scripts: tuple[str, str]) -> str:
    """Run scripts with arguments where libraries are missing; return what they print."""
    runs = [
        f"sys.argv = ['bench', *{arguments.split()}]\n"
        "try:\n"
        f"    runpy.run_path('{ROOT / 'scripts' / script}', run_name='__main__')\n"
        "except SystemExit as left:\n"
        "    assert not left.code, left.code\n"
        for script, arguments in scripts
    ]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT.replace("{MISSING}", str(missing)) + "".join(runs)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_benchmarks_need_none_of_the_libraries_that_training_needs(tmp_path: Path):
    run(
        TRAINING | {"rich"},
        tmp_path,
        ("bench_decode.py", f"{DECODE} --out {tmp_path / 'decode.json'}"),
    )
    found = json.loads((tmp_path / "decode.json").read_text())
    assert [row["nodes"] for row in found["steps"]] == [1, 3]
    assert [row["batch"] for row in found["batch"]] == [1, 2]


@pytest.mark.slow
def test_a_step_of_training_is_timed_where_only_what_computes_is_installed(tmp_path: Path):
    run(TRAINING, tmp_path, ("bench_train.py", f"{TRAIN} --out {tmp_path / 'train.json'}"))
    rows = json.loads((tmp_path / "train.json").read_text())["rows"]
    assert [row["head"] for row in rows] == ["mlp_speculator", "eagle3"]
    for row in rows:
        assert row["over_floor"] > 1
        assert row["interval"][0] <= row["over_floor"] <= row["interval"][1]
        assert row["mfu"] == pytest.approx(1 / row["over_floor"])
        assert row["plain_over_step"] > 0

"""The benchmarks run where little more than torch and transformers is installed."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
WITHOUT = """
import runpy, sys
from importlib.machinery import PathFinder

MISSING = {"accelerate", "datasets", "hydra", "omegaconf", "peft", "rich", "wandb"}

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
LOSS = "--rows 6 --vocab 20 --width 4 --depth 2 --pairs 1 --measure time"
DECODE = (
    "--shape tiny --device cpu --parts steps batch --turns 1 --prompts 1 --prompt-tokens 8 "
    "--new-tokens 3 --nodes 1 3 --batches 1 2"
)


def test_benchmarks_need_none_of_the_libraries_that_training_needs(tmp_path: Path):
    runs = [
        f"sys.argv = ['bench', *{arguments.split()}]\n"
        "try:\n"
        f"    runpy.run_path('{ROOT / 'scripts' / script}', run_name='__main__')\n"
        "except SystemExit as left:\n"
        "    assert not left.code, left.code\n"
        for script, arguments in (
            ("bench_loss.py", LOSS),
            ("bench_decode.py", f"{DECODE} --out {tmp_path / 'decode.json'}"),
        )
    ]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT + "".join(runs)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "wall_ratio" in done.stdout
    assert '"peft": null' in (tmp_path / "decode.json").read_text()

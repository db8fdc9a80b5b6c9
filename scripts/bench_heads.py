"""Train every kind of head on the same text, hold all against each other, and make one table.

    python scripts/bench_heads.py                        all kinds, into runs/heads
    python scripts/bench_heads.py --kinds medusa eagle3 --set schedule.phases.distilled.steps=50
    python scripts/bench_heads.py --record               the same, and into recipes/README.md

Every part is a command that a user could give (`specheads train`, `specheads compare`), in a
process of its own. What is finished is not done again, so an interrupted bench goes on. All kinds
share the recipe's text, that which the base wrote too, optimizers, steps, depth and prompts. How
fast each trains is what its own log says, so nothing else should run meanwhile.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specheads.measure.comparison import Comparison
from specheads.measure.store import read, to_json

ROOT = Path(__file__).resolve().parents[1]
COMPARED = {
    # acceptance does not depend on the batch, so it is counted many prompts at a time
    "chain": ["tree=chain", "temperatures=[0,1]", "evaluation.batch_size=8"],
    "tuned": ["tree=tuned", "temperatures=[0]", "evaluation.batch_size=1"],
}
"""What `specheads compare` is asked for, by the folder that keeps it: the same chain for all heads,
and by the clock, one prompt at a time, the tree that pays best for each."""

OWN = {kind: ["head.num_layers=1"] for kind in ("dflash", "dspark")}
"""Further overrides of some kinds: five layers, as published for large bases, would cost a small
one more than it costs itself."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and compare; return the exit code."""
    options = _parse(arguments)
    runs = {kind: options.out / kind for kind in options.kinds}
    for kind, run in runs.items():
        if code := _train(kind, run, options):
            return code
    training = {kind: trained(run) for kind, run in runs.items()}
    table: dict[str, Any] = {"schema": 2, "recipe": options.recipe, "training": training}
    for name, asked in COMPARED.items():
        if code := _compare(options.out / name, list(runs.values()), [*asked, *options.measure]):
            return code
        table[name] = to_json(read(Comparison, options.out / name / "compare.json"))
        text = json.dumps(table, indent=1) + "\n"
        (options.out / "heads.json").write_text(text, encoding="utf-8")
        print(f"wrote {options.out / 'heads.json'}")
        if options.record:
            (ROOT / "recipes" / options.recipe / "heads.json").write_text(text, encoding="utf-8")
            subprocess.check_call([sys.executable, str(ROOT / "scripts" / "results_table.py")])
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    found = sorted(path.stem for path in (ROOT / "configs" / "head").glob("*.yaml"))
    parser.add_argument("--kinds", nargs="+", choices=found, default=found, help="default: all")
    parser.add_argument("--recipe", default="smollm2", help="whose head is replaced")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "heads", help="for the runs")
    parser.add_argument("--text", type=Path, help="what the base wrote; default: OUT/text")
    parser.add_argument("--set", nargs="*", default=[], help="further overrides for training")
    parser.add_argument("--measure", nargs="*", default=[], help="further overrides for comparing")
    parser.add_argument("--record", action="store_true", help="write recipes/README.md's table")
    return parser.parse_args(arguments)


def _train(kind: str, run: Path, options: argparse.Namespace) -> int:
    """Train one kind, unless that is done; note how much memory its process took at its peak."""
    if (run / "training.json").is_file():
        return 0
    text = (options.text or options.out / "text").resolve()
    code, seconds, peak_gib = _run(
        "train",
        f"recipe={options.recipe}",
        f"head={kind}",
        f"name={kind}",
        f"run_dir={run}",
        f"schedule.phases.distilled.distill.folder={text}",
        "evaluate_after=false",
        *OWN.get(kind, []),
        *options.set,
    )
    if code == 0:
        noted = {"seconds": seconds, "peak_gib": peak_gib}
        (run / "training.json").write_text(json.dumps(noted) + "\n", encoding="utf-8")
    return code


def _compare(out: Path, runs: list[Path], asked: list[str]) -> int:
    """Hold the heads against each other, unless that is done."""
    if (out / "compare.json").is_file():
        return 0
    heads = f"heads=[{','.join(map(str, runs))}]"
    return _run("compare", heads, f"out={out}", "drafters=[head]", "other_ways=false", *asked)[0]


def _run(*words: str) -> tuple[int, float, float]:
    """Run one command of specheads; return its exit code, seconds, and peak memory in GiB."""
    print(f"\n$ specheads {' '.join(words)}", flush=True)
    start = time.perf_counter()
    child = subprocess.Popen([sys.executable, "-m", "specheads", *words])
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    # kibibytes on Linux, bytes on macOS
    unit = 2**30 if sys.platform == "darwin" else 2**20
    return child.returncode, time.perf_counter() - start, usage.ru_maxrss / unit


def trained(run: Path) -> dict[str, Any]:
    """Return how a head was trained, out of its run directory."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [row for row in map(json.loads, lines) if "tokens_per_second" in row]
    return {
        "tokens": steps[-1]["tokens"],
        "tokens_per_second": statistics.median(row["tokens_per_second"] for row in steps[1:]),
        "peak_gib": json.loads((run / "training.json").read_text(encoding="utf-8"))["peak_gib"],
    }


if __name__ == "__main__":
    raise SystemExit(main())

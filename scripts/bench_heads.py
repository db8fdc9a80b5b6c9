"""Train every kind of head on the same text, measure all alike, and put them into one table.

    python scripts/bench_heads.py                        all kinds, into runs/heads
    python scripts/bench_heads.py --kinds medusa eagle3 --set schedule.phases.corpus.steps=100
    python scripts/bench_heads.py --record               the same, and into recipes/README.md

Every part is a command that a user could give (`specheads train`, `specheads evaluate`), in a
process of its own. What is finished is not done again, so an interrupted bench goes on. All kinds
share the recipe's corpus, the text that the base wrote, optimizers, steps, depth and prompts. How
fast each trains is measured in short runs of its own, one after the other, at the very end.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specheads.measure.results import Results
from specheads.measure.store import read, to_json

ROOT = Path(__file__).resolve().parents[1]
ACCEPTED = ["mode=online", "evaluation.batch_size=8"]
"""Acceptance does not depend on the batch, so it is counted many prompts at a time."""

MEASURED: dict[str, tuple[int, list[str]]] = {
    # the same chain for all, at both temperatures; then by the clock, one prompt at a time, the
    # chain and the tree that pays best for each
    "greedy": (0, ["tree=chain", *ACCEPTED]),
    "sampled": (0, ["tree=chain", *ACCEPTED, "temperature=1.0"]),
    "chain": (8, ["tree=chain", "mode=all", "evaluation.speed_prompts=6"]),
    "tuned": (24, ["tree=tuned", "mode=all", "evaluation.speed_prompts=10"]),
}
"""What `specheads evaluate` is asked for, by the folder that keeps its report: at most so many
prompts, 0 for all of them, and how."""

SPEED_STEPS = 40
"""Of the short training run that tells tokens per second; the first quarter does not count."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and measure; return the exit code."""
    options = _parse(arguments)
    runs = {kind: options.out / kind for kind in options.kinds}
    for part in (_train, _evaluate, _time):
        for kind, run in runs.items():
            if code := part(kind, run, options):
                return code
    rows = [row(run) for run in runs.values()]
    table = {"schema": 1, "recipe": options.recipe, "rows": rows}
    # the trees were timed last, by the code and on the machine that this names
    table["provenance"] = to_json(_results(runs[options.kinds[-1]] / "tuned").provenance)
    (options.out / "heads.json").write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {options.out / 'heads.json'}")
    if not options.record:
        return 0
    kept = ROOT / "recipes" / options.recipe / "heads.json"
    kept.write_text((options.out / "heads.json").read_text(encoding="utf-8"), encoding="utf-8")
    return subprocess.call([sys.executable, str(ROOT / "scripts" / "results_table.py")])


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    found = sorted(path.stem for path in (ROOT / "configs" / "head").glob("*.yaml"))
    parser.add_argument("--kinds", nargs="+", choices=found, default=found, help="default: all")
    parser.add_argument("--recipe", default="tiny_code", help="whose head is replaced")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "heads", help="for the runs")
    parser.add_argument("--prompts", type=int, default=200, help="decoded at each temperature")
    parser.add_argument("--set", nargs="*", default=[], help="further overrides for training")
    parser.add_argument("--record", action="store_true", help="write recipes/README.md's table")
    return parser.parse_args(arguments)


def _train(kind: str, run: Path, options: argparse.Namespace) -> int:
    """Train one kind, unless that is done; note how much memory its process took at its peak."""
    if (run / "training.json").is_file():
        return 0
    text = options.out.resolve() / "text"
    code, seconds, peak_gib = _run(
        "train",
        f"recipe={options.recipe}",
        f"head={kind}",
        f"name={kind}",
        f"run_dir={run}",
        f"schedule.phases.distilled.distill.folder={text}",
        "evaluate_after=false",
        *options.set,
    )
    if code == 0:
        noted = {"seconds": seconds, "peak_gib": peak_gib}
        (run / "training.json").write_text(json.dumps(noted) + "\n", encoding="utf-8")
    return code


def _evaluate(kind: str, run: Path, options: argparse.Namespace) -> int:
    del kind
    for name, (most, asked) in MEASURED.items():
        out = run / name
        if (out / "results.json").is_file():
            continue
        prompts = f"num_prompts={min(most or options.prompts, options.prompts)}"
        code, _, _ = _run("evaluate", f"run={run}", f"out={out}", prompts, *asked)
        if code:
            return code
    return 0


def _time(kind: str, run: Path, options: argparse.Namespace) -> int:
    """Train a few steps, as fast as it goes, and keep the log alone."""
    if (run / "speed.jsonl").is_file():
        return 0
    with tempfile.TemporaryDirectory() as folder:
        short = Path(folder) / kind
        code, _, _ = _run(
            "train",
            f"recipe={options.recipe}",
            f"head={kind}",
            f"name={kind}",
            f"run_dir={short}",
            "~schedule.phases.distilled",
            "evaluate_after=false",
            *options.set,
            f"schedule.phases.corpus.steps={SPEED_STEPS}",
            f"log_every={SPEED_STEPS // 4}",
        )
        if code == 0:
            shutil.copy(short / "metrics.jsonl", run / "speed.jsonl")
    return code


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


def row(run: Path) -> dict[str, Any]:
    """Return what was measured of one kind, out of its run directory."""
    greedy, sampled, chain, tuned = (_results(run / name) for name in MEASURED)
    steps, speeds = (_lines(run / name) for name in ("metrics.jsonl", "speed.jsonl"))
    assert greedy.lossless and chain.speed and tuned.speed  # noqa: PT018
    speedup = {"speedup": tuned.speed.speedup, "interval": tuned.speed.interval}
    return {
        "kind": greedy.head.kind,
        "depth": greedy.head.depth,
        "parameters": greedy.head.parameters,
        "training_tokens": steps[-1]["tokens"],
        "training_tokens_per_second": statistics.median(
            row["tokens_per_second"] for row in speeds[1:]
        ),
        "training_peak_gib": json.loads((run / "training.json").read_text())["peak_gib"],
        "draft_milliseconds": chain.speed.draft_milliseconds,
        "prompts": greedy.prompts.count,
        "greedy": _rate(greedy),
        "sampled": _rate(sampled),
        "identical": [greedy.lossless.identical, greedy.lossless.compared],
        "tuned": {
            "tree": tuned.settings.tree,
            "num_nodes": tuned.settings.num_nodes,
            **_rate(tuned),
        },
        "speed": to_json(speedup),
    }


def _rate(results: Results) -> dict[str, Any]:
    """Return tokens per forward and interval of what was decoded."""
    online = results.online
    assert online is not None
    return {"tokens_per_forward": online.tokens_per_forward, "interval": list(online.interval)}


def _results(folder: Path) -> Results:
    found = read(Results, folder / "results.json")
    assert found is not None
    return found


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    raise SystemExit(main())

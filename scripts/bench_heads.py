"""Train every kind of head on the same text, and compare them.

    python scripts/bench_heads.py                        every kind, into runs/heads
    python scripts/bench_heads.py --kinds medusa eagle3 --set schedule.phases.distilled.steps=50
    python scripts/bench_heads.py --record               and update recipes/README.md

Every part is a command of `specheads` (`train`, `compare`) in its own process. Finished parts are
not repeated, so an interrupted call resumes. All heads share text, generated text, optimizers,
steps, depth and prompts. Training speed is read from the log of each run, so nothing else should
run at the same time.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specheads.core.files import to_json
from specheads.measure.results import Comparison, read

ROOT = Path(__file__).resolve().parents[1]
COMPARED = {
    # acceptance does not depend on the batch size, so decode many prompts at once
    "chain": ["tree=chain", "temperatures=[0,1]", "evaluation.batch_size=8"],
    "tuned": ["tree=tuned", "temperatures=[0]", "evaluation.batch_size=1"],
}
"""Overrides of `specheads compare` by output folder: the same chain for all heads, and the tuned
tree of each head with one prompt at a time."""

OWN = {kind: ["head.num_layers=1"] for kind in ("dflash", "dspark")}
"""Further overrides of some kinds: their published five layers cost more than a small base."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and compare; return the exit code."""
    options = _parse(arguments)
    runs = {kind: options.out / kind for kind in options.kinds}
    for run in runs.values():
        if code := _train(run, options):
            return code
    table: dict[str, Any] = {"schema": 2, "recipe": options.recipe}
    table["training"] = {kind: trained(run) for kind, run in runs.items()}
    for name, asked in COMPARED.items():
        file = options.out / name / "compare.json"
        if not file.is_file():
            heads = f"heads=[{','.join(map(str, runs.values()))}]"
            words = [heads, f"out={file.parent}", "drafters=[head]", *asked, *options.measure]
            if code := _run("compare", *words)[0]:
                return code
        table[name] = to_json(read(Comparison, file))
    out = options.out / "heads.json"
    out.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {out}")
    if options.record:
        (ROOT / "recipes" / options.recipe / out.name).write_bytes(out.read_bytes())
        subprocess.check_call([sys.executable, str(ROOT / "scripts" / "results_table.py")])
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add, found = parser.add_argument, sorted((ROOT / "configs" / "head").glob("*.yaml"))
    kinds = [path.stem for path in found]
    add("--kinds", nargs="+", choices=kinds, default=kinds, help="default: all")
    add("--recipe", default="smollm2", help="recipe to change")
    add("--out", type=Path, default=ROOT / "runs" / "heads", help="run folder")
    add("--text", type=Path, help="generated text; default: OUT/text")
    add("--set", nargs="*", default=[], help="further overrides for training")
    add("--measure", nargs="*", default=[], help="further overrides for comparing")
    add("--record", action="store_true", help="write the table of the recipes")
    return parser.parse_args(arguments)


def _train(run: Path, options: argparse.Namespace) -> int:
    """Train one head, unless it is finished; write the peak memory of its process."""
    if (run / "training.json").is_file():
        return 0
    text = (options.text or options.out / "text").resolve()
    asked = [f"recipe={options.recipe}", f"name={run.name}", f"run_dir={run}", f"head={run.name}"]
    asked += [f"schedule.phases.distilled.distill.folder={text}", "evaluate_after=false"]
    asked += [*OWN.get(run.name, []), *options.set]
    code, peak_gib = _run("train", *asked)
    if code == 0:
        (run / "training.json").write_text(json.dumps({"peak_gib": peak_gib}), encoding="utf-8")
    return code


def _run(*words: str) -> tuple[int, float]:
    """Run one command of specheads; return its exit code, and its peak memory in GiB."""
    print(f"\n$ specheads {' '.join(words)}", flush=True)
    child = subprocess.Popen([sys.executable, "-m", "specheads", *words])
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    # kibibytes on Linux, bytes on macOS
    return child.returncode, usage.ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)


def trained(run: Path) -> dict[str, Any]:
    """Return tokens, speed and peak memory of a training from its run directory."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [row for row in map(json.loads, lines) if "tokens_per_second" in row]
    return {
        "tokens": steps[-1]["tokens"],
        "tokens_per_second": statistics.median(row["tokens_per_second"] for row in steps[1:]),
        "peak_gib": json.loads((run / "training.json").read_text(encoding="utf-8"))["peak_gib"],
    }


if __name__ == "__main__":
    raise SystemExit(main())

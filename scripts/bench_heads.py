"""Train heads that differ in one setting, compare them, and write one table.

    python scripts/bench_heads.py                        every kind, into runs/heads
    python scripts/bench_heads.py --kinds medusa eagle3 --set schedule.phases.distilled.steps=50
    python scripts/bench_heads.py --record               and update recipes/README.md
    python scripts/bench_heads.py --ablate               the recipe's own head and its ablations
    python scripts/bench_heads.py --ablate as_it_is hard_labels --record    the recipe's card

Every part is a command of `specheads` (`train`, `compare`) in its own process. Finished parts are
not repeated, so an interrupted call resumes. All heads share text, generated text, optimizers,
steps, depth and prompts, except for the setting of an ablation. Training speed is read from the log
of each run, so nothing else should run at the same time.
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

PHASE = "schedule.phases.distilled"
CORPUS = "schedule.phases.corpus"

ABLATIONS: dict[str, list[str]] = {
    "as_it_is": [],
    "hard_labels": [f"{PHASE}.loss=cross_entropy"],
    "total_variation": [f"{PHASE}.loss=total_variation"],
    "lk_hybrid": [f"{PHASE}.loss=lk_hybrid"],
    "answers_only": [f"{PHASE}.answers_only=true"],
    "depth_1": ["head.depth=1"],
    "depth_5": ["head.depth=5"],
    "layers_1": ["head.num_layers=1"],
    "layers_4": ["head.num_layers=4"],
    "half_width": ["head.exit_dim=576"],
    "drafts_1024": ["head.draft_tokens=1024"],
    "drafts_all": ["head.draft_tokens=0"],
    # a part of the 256 answers, for as many training tokens
    "text_10": [f"{PHASE}.distill.num_samples=26", f"{PHASE}.distill.folder="],
    "text_30": [f"{PHASE}.distill.num_samples=77", f"{PHASE}.distill.folder="],
    "corpus_alone": [
        *("data=python_stdlib", "schedule=corpus_only", f"~{PHASE}", "head.draft_tokens=0"),
        *(f"{CORPUS}.{name}" for name in ("steps=100", "batch_size=3", "sequence_length=512")),
        *(f"{CORPUS}.{name}" for name in ("learning_rate=2e-3", "loss=soft_cross_entropy")),
    ],
    # both phases, so twice the tokens of the others
    "corpus_first": ["init={out}/corpus_alone/head"],
}
"""Overrides of recipe smollm2 by the name of the run."""

OWN = {kind: ["head.num_layers=1"] for kind in ("dflash", "dspark")}
"""Further overrides of some kinds: their published five layers cost more than a small base."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and compare; return the exit code."""
    options = _parse(arguments)
    changes = _changes(options)
    runs = {name: options.out / name for name in changes}
    for name, run in runs.items():
        if code := _train(run, changes[name], options):
            return code
    if options.ablate is not None:
        return _ablated(list(runs.values()), options)
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
            _record(text, options.recipe, "heads.json")
    return 0


def _ablated(runs: list[Path], options: argparse.Namespace) -> int:
    """Compare the ablations, each as a chain of its own depth."""
    out = options.out / "ablations"
    asked = [*COMPARED["chain"], "temperatures=[0]", *options.measure]
    if (code := _compare(out, runs, asked)) == 0 and options.record:
        text = (out / "compare.json").read_text(encoding="utf-8")
        _record(text, options.recipe, "ablations.json")
    return code


def _record(text: str, recipe: str, name: str) -> None:
    """Write results into the folder of the recipe, and update its tables."""
    (ROOT / "recipes" / recipe / name).write_text(text, encoding="utf-8")
    subprocess.check_call([sys.executable, str(ROOT / "scripts" / "results_table.py")])


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    found = sorted(path.stem for path in (ROOT / "configs" / "head").glob("*.yaml"))
    parser.add_argument("--kinds", nargs="+", choices=found, default=found, help="default: all")
    parser.add_argument(
        "--ablate",
        nargs="*",
        choices=[*ABLATIONS],
        help="ablations, not kinds; default: all",
    )
    parser.add_argument("--recipe", default="smollm2", help="recipe to change")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "heads", help="run folder")
    parser.add_argument("--text", type=Path, help="generated text; default: OUT/text")
    parser.add_argument("--set", nargs="*", default=[], help="further overrides for training")
    parser.add_argument("--measure", nargs="*", default=[], help="further overrides for comparing")
    parser.add_argument("--record", action="store_true", help="write the tables of the recipes")
    return parser.parse_args(arguments)


def _changes(options: argparse.Namespace) -> dict[str, list[str]]:
    """Return the overrides of each run."""
    if options.ablate is None:
        return {kind: [f"head={kind}", *OWN.get(kind, [])] for kind in options.kinds}
    names = options.ablate or [*ABLATIONS]
    return {name: [one.format(out=options.out) for one in ABLATIONS[name]] for name in names}


def _train(run: Path, changes: list[str], options: argparse.Namespace) -> int:
    """Train one head, unless it is finished; write the time and the peak memory of its process."""
    if (run / "training.json").is_file():
        return 0
    text = (options.text or options.out / "text").resolve()
    code, seconds, peak_gib = _run(
        "train",
        f"recipe={options.recipe}",
        f"name={run.name}",
        f"run_dir={run}",
        f"{PHASE}.distill.folder={text}",
        "evaluate_after=false",
        *changes,
        *options.set,
    )
    if code == 0:
        costs = {"seconds": seconds, "peak_gib": peak_gib}
        (run / "training.json").write_text(json.dumps(costs) + "\n", encoding="utf-8")
    return code


def _compare(out: Path, runs: list[Path], asked: list[str]) -> int:
    """Compare the heads, unless that is finished."""
    if (out / "compare.json").is_file():
        return 0
    heads = f"heads=[{','.join(map(str, runs))}]"
    return _run("compare", heads, f"out={out}", "drafters=[head]", *asked)[0]


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

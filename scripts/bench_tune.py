"""Hold the tree that `specheads tune` chose against its prediction, and against hand-written trees.

    python scripts/bench_tune.py runs/tiny_code runs/conversations     tunes what is not tuned yet
    python scripts/bench_tune.py RUN --again max_nodes=32 contexts=[64]   tunes anew, with these
    python scripts/bench_tune.py RUN --prompts 16 --repeats 3 --out runs/tune.json
    python scripts/bench_tune.py RUN --trees static chain                 beside these alone

Of each run the head decodes the run's own evaluation prompts, greedily, with the tuned tree and
with every tree of configs/tree/, all taking turns with the base alone, a row at a time. Speed-ups
are of decode steps, as predictions are, with intervals over prompts; `whole` has the prompt too.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console

import specheads
from specheads.base.model import FrozenBase
from specheads.commands import _compose
from specheads.config import Train, Tree, data_dir
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.core.files import write_atomic
from specheads.core.machine import dtype_name
from specheads.core.records import to_json
from specheads.decoding.trees import policies
from specheads.decoding.trees.named import fixed_policy
from specheads.decoding.trees.tuned import FILE, Tuned
from specheads.heads.load import load_head
from specheads.measure.counts import bootstrap_interval
from specheads.measure.evaluation import named_prompts
from specheads.measure.generation import GenerationSettings
from specheads.measure.speed import DraftMethod, Timing, summarise, time_methods
from specheads.measure.tables import ConsoleTable, with_interval
from specheads.runs.directory import RunDirectory
from specheads.runs.provenance import provenance

ROOT = Path(__file__).resolve().parents[1]

PATHS = [[0], [1], [0, 0]]
"""Of configs/tree/static.yaml, which leaves them to whoever takes it."""

COLUMNS = (
    *("run", "tree", "nodes", "tokens per forward", "step", "speed-up", "predicted", "off by"),
    *("tuned is faster by", "whole"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every run; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("runs", nargs="+", type=Path, help="finished runs")
    add("--again", nargs="*", help="tune anew, with these settings; new_tokens is --new-tokens")
    add("--trees", nargs="+", help="of configs/tree/; all where none is named")
    add("--prompts", type=int, default=24, help="decoded by every tree")
    add("--new-tokens", type=int, default=64, help="after each prompt, here and when tuning anew")
    add("--repeats", type=int, default=3, help="how often each prompt is timed")
    add("--out", type=Path, default=ROOT / "runs" / "tune.json")
    options = parser.parse_args(arguments)
    rows = [row for run in options.runs for row in measure(run, options)]
    made = {"schema": 1, "rows": rows, "provenance": to_json(provenance())}
    write_atomic(options.out, json.dumps(made, indent=1) + "\n")
    Console().print(ConsoleTable("tuned and hand-written trees", [*map(_shown, rows)], COLUMNS))
    sys.stdout.write(f"wrote {options.out}\n")
    return 0


def measure(place: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each tree of a run, the tuned one first."""
    run = RunDirectory(place)
    settings = _compose.read_run(run.config, Train)
    base = FrozenBase.load(**asdict(settings.base))
    if options.again is not None or not (run.head / FILE).is_file():
        # longer texts repeat themselves more, and a prediction is of texts as long as these
        asked = [*(options.again or []), f"new_tokens={options.new_tokens}"]
        specheads.tune(place, asked, base=base)
    head = load_head(run.head, base)
    refuse_other_texts(place, head.tuned, options.new_tokens)
    settings.evaluation.num_prompts = options.prompts
    prompts = [one.tokens for one in named_prompts(settings, base).prompts]
    context = statistics.fmean(map(len, prompts)) + options.new_tokens / 2
    chosen = head.tuned.best(1, context)
    trees = {"tuned": chosen.policy()} | hand_written(head, options.trees)
    arms = {name: DraftMethod(head, tree) for name, tree in trees.items()}
    how = GenerationSettings(max_new_tokens=options.new_tokens, progress=True)
    timings = time_methods(base, arms, prompts, how, repetitions=options.repeats)
    rows = []
    for name, tree in trees.items():
        alone, drafted, tuned = _seconds(timings[None], timings[name], timings["tuned"])
        whole = summarise(timings[None], timings[name])
        row = {
            "run": place.name,
            "head": head.kind,
            "base": base.fingerprint,
            "dtype": dtype_name(base.dtype),
            "tree": name,
            "num_nodes": tree.num_nodes,
            "tokens_per_forward": _tokens(timings[name]),
            "step_overhead": whole.step_overhead,
            "speedup": sum(alone) / sum(drafted),
            "interval": bootstrap_interval(alone, drafted),
            "whole": {"speedup": whole.speedup, "interval": whole.interval},
            "tuned_is_faster_by": sum(drafted) / sum(tuned),
            "tuned_is_faster_by_interval": bootstrap_interval(drafted, tuned),
        }
        if name == "tuned":
            row["predicted"] = {
                "speedup": chosen.predicted_speedup,
                "interval": chosen.interval,
                "tokens_per_forward": chosen.tokens_per_forward,
                "step_overhead": chosen.tokens_per_forward / chosen.predicted_speedup,
            }
            row["off_by"] = chosen.predicted_speedup / row["speedup"] - 1
        rows.append(row)
    return rows


def refuse_other_texts(run: Path, tuned: Tuned, new_tokens: int) -> None:
    """Refuse to hold a prediction against texts of another length than those it was made on."""
    if tuned.new_tokens not in (0, new_tokens):
        raise SystemExit(
            f"error: --new-tokens must be what {run} was tuned on, {tuned.new_tokens}, got "
            f"{new_tokens}; name that, or tune anew with --again"
        )


def hand_written(head: Head, names: Sequence[str] | None = None) -> dict[str, policies.TreePolicy]:
    """Return the trees of configs/tree/ that a head can draft, or those named among them."""
    found = {}
    for file in sorted((data_dir("configs") / "tree").glob("*.yaml")):
        raw: Any = OmegaConf.to_container(OmegaConf.load(file))
        raw |= {"paths": PATHS} if raw.get("paths") == "???" else {}
        raw |= {"branches": raw["branches"][: head.depth]} if "branches" in raw else {}
        try:
            policy = fixed_policy(replace(Tree(), **raw), head.depth)
        except InputError:
            # a published tree may be deeper than the head
            continue
        if policy is not None:
            found[file.stem] = policy
    if unknown := sorted({*(names or ())} - {*found}):
        known = ", ".join(found)
        raise SystemExit(f"error: --trees must be among {known}; got {', '.join(unknown)}")
    return {name: found[name] for name in names or found}


def _seconds(*arms: list[list[Timing]]) -> list[list[float]]:
    """Return what each arm's decode steps took for each prompt, for the same number of tokens.

    Prompts after which any arm took a single step say nothing of steps, and are left out.
    """
    kept = [place for place in range(len(arms[0])) if all(arm[place][0].num_steps for arm in arms)]
    if not kept:
        raise SystemExit(
            "error: a text of at least two decode steps is needed, got none; raise --prompts or "
            "--new-tokens"
        )
    out = []
    for arm in arms:
        seconds = []
        for place in kept:
            one = arm[place]
            step = statistics.median(timing.step_seconds / timing.num_steps for timing in one)
            matched = (arms[0][place][0].new_tokens - 1) / max(one[0].new_tokens - 1, 1)
            seconds.append(step * one[0].forwards * matched)
        out.append(seconds)
    return out


def _tokens(arm: list[list[Timing]]) -> float:
    """Return the tokens a forward gave; reading a prompt gives one more."""
    firsts = [one[0] for one in arm]
    return sum(one.new_tokens - 1 for one in firsts) / sum(one.forwards for one in firsts)


def _shown(row: dict[str, Any]) -> list[str]:
    predicted = row.get("predicted")
    return [
        row["run"],
        row["tree"],
        str(row["num_nodes"]),
        f"{row['tokens_per_forward']:.2f}",
        f"{row['step_overhead']:.2f}",
        with_interval(row["speedup"], row["interval"]),
        with_interval(predicted["speedup"], predicted["interval"]) if predicted else "",
        f"{row['off_by']:+.1%}" if predicted else "",
        with_interval(row["tuned_is_faster_by"], row["tuned_is_faster_by_interval"]),
        with_interval(row["whole"]["speedup"], row["whole"]["interval"]),
    ]


if __name__ == "__main__":
    sys.exit(main())

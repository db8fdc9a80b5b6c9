"""Several ways of drafting beside each other: the same prompts, one run, turn by turn."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from specheads.base.model import FrozenBase
from specheads.core.drafter import Drafter
from specheads.decoding.acceptance.sampling import GREEDY, Sampling
from specheads.decoding.trees import policies
from specheads.measure.how import How
from specheads.measure.online import measure_online
from specheads.measure.plots import draw_comparison
from specheads.measure.speed import Pair, Timing, summarise, time_generate
from specheads.runs.directory import write_atomic
from specheads.runs.progress import bar


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of drafting."""

    drafter: Drafter
    tree: policies.TreePolicy


def compare_drafters(
    base: FrozenBase,
    arms: Mapping[str, Arm],
    prompts: list[list[int]],
    alone: list[list[int]],
    *,
    max_new_tokens: int,
    settings: Sampling = GREEDY,
    batch_size: int = 1,
    progress: bool = False,
) -> dict[str, dict[str, Any]]:
    """Return what each arm gives: its tree, and the sections that need no clock.

    Args:
        base: The model that decides.
        arms: What is compared, by name.
        prompts: Token ids.
        alone: What `decode_prompts` without a drafter gave each prompt, with the same limits.
        max_new_tokens: Limit for each prompt.
        settings: How tokens are chosen; each prompt draws with a seed of its own.
        batch_size: Prompts decoded together.
        progress: Whether to show progress bars.
    """
    return {
        name: {
            "tree": arm.tree.name,
            "num_nodes": arm.tree.num_nodes,
            **measure_online(
                base,
                arm.drafter,
                prompts,
                alone,
                tree=arm.tree,
                max_new_tokens=max_new_tokens,
                settings=settings,
                batch_size=batch_size,
                progress=progress,
            ),
        }
        for name, arm in arms.items()
    }


def compare_speed(
    base: FrozenBase,
    arms: Mapping[str, Arm],
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    settings: Sampling = GREEDY,
    repetitions: int = 2,
    batch_size: int = 1,
    progress: bool = False,
) -> dict[str, dict[str, Any]]:
    """Return the `speed` section of each arm.

    The base alone and all arms decode a batch of prompts one right after the other, and each
    repetition begins with another of them. The first batch is decoded once before the clock
    counts, and of a batch's repetitions the median counts.

    Args:
        base: The model that decides.
        arms: What is compared, by name.
        prompts: Token ids.
        max_new_tokens: Limit for each prompt.
        settings: How tokens are chosen; each prompt draws with a seed of its own.
        repetitions: How often everything is timed.
        batch_size: Prompts decoded together; intervals are over these batches.
        progress: Whether to show a progress bar.
    """
    units = [prompts[first : first + batch_size] for first in range(0, len(prompts), batch_size)]
    entrants: dict[str | None, Arm | None] = {None: None, **arms}
    timings: dict[str | None, list[list[Timing]]] = {name: [[] for _ in units] for name in entrants}

    def run(name: str | None, unit: list[list[int]]) -> Timing:
        arm = entrants[name]
        return time_generate(
            base,
            arm.drafter if arm else None,
            unit,
            How(
                tree=arm.tree if arm else None,
                sampling=settings,
                max_new_tokens=max_new_tokens,
            ),
        )

    for name in entrants:
        run(name, units[0])
    names = list(entrants)
    work = [(turn, place) for turn in range(repetitions) for place in range(len(units))]
    for turn, place in bar(work, "speed", progress):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            timings[name][place].append(run(name, units[place]))
    return {
        name: summarise([Pair(*both) for both in zip(timings[None], timings[name], strict=True)])
        for name in arms
    }


def table(rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return the comparison as a table for the console."""
    out = Table(title="drafters beside each other", title_justify="left")
    for column in (
        "drafter", "nodes", "tokens per forward", "without loops", "identical", "speed-up",
    ):  # fmt: skip
        out.add_column(column)
    for name, row in rows.items():
        same = row["lossless"]
        without = row["degenerate"]["without"]
        out.add_row(
            name,
            str(row["num_nodes"]),
            _figure(row["online"], "tokens_per_forward"),
            _figure(without, "tokens_per_forward") if without else "none left",
            f"{same['identical']} of {same['compared']}",
            _figure(row["speed"], "speedup"),
        )
    return out


def _figure(section: Mapping[str, Any], key: str) -> str:
    low, high = section["interval"]
    return f"{section[key]:.2f} [{low:.2f}, {high:.2f}]"


def write_comparison(folder: Path, comparison: Mapping[str, Any]) -> Path:
    """Write compare.json and compare.png; return the former, which appears last.

    Args:
        folder: Made where it is missing.
        comparison: `drafters` has a row for each, as `compare_drafters` and `compare_speed` give.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "compare.png").write_bytes(draw_comparison(comparison["drafters"]))
    path = folder / "compare.json"
    write_atomic(path, json.dumps(comparison, indent=1) + "\n")
    return path

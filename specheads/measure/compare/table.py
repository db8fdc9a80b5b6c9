"""A comparison for people: tables on the console, and the files."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from specheads.core.paths import writable_folder
from specheads.measure.comparison import Comparison, Condition, DrafterRow
from specheads.measure.plots import draw_comparison
from specheads.measure.rates import Gain
from specheads.measure.report.words import told_beside
from specheads.measure.store import dumps
from specheads.measure.tables import Fitted, with_interval
from specheads.runs.directory import write_atomic

COLUMNS = (
    "drafter",
    "tokens per second",
    "speed-up",
    "fastest over it",
    "tokens per forward",
    "without loops",
    "draft + rest, ms",
    "text of the base",
)


def tables(comparison: Comparison) -> Iterator[Fitted]:
    """Yield a table for each condition, and of several heads each over each other."""
    for condition in comparison.conditions:
        yield table(condition)
        if len(comparison.heads) > 1:
            yield against(condition, [*comparison.heads])
            yield accepted_against(condition, [*comparison.heads])


def table(condition: Condition) -> Fitted:
    """Return the drafters of a condition, the fastest first, and the base alone."""
    rows = {name: condition.drafters[name] for name in condition.ranking}
    first, batch = condition.ranking[0], condition.batch_size
    lines = [
        (
            # transformers drafts for one prompt at a time
            name if row.batches or batch == 1 else f"{name} (cannot batch: one by one)",
            f"{row.speed.tokens_per_second:.1f}",
            with_interval(row.speed.speedup, row.speed.interval),
            _over(rows[first].over, name),
            with_interval(row.online.tokens_per_forward, row.online.interval),
            _without_loops(row),
            _step(row.speed.draft_milliseconds or 0.0, row.speed.step_milliseconds),
            _text(row),
        )
        for name, row in rows.items()
    ]
    speed = rows[first].speed
    step = _step(0.0, speed.base_step_milliseconds)
    alone = f"{speed.base_tokens_per_second:.1f}"
    lines.append(("base alone", alone, "1.00", "", "1.00", "", step, ""))
    title = f"drafters at temperature {condition.temperature:g}, batch {batch}"
    return Fitted(title, lines, COLUMNS)


def against(condition: Condition, names: list[str]) -> Fitted:
    """Return tokens per second of each head, down, over those of each other, across."""
    gains = {name: condition.drafters[name].over for name in condition.ranking if name in names}
    return Fitted("tokens per second, row over column", pairs(gains), ("head", *gains))


def accepted_against(condition: Condition, names: list[str]) -> Fitted:
    """Return tokens per forward of each head, down, over those of each other, across."""
    rows = {name: condition.drafters[name] for name in condition.ranking if name in names}
    gains = {name: row.accepted_over for name, row in rows.items()}
    return Fitted("tokens per forward, row over column", pairs(gains), ("head", *gains))


def pairs(gains: Mapping[str, Mapping[str, Gain]]) -> list[tuple[str, ...]]:
    """Return a line for each name, with what it gives over each other; over itself nothing."""
    return [(name, *(_over(over, other) for other in gains)) for name, over in gains.items()]


def _over(over: Mapping[str, Gain], other: str) -> str:
    gain = over.get(other)
    return with_interval(gain.ratio, gain.interval) if gain else ""


def _without_loops(row: DrafterRow) -> str:
    rest = row.degenerate.without
    return with_interval(rest.tokens_per_forward, rest.interval) if rest else "none left"


def _step(draft: float, whole: float | None) -> str:
    return "no second step" if whole is None else f"{draft:.2f} + {max(whole - draft, 0):.2f}"


def _text(row: DrafterRow) -> str:
    held = row.lossless
    if not held.compared:
        return "other draws"
    return f"{held.identical} of {held.compared}{told_beside(held)}"


def write_comparison(folder: Path, comparison: Comparison) -> Path:
    """Write compare.json and compare.png; return the former, which appears last."""
    folder = writable_folder(folder)
    write_atomic(folder / "compare.png", draw_comparison(comparison.conditions))
    path = folder / "compare.json"
    write_atomic(path, dumps(comparison))
    return path

"""Plots of reports, drawn without a display or global state."""

import io
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specheads.measure.results import Results

BLUE, ORANGE, GREY = "#2563a8", "#d97726", "#6b7683"
SHADES = ("#f1f4f8", "#fdf3e7", "#eef6ef")
"""Backgrounds of successive phases."""
SIZE = 5.0, 3.6
"""Inches: a phone shows this width at a readable font size."""
Rows = Sequence[Mapping[str, Any]]
"""Rows of metrics.jsonl."""


def pictures(results: Results, history: Rows) -> dict[str, bytes]:
    """Return the plots for which there is data as PNG, by name."""
    found: dict[str, bytes] = {}
    for name, draw in PLOTS.items():
        if figure := draw(results, history):
            buffer = io.BytesIO()
            figure.savefig(buffer, format="png", dpi=144)
            found[name] = buffer.getvalue()
    return found


def _axes(title: str, down: str, across: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.add_subplot()
    axes.set(title=title, xlabel=across, ylabel=down)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _with_legend(figure: Figure) -> Figure:
    """Put the legend below the axes, where it hides no curve."""
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


def _points(rows: Rows, key: str, across: str = "step") -> tuple[list[Any], list[Any]]:
    found = [row for row in rows if key in row]
    return [row[across] for row in found], [row[key] for row in found]


def _by_depth(axes: Axes, rows: Rows, prefix: str, **style: Any) -> None:
    """Draw a curve for each depth over steps; deeper ones are paler."""
    keys = {key for row in rows for key in row if key.startswith(prefix)}
    depths = {int(key.removeprefix(prefix)) for key in keys}
    for depth in sorted(depths):
        shade = 0.75 - 0.45 * depth / max(*depths, 1)
        how = {"color": ORANGE, "alpha": shade, "linewidth": 1, "label": f"depth {depth + 1}"}
        axes.plot(*_points(rows, f"{prefix}{depth}"), **how, **style)


def _speed(results: Results, _: Rows) -> Figure | None:
    if not (speed := results.speed):
        return None
    figure, axes = _axes("Tokens per second", "tokens per second", "")
    alone, drafted = speed.base_tokens_per_second, speed.tokens_per_second
    # the interval of the ratio, drawn on the head's bar in units of the base's rate
    low, high = (alone * bound for bound in speed.interval)
    error = [[0, max(drafted - low, 0)], [0, max(high - drafted, 0)]]
    bars = axes.bar(["base alone", "with head"], [alone, drafted], color=[GREY, BLUE], width=0.55)
    axes.errorbar([0, 1], [alone, drafted], yerr=error, fmt="none", ecolor="black", capsize=4)
    labels = [f"{alone:.0f}", f"{drafted:.0f} ({speed.speedup:.2f}x)"]
    axes.bar_label(bars, labels, label_type="center", color="white", fontweight="bold")
    return figure


def _acceptance(results: Results, _: Rows) -> Figure | None:
    sections = ("offline", results.offline, ORANGE, "s--"), ("online", results.online, BLUE, "o-")
    figure, axes = _axes("Acceptance by depth", "share accepted", "drafted depth")
    for name, section, color, style in sections:
        if section:
            rates = [row.accepted / max(row.offered, 1) for row in section.per_depth]
            axes.plot(range(1, len(rates) + 1), rates, style, color=color, label=name)
    if results.offline:
        top = [row[0] for row in results.offline.top_k_accuracy]
        axes.plot(range(1, len(top) + 1), top, ".:", color=GREY, label="teacher-forced top 1")
    axes.set(ylim=(0, 1))
    axes.locator_params(axis="x", integer=True)
    return _with_legend(figure) if axes.lines else None


def _calibration(results: Results, _: Rows) -> Figure | None:
    """Draw a reliability diagram: shares over probabilities, paler for deeper levels."""
    if not (depths := results.calibration):
        return None
    across = "calibrated probability of the best guess"
    figure, axes = _axes("Calibration of drafts", "share accepted", across)
    axes.plot([0, 1], [0, 1], ":", color=GREY)
    for depth, one in enumerate(depths):
        shade, label = 1.0 - 0.7 * depth / len(depths), f"depth {depth + 1}, error {one.error:.3f}"
        axes.plot(one.chances, one.accepted, ".-", color=BLUE, alpha=shade, label=label)
    axes.set(xlim=(0, 1), ylim=(0, 1))
    return _with_legend(figure)


def _contexts(results: Results, _: Rows) -> Figure | None:
    """Draw tokens per forward, and the speed-up if it was timed, over the context length."""
    if not (rows := results.contexts):
        return None
    figure, axes = _axes("By context length", "times the base alone", "tokens of the prompt")
    curves = {"tokens per forward": [(row.tokens_per_forward, row.interval) for row in rows]}
    if all(row.speed for row in rows):
        curves["speed-up"] = [(row.speed.speedup, row.speed.interval) for row in rows if row.speed]
    places = [row.context for row in rows]
    for (name, points), color in zip(curves.items(), (BLUE, ORANGE), strict=False):
        values = [value for value, _ in points]
        error = [(value - low, high - value) for value, (low, high) in points]
        how: dict[str, Any] = {"fmt": "o-", "color": color, "label": name, "capsize": 4}
        axes.errorbar(places, values, yerr=[*zip(*error, strict=True)], **how)
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [f"{place:,}" for place in places])
    axes.set_ylim(bottom=0)
    return _with_legend(figure)


def _loss(_: Results, history: Rows) -> Figure | None:
    rows = [row for row in history if "loss" in row]
    if not rows:
        return None
    figure, axes = _axes("Training loss", "loss per token", "step")
    first = rows[0]["step"]
    for number, (name, group) in enumerate(groupby(rows, lambda row: row.get("phase", ""))):
        last = [row["step"] for row in group][-1]
        axes.axvspan(first, last, color=SHADES[number % len(SHADES)], zorder=0)
        place = {"transform": axes.get_xaxis_transform(), "ha": "center", "va": "top"}
        axes.text((first + last) / 2, 0.97, name, color=GREY, **place)
        first = last
    _by_depth(axes, rows, "loss/depth_")
    axes.plot(*_points(rows, "loss"), color=BLUE, linewidth=1.8, label="loss")
    held_out = _points(history, "validation/loss")
    if held_out[0]:
        axes.plot(*held_out, "k.--", linewidth=1, label="held out")
    return _with_legend(figure)


def _validation(_: Results, history: Rows) -> Figure | None:
    if not any("validation/accept/depth_0" in row for row in history):
        return None
    figure, axes = _axes("Agreement on held-out text", "share accepted", "step")
    _by_depth(axes, history, "validation/accept/depth_", marker=".")
    axes.set(ylim=(0, 1))
    return _with_legend(figure)


def _learning(_: Results, history: Rows) -> Figure | None:
    """Draw acceptance and loss on held-out text over training tokens and hours."""
    rows = [row for row in history if "hours" in row]
    down = {"validation/tokens_per_forward": "tokens per forward", "validation/loss": "loss"}
    found = [key for key in down if any(key in row for row in rows)]
    if not found:
        return None
    figure = Figure(figsize=SIZE, layout="constrained")
    figure.suptitle("Learning curve on held-out text", fontsize="medium")
    grid = figure.subplots(len(found), 2, sharex="col", sharey="row", squeeze=False)
    for panels, key in zip(grid, found, strict=True):
        panels[0].set_ylabel(down[key])
        for axes, across in zip(panels, ("tokens", "hours"), strict=True):
            axes.plot(*_points(rows, key, across), ".-", color=BLUE)
            axes.set(xlabel=f"{across} of training")
            axes.label_outer()
    return figure


PLOTS: dict[str, Callable[[Results, Rows], Figure | None]] = {
    "speed": _speed,
    "acceptance": _acceptance,
    "calibration": _calibration,
    "contexts": _contexts,
    "loss": _loss,
    "validation": _validation,
    "learning": _learning,
}

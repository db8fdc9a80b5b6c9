"""Plots of reports, drawn without a display or global state."""

import io
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from specheads.measure.results import Results

BLUE, ORANGE, GREY = "#2563a8", "#d97726", "#6b7683"
SHADES = ("#f1f4f8", "#fdf3e7", "#eef6ef")
"""Backgrounds of successive phases."""
SIZE = 5.0, 3.6
"""Inches: a phone shows this width at a readable font size."""
Metrics = Sequence[Mapping[str, Any]]
"""Rows of metrics.jsonl."""


def draw_plots(results: Results, history: Metrics) -> dict[str, bytes]:
    """Return the plots for which there is data as PNG, by name."""
    plots: dict[str, bytes] = {}
    for name, draw in PLOTS.items():
        if figure := draw(results, history):
            buffer = io.BytesIO()
            figure.savefig(buffer, format="png", dpi=144)
            plots[name] = buffer.getvalue()
    return plots


def make_axes(title: str, ylabel: str, xlabel: str) -> tuple[Figure, Axes]:
    """Return a figure with empty axes."""
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.add_subplot()
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def add_legend(figure: Figure) -> Figure:
    """Put the legend below the axes, in as many columns as the figure is wide enough for."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    for ncols in 3, 2, 1:
        legend = figure.legend(loc="outside lower center", ncols=ncols, frameon=False)
        if ncols == 1 or legend.get_window_extent(renderer).width <= figure.bbox.width:
            break
        legend.remove()
    return figure


def curve(rows: Metrics, key: str, column: str = "step") -> tuple[list[Any], list[Any]]:
    """Return the values of a column and of a key, of the rows that have the key."""
    points = [row for row in rows if key in row]
    return [row[column] for row in points], [row[key] for row in points]


def draw_depths(axes: Axes, rows: Metrics, prefix: str, marker: str) -> None:
    """Draw a curve for each depth over steps; deeper ones are paler."""
    keys = {key for row in rows for key in row if key.startswith(prefix)}
    depths = {int(key.removeprefix(prefix)) for key in keys}
    for depth in sorted(depths):
        shade, label = 0.75 - 0.45 * depth / max(*depths, 1), f"depth {depth + 1}"
        points = curve(rows, f"{prefix}{depth}")
        axes.plot(*points, color=ORANGE, alpha=shade, lw=1, label=label, marker=marker)


def _draw_acceptance(results: Results, _: Metrics) -> Figure | None:
    sections = ("offline", results.offline, ORANGE, "s--"), ("online", results.online, BLUE, "o-")
    figure, axes = make_axes("Acceptance by depth", "share accepted", "drafted depth")
    for name, section, color, style in sections:
        if section:
            rates = [row.accepted / max(row.offered, 1) for row in section.per_depth]
            axes.plot(range(1, len(rates) + 1), rates, style, color=color, label=name)
    if results.offline:
        top = [row[0] for row in results.offline.top_k_accuracy]
        axes.plot(range(1, len(top) + 1), top, ".:", color=GREY, label="teacher-forced top 1")
    axes.set(ylim=(0, 1))
    axes.locator_params(axis="x", integer=True)
    return add_legend(figure) if axes.lines else None


def _draw_calibration(results: Results, _: Metrics) -> Figure | None:
    """Draw a reliability diagram: shares over probabilities, paler for deeper levels."""
    if not (depths := results.calibration):
        return None
    xlabel = "calibrated probability of the best guess"
    figure, axes = make_axes("Calibration of drafts", "share accepted", xlabel)
    axes.plot([0, 1], [0, 1], ":", color=GREY)
    for index, depth in enumerate(depths):
        shade = 1.0 - 0.7 * index / len(depths)
        label = f"depth {index + 1}, error {depth.error:.3f}"
        axes.plot(depth.chances, depth.accepted, ".-", color=BLUE, alpha=shade, label=label)
    axes.set(xlim=(0, 1), ylim=(0, 1))
    return add_legend(figure)


def _draw_contexts(results: Results, _: Metrics) -> Figure | None:
    """Draw tokens per forward, and the speed-up if it was timed, over the context length."""
    if not (rows := results.contexts):
        return None
    figure, axes = make_axes("By context length", "times the base alone", "tokens of the prompt")
    curves = {"tokens per forward": [(row.tokens_per_forward, row.interval) for row in rows]}
    if all(row.speed for row in rows):
        curves["speed-up"] = [(row.speed.speedup, row.speed.interval) for row in rows if row.speed]
    contexts = [row.context for row in rows]
    for (name, points), color in zip(curves.items(), (BLUE, ORANGE), strict=False):
        values = [value for value, _ in points]
        error = [(value - low, high - value) for value, (low, high) in points]
        error = [*zip(*error, strict=True)]
        axes.errorbar(contexts, values, error, fmt="o-", color=color, label=name, capsize=4)
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
    axes.set_ylim(bottom=0)
    return add_legend(figure)


def _draw_loss(_: Results, history: Metrics) -> Figure | None:
    rows = [row for row in history if "loss" in row]
    if not rows:
        return None
    figure, axes = make_axes("Training loss", "loss per token", "step")
    start = rows[0]["step"]
    for number, (name, group) in enumerate(groupby(rows, lambda row: row.get("phase", ""))):
        end = [row["step"] for row in group][-1]
        axes.axvspan(start, end, color=SHADES[number % len(SHADES)], zorder=0)
        center, transform = (start + end) / 2, axes.get_xaxis_transform()
        axes.text(center, 0.97, name, color=GREY, transform=transform, ha="center", va="top")
        start = end
    # a line through one point is invisible without a marker
    marker = "." if len(rows) == 1 else ""
    draw_depths(axes, rows, "loss/depth_", marker)
    axes.plot(*curve(rows, "loss"), color=BLUE, linewidth=1.8, label="loss", marker=marker)
    steps, losses = curve(history, "validation/loss")
    if steps:
        axes.plot(steps, losses, "k.--", linewidth=1, label="held out")
    return add_legend(figure)


def _draw_validation(_: Results, history: Metrics) -> Figure | None:
    if not any("validation/accept/depth_0" in row for row in history):
        return None
    figure, axes = make_axes("Agreement on held-out text", "share accepted", "step")
    draw_depths(axes, history, "validation/accept/depth_", ".")
    axes.set(ylim=(0, 1))
    return add_legend(figure)


def _draw_learning(_: Results, history: Metrics) -> Figure | None:
    """Draw acceptance and loss on held-out text over training tokens and hours.

    A single point is no curve: the plots over steps show it.
    """
    rows = [row for row in history if "hours" in row]
    labels = {"validation/tokens_per_forward": "tokens per forward", "validation/loss": "loss"}
    keys = [key for key in labels if sum(key in row for row in rows) > 1]
    if not keys:
        return None
    figure = Figure(figsize=SIZE, layout="constrained")
    figure.suptitle("Learning curve on held-out text", fontsize="medium")
    grid = figure.subplots(len(keys), 2, sharex="col", sharey="row", squeeze=False)
    for panels, key in zip(grid, keys, strict=True):
        panels[0].set_ylabel(labels[key])
        for axes, column in zip(panels, ("tokens", "hours"), strict=True):
            axes.plot(*curve(rows, key, column), ".-", color=BLUE)
            axes.set(xlabel=f"{column} of training")
            axes.label_outer()
    return figure


PLOTS: dict[str, Callable[[Results, Metrics], Figure | None]] = {
    "acceptance": _draw_acceptance,
    "calibration": _draw_calibration,
    "contexts": _draw_contexts,
    "loss": _draw_loss,
    "validation": _draw_validation,
    "learning": _draw_learning,
}

"""Plots of reports and simulations, drawn without a display or global state."""

import io
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specheads.decoding.calibration import Reliability
from specheads.measure.results import ContextRate, Results, Speed

BLUE, ORANGE, GREY = "#2563a8", "#d97726", "#6b7683"
TEXT = "#555555"
SHADES = ("#f1f4f8", "#fdf3e7", "#eef6ef")
"""Backgrounds of successive phases."""
WIDTH = 5.0
"""Width in inches: a phone shows this much at a readable font size."""


def figures(results: Results, history: Sequence[Mapping[str, Any]]) -> dict[str, Figure]:
    """Return the figures for which there is data, by name."""
    found: dict[str, Figure] = {}
    held_out = [row for row in history if "validation/loss" in row]
    if results.speed:
        found["speed"] = _speed(results.speed)
    if results.offline or results.online:
        found["acceptance"] = _acceptance(results)
    if results.calibration:
        found["calibration"] = _calibration(results.calibration)
    if results.contexts:
        found["contexts"] = _contexts(results.contexts)
    if any("loss" in row for row in history):
        found["loss"] = _losses([row for row in history if "loss" in row], held_out)
    if any("validation/accept/depth_0" in row for row in held_out):
        found["validation"] = _held_out(held_out)
    if learning := _learning([row for row in history if "hours" in row]):
        found["learning"] = learning
    return found


def png(figure: Figure, dpi: int = 144) -> bytes:
    """Return a figure as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


def _axes(title: str, down: str, across: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, 3.6), layout="constrained")
    axes = figure.add_subplot()
    axes.set(title=title, xlabel=across, ylabel=down)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _legend(figure: Figure) -> None:
    """Put the legend below the axes, where it hides no curve."""
    figure.legend(loc="outside lower center", ncols=3, frameon=False)


def _acceptance(results: Results) -> Figure:
    figure, axes = _axes("Acceptance by depth", "share accepted", "drafted depth")
    deepest = 1
    sections = ("offline", results.offline, ORANGE, "s--"), ("online", results.online, BLUE, "o-")
    for name, section, color, style in sections:
        if not section:
            continue
        rates = [row.accepted / max(row.offered, 1) for row in section.per_depth]
        axes.plot(range(1, len(rates) + 1), rates, style, color=color, label=name)
        deepest = max(deepest, len(rates))
    if results.offline and results.offline.top_k_accuracy:
        top = [row[0] for row in results.offline.top_k_accuracy]
        label = "teacher-forced top 1"
        axes.plot(range(1, len(top) + 1), top, ":", color=GREY, marker=".", label=label)
        deepest = max(deepest, len(top))
    axes.set(ylim=(0, 1), xticks=range(1, deepest + 1))
    _legend(figure)
    return figure


def _calibration(depths: Sequence[Reliability]) -> Figure:
    """Draw a reliability diagram: shares over probabilities, paler for deeper levels."""
    across = "calibrated probability of the best guess"
    figure, axes = _axes("Calibration of drafts", "share accepted", across)
    axes.plot([0, 1], [0, 1], ":", color=GREY)
    for depth, one in enumerate(depths, start=1):
        shade = 1.0 - 0.7 * (depth - 1) / max(len(depths) - 1, 1)
        label = f"depth {depth}, error {one.error:.3f}"
        axes.plot(one.chances, one.accepted, ".-", color=BLUE, alpha=shade, label=label)
    axes.set(xlim=(0, 1), ylim=(0, 1))
    _legend(figure)
    return figure


def _contexts(rows: Sequence[ContextRate]) -> Figure:
    """Draw tokens per forward, and the speed-up if it was timed, over the context length."""
    figure, axes = _axes("By context length", "times the base alone", "tokens of the prompt")
    places, timed = [one.context for one in rows], [one.speed for one in rows if one.speed]
    rates = [one.tokens_per_forward for one in rows]
    curves = [("tokens per forward", rates, [one.interval for one in rows], BLUE, "o-")]
    if timed:
        gains, intervals = [one.speedup for one in timed], [one.interval for one in timed]
        curves.append(("speed-up", gains, intervals, ORANGE, "s--"))
    for name, values, intervals, color, style in curves:
        ends = zip(values, intervals, strict=True)
        error = [[value - low, high - value] for value, (low, high) in ends]
        error = [*zip(*error, strict=True)]
        axes.errorbar(places, values, yerr=error, fmt=style, color=color, label=name, capsize=4)
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [f"{place:,}" for place in places])
    axes.set_ylim(bottom=0)
    _legend(figure)
    return figure


def _losses(rows: Sequence[Mapping[str, Any]], held_out: Sequence[Mapping[str, Any]]) -> Figure:
    figure, axes = _axes("Training loss", "loss per token", "step")
    for number, (name, first, last) in enumerate(_phases(rows)):
        axes.axvspan(first, last, color=SHADES[number % len(SHADES)], zorder=0)
        place = {"transform": axes.get_xaxis_transform(), "ha": "center", "va": "top"}
        axes.text((first + last) / 2, 0.97, name, color=TEXT, **place)
    _by_depth(axes, rows, "loss/depth_")
    axes.plot(*_points(rows, "loss"), color=BLUE, linewidth=1.8, label="loss")
    if held_out:
        axes.plot(*_points(held_out, "validation/loss"), "k.--", linewidth=1, label="held out")
    _legend(figure)
    return figure


def _held_out(rows: Sequence[Mapping[str, Any]]) -> Figure:
    figure, axes = _axes("Agreement on held-out text", "share accepted", "step")
    _by_depth(axes, rows, "validation/accept/depth_", marker=".")
    axes.set(ylim=(0, 1))
    _legend(figure)
    return figure


def _learning(rows: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Draw acceptance and loss on held-out text over training tokens and hours."""
    down = {"validation/tokens_per_forward": "tokens per forward", "validation/loss": "loss"}
    found = [(key, label) for key, label in down.items() if any(key in row for row in rows)]
    if not found:
        return None
    figure = Figure(figsize=(WIDTH, 0.8 + 1.9 * len(found)), layout="constrained")
    figure.suptitle("Learning curve on held-out text", fontsize="medium")
    grid = figure.subplots(len(found), 2, sharex="col", sharey="row", squeeze=False)
    for panels, (key, label) in zip(grid, found, strict=True):
        for axes, across in zip(panels, ("tokens", "hours"), strict=True):
            places, values = _points(rows, key, across)
            axes.plot(places, values, ".-", color=BLUE)
            axes.spines[["top", "right"]].set_visible(False)
        panels[0].set_ylabel(label)
    for axes, across in zip(grid[-1], ("tokens read", "hours of training"), strict=True):
        axes.set_xlabel(across)
    return figure


def _by_depth(axes: Axes, rows: Sequence[Mapping[str, Any]], prefix: str, **style: Any) -> None:
    """Draw a curve for each depth over steps; deeper ones are paler."""
    keys = sorted({key for row in rows for key in row if key.startswith(prefix)}, key=_depth)
    for number, key in enumerate(keys):
        shade = 0.75 - 0.45 * number / max(len(keys) - 1, 1)
        style_ = {"color": ORANGE, "alpha": shade, "linewidth": 1, "label": f"depth {_depth(key)}"}
        axes.plot(*_points(rows, key), **style_, **style)


def _depth(key: str) -> int:
    return int(key.rpartition("_")[2]) + 1


def _points(
    rows: Sequence[Mapping[str, Any]], key: str, across: str = "step"
) -> tuple[list[int | float], list[float]]:
    found = [row for row in rows if key in row]
    return [row[across] for row in found], [row[key] for row in found]


def _phases(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, int, int]]:
    """Return the name, first and last step of each phase, without gaps between phases."""
    spans: list[tuple[str, int, int]] = []
    for name, group in groupby(rows, lambda row: str(row.get("phase", ""))):
        steps = [row["step"] for row in group]
        spans.append((name, spans[-1][2] if spans else steps[0], steps[-1]))
    return spans


def _speed(speed: Speed) -> Figure:
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

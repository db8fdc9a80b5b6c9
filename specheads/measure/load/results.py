"""load.json: what requests wait for by load, without speculation and with it."""

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from specheads.measure.load.simulate import Simulation
from specheads.measure.tables import Fitted

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """How seconds are distributed over requests."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Seconds":
        """Return what so many requests waited for."""
        middle, most, nearly_all = np.percentile(values, [50, 90, 99]).tolist()
        return cls(mean=float(np.mean(values)), p50=middle, p90=most, p99=nearly_all)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRow:
    """One way to draft under one load."""

    load: str
    """Requests a second, or where they were recorded."""
    draft: str
    """none, a fixed depth, goodput, or goodput with copied text."""
    requests: int
    latency: Seconds
    """From a request's arrival to its last token."""
    first_token: Seconds
    """From a request's arrival to its first token."""
    tokens_per_second: float
    """New tokens of all requests over the time from the first arrival to the last token."""
    mean_batch: float
    """Rows of a step."""
    mean_depth: float
    """Drafted depth, over the rows of all steps."""
    busy: float
    """Share of that time in which anything was computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """load.json."""

    schema: int = SCHEMA
    times: str
    """Where times come from: measured, with the machine, or computed, with the one computed for."""
    computed: bool
    """Whether no machine took these times."""
    acceptance: str
    """Where acceptance comes from."""
    rates: list[float]
    """Conditional acceptance by depth."""
    max_batch: int
    seed: int
    rows: list[LoadRow]


def summarise(load: str, draft: str, found: Simulation) -> LoadRow:
    """Return what a simulation amounts to."""
    served, steps = found.served, found.steps
    began = min(one.arrival.seconds for one in served)
    seconds = max(one.finished for one in served) - began
    rows = sum(one.batch for one in steps)
    return LoadRow(
        load=load,
        draft=draft,
        requests=len(served),
        latency=Seconds.of([one.finished - one.arrival.seconds for one in served]),
        first_token=Seconds.of([one.first - one.arrival.seconds for one in served]),
        tokens_per_second=sum(one.tokens for one in served) / seconds,
        mean_batch=rows / max(len(steps), 1),
        mean_depth=sum(one.batch * one.depth for one in steps) / max(rows, 1),
        busy=(found.reading + sum(one.seconds for one in steps)) / seconds,
    )


def table(load: Load) -> Fitted:
    """Return the rows as a table for the console."""
    columns = "load", "draft", "mean", "p50", "p90", "p99", "first token", "tokens/s", "depth"
    lines = [
        (
            row.load,
            row.draft,
            *(f"{one:.3g}" for one in (row.latency.mean, row.latency.p50, row.latency.p90)),
            *(f"{one:.3g}" for one in (row.latency.p99, row.first_token.mean)),
            f"{row.tokens_per_second:.4g}",
            f"{row.mean_depth:.2f}",
        )
        for row in load.rows
    ]
    return Fitted(
        f"seconds of requests by load (requests/s), simulated; times {load.times}", lines, columns
    )


def draw(load: Load) -> bytes:
    """Return latency and throughput over load, a line for each way to draft, as a PNG."""
    figure = Figure(figsize=(9.0, 3.8), layout="constrained")
    figure.suptitle(f"Simulated; times {load.times}", fontsize="medium")
    loads = list(dict.fromkeys(row.load for row in load.rows))
    panels = figure.subplots(1, 3)
    labels = "mean latency, s", "p99 latency, s", "tokens per second"
    for axes, label in zip(panels, labels, strict=True):
        for draft in dict.fromkeys(row.draft for row in load.rows):
            rows = [row for row in load.rows if row.draft == draft]
            values = {
                labels[0]: [row.latency.mean for row in rows],
                labels[1]: [row.latency.p99 for row in rows],
                labels[2]: [row.tokens_per_second for row in rows],
            }[label]
            axes.plot([loads.index(row.load) for row in rows], values, ".-", label=draft)
        axes.set(xlabel="requests per second", ylabel=label)
        axes.set_xticks(range(len(loads)), loads)
        axes.spines[["top", "right"]].set_visible(False)
        if label != labels[2]:
            axes.set_yscale("log")
    panels[0].legend(frameon=False, title="draft")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()

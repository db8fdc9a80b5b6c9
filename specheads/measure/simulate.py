"""Simulate loads: the waiting times of requests without speculation and with it, load.json."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from specheads.base.model import FrozenBase
from specheads.config import Hardware, Simulate
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.core.files import dumps, read_json, write_atomic
from specheads.core.paths import local_path, writable_folder
from specheads.decoding.goodput import Goodput, chains
from specheads.decoding.trees.tuned import FILE, Tuned
from specheads.heads.layers.block import BlockHead
from specheads.measure import simulate_requests
from specheads.measure.plots import png
from specheads.measure.simulate_engine import (
    ComputedCost,
    ForwardSize,
    Roofline,
    Simulation,
    System,
    simulate,
)
from specheads.measure.tables import ConsoleTable
from specheads.runs.directory import RunDirectory

MEASURED = "measured"

SHARES = 0.25, 0.5, 0.75, 0.95, 1.2
"""Default loads, relative to the highest load that the base alone can serve."""

WEIGHT_BYTES = 2
"""Bytes of a parameter and of a cached number, for computed times: bfloat16."""


# --- load.json ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Distribution of seconds over requests."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Seconds":
        """Return the distribution of these values."""
        p50, p90, p99 = np.percentile(values, [50, 90, 99]).tolist()
        return cls(mean=float(np.mean(values)), p50=p50, p90=p90, p99=p99)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRow:
    """One way to draft under one load."""

    load: str
    """Requests per second, or the name of the recording."""
    draft: str
    """none, a fixed depth, goodput, or goodput with prompt lookup."""
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
    """Share of that time in which the machine computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResults:
    """load.json."""

    schema: int = 1
    times: str
    """Source of the step times: measured, or computed for a machine."""
    computed: bool
    """Whether step times are computed."""
    acceptance: str
    """Source of the acceptance."""
    rates: list[float]
    """Conditional acceptance by depth."""
    max_batch: int
    seed: int
    rows: list[LoadRow]


def summarise(load: str, draft: str, found: Simulation) -> LoadRow:
    """Return the figures of a simulation."""
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


def table(load: LoadResults) -> ConsoleTable:
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
    return ConsoleTable(
        f"seconds of requests by load (requests/s), simulated; times {load.times}", lines, columns
    )


def draw(load: LoadResults) -> bytes:
    """Return a PNG of latency and throughput over load, a line for each way to draft."""
    figure = Figure(figsize=(9.0, 3.8), layout="constrained")
    figure.suptitle(f"Simulated; times {load.times}", fontsize="medium")
    loads = list(dict.fromkeys(row.load for row in load.rows))
    panels: dict[str, Callable[[LoadRow], float]] = {
        "mean latency, s": lambda row: row.latency.mean,
        "p99 latency, s": lambda row: row.latency.p99,
        "tokens per second": lambda row: row.tokens_per_second,
    }
    all_axes = figure.subplots(1, 3)
    for axes, (label, value) in zip(all_axes, panels.items(), strict=True):
        for draft in dict.fromkeys(row.draft for row in load.rows):
            rows = [row for row in load.rows if row.draft == draft]
            places = [loads.index(row.load) for row in rows]
            axes.plot(places, [value(row) for row in rows], ".-", label=draft)
        axes.set(xlabel="requests per second", ylabel=label)
        axes.set_xticks(range(len(loads)), loads)
        axes.spines[["top", "right"]].set_visible(False)
        if label.endswith(", s"):
            axes.set_yscale("log")
    all_axes[0].legend(frameon=False, title="draft")
    return png(figure, dpi=120)


def write(where: Path, load: LoadResults) -> None:
    """Write load.png and then load.json."""
    write_atomic(where / "load.png", draw(load))
    write_atomic(where / "load.json", dumps(load))


# --- settings ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of a base and a head, for computed step times."""

    parameters: int = 0
    draft_parameters: int = 0
    """Parameters of one forward of the head."""
    draft_levels: int = 1
    """Levels that one forward of the head drafts."""
    position_numbers: int = 0
    """Numbers in the KV cache per position."""

    @classmethod
    def of(cls, base: FrozenBase, head: Head) -> "Sizes":
        """Return the sizes of a base and a head.

        A head whose levels share one projection reads all its parameters at each level, other heads
        those of the level; a block head drafts all levels at once.
        """
        own = sum(parameter.numel() for parameter in head.parameters())
        weights = [weight for weight, _ in head.projections()]
        is_shared = all(weight is weights[0] for weight in weights)
        is_own = any(weights[0] is parameter for parameter in head.parameters())
        # a concatenated projection borrows the base's columns and owns the others
        lent = 0 if is_own else len(weights[0]) * head.width
        return cls(
            parameters=base.num_parameters,
            draft_parameters=(own if is_shared else own // head.depth) + lent,
            draft_levels=head.depth if isinstance(head, BlockHead) else 1,
            position_numbers=base.slot_bytes // base.dtype.itemsize,
        )


def head_folder(settings: Simulate) -> Path:
    """Return the folder of the head."""
    if settings.run:
        return RunDirectory(local_path(settings.run)).head
    if not settings.head_path:
        raise InputError("name whose requests to simulate: run=DIR or head=PATH")
    return local_path(settings.head_path)


def folder(settings: Simulate) -> Path:
    """Return the folder of load.json."""
    if settings.run and not settings.out:
        return writable_folder(RunDirectory(local_path(settings.run)).report)
    return writable_folder(settings.out or head_folder(settings))


def needs_sizes(settings: Simulate) -> bool:
    """Return whether step times are computed from the sizes of a run's base and head."""
    hardware = settings.hardware
    given = hardware.parameters and hardware.draft_parameters
    return bool(settings.run) and hardware.name != MEASURED and not given


def simulate_loads(settings: Simulate, sizes: Sizes | None = None) -> LoadResults:
    """Simulate the base alone, fixed depths and goodput under each load.

    Goodput is that of a tuned head, `Goodput.of`, also with prompt lookup if that was tuned. If
    the settings give the acceptance, goodput chooses among chains. `sizes` complete the settings
    for computed step times.
    """
    rates, texts = _acceptance(settings)
    system = _system(settings, sizes, rates)
    depths = list(dict.fromkeys(settings.depths or [0, len(rates)]))
    if max(depths) > len(rates):
        raise InputError(
            f"depths can be at most {len(rates)}, as acceptance is known of, got {max(depths)}"
        )
    ways = [("none" if not one else f"depth {one}", system, one) for one in depths]
    ways += [(name, served, None) for name, served in _goodput(settings, system)]
    matches = measured(settings).acceptance.matches if _is_tuned(settings) else []
    # another seed than that of the head's own drafts
    copies = simulate_requests.sampled_copies(matches, settings.seed + 1)
    rows = []
    for name, coming in _loads(settings, system):
        for draft, served, depth in ways:
            right = [simulate_requests.recorded(texts)] if texts else []
            right = right or [
                simulate_requests.sampled_lengths(one, settings.seed) for one in served.rates
            ]
            found = simulate(served, coming, right, depth, copies)
            rows.append(summarise(name, draft, found))
    computed = settings.hardware.name != MEASURED
    return LoadResults(
        times=f"computed for {settings.hardware.name}" if computed else "measured",
        computed=computed,
        acceptance="recorded" if texts else "drawn from rates",
        rates=rates,
        max_batch=settings.max_batch,
        seed=settings.seed,
        rows=rows,
    )


def measured(settings: Simulate) -> Tuned:
    """Return the measurements of `specheads tune` for the head."""
    file = head_folder(settings) / FILE
    if not file.is_file():
        raise InputError(
            f"a simulation needs measured times and acceptance, and {file} is not there; run "
            "specheads tune first, or give acceptance=[...] and hardware=NAME"
        )
    return Tuned.read(read_json(file), str(file))


def _acceptance(settings: Simulate) -> tuple[list[float], list[list[int]]]:
    """Return conditional rates by depth, and recorded lengths if the settings name them."""
    if settings.accepted:
        texts = simulate_requests.read_accepted(settings.accepted)
        return simulate_requests.rates_of(texts, max(map(max, texts))), texts
    return list(settings.acceptance) or measured(settings).acceptance.per_depth, []


def _is_tuned(settings: Simulate) -> bool:
    """Return whether acceptance is that of a tuned head."""
    return not settings.accepted and not settings.acceptance


def _goodput(settings: Simulate, system: System) -> Iterator[tuple[str, System]]:
    """Yield systems with goodput: without prompt lookup, and with it if that was tuned."""
    if not _is_tuned(settings):
        yield "goodput", system
        return
    tuned = measured(settings)
    yield "goodput", with_goodput(system, replace(tuned, acceptance=tuned.acceptance.alone()))
    if tuned.acceptance.matches:
        yield "goodput+lookup", with_goodput(system, tuned)


def with_goodput(system: System, tuned: Tuned) -> System:
    """Return a system with the drafts that goodput chooses from in an engine."""
    policy = Goodput.of(tuned)
    return replace(system, rates=policy.rates, drafts=policy.drafts, copied=policy.copied_rates)


def _system(settings: Simulate, base: Sizes | None, rates: list[float]) -> System:
    if settings.hardware.name == MEASURED:
        cost = measured(settings).cost
        prefill: Callable[[int], float] = partial(cost.verify.seconds, context=0.0)
    else:
        cost = _computed(settings.hardware, base or Sizes(), len(rates))
        prefill = cost.prefill
    return System(
        cost=cost,
        prefill=prefill,
        rates=[rates],
        drafts=chains(len(rates)),
        max_batch=settings.max_batch,
    )


def _computed(hardware: Hardware, known: Sizes, depth: int) -> ComputedCost:
    """Return computed step times from the settings, completed by known sizes."""
    parameters = int(hardware.parameters) or known.parameters
    drafting = int(hardware.draft_parameters) or known.draft_parameters
    if not parameters or (depth and not drafting):
        raise InputError(
            "computed times need a base and what drafts; name run=DIR, or give "
            "hardware.parameters and hardware.draft_parameters"
        )
    size = WEIGHT_BYTES
    return ComputedCost(
        machine=Roofline(bandwidth=hardware.bandwidth, flops=hardware.flops),
        base=ForwardSize(
            parameters=parameters,
            weight_bytes=parameters * size,
            position_bytes=hardware.position_bytes or known.position_numbers * size,
        ),
        draft=ForwardSize(
            parameters=drafting,
            weight_bytes=drafting * size,
            position_bytes=hardware.draft_position_bytes,
        ),
        window=float(hardware.window or math.inf),
        levels=1 if hardware.draft_parameters else known.draft_levels,
    )


def _loads(
    settings: Simulate, system: System
) -> Iterator[tuple[str, list[simulate_requests.Arrival]]]:
    """Yield each load with its name."""
    if settings.arrivals:
        arrivals = simulate_requests.read_arrivals(settings.arrivals)
        yield Path(settings.arrivals).name, arrivals
        return
    for rate in dict.fromkeys(settings.rates or _default_rates(settings, system)):
        yield (
            f"{rate:.15g}",
            simulate_requests.poisson(
                rate,
                settings.num_requests,
                prompt_tokens=settings.prompt_tokens,
                new_tokens=settings.new_tokens,
                parts=settings.parts,
                seed=settings.seed,
            ),
        )


def _default_rates(settings: Simulate, system: System) -> list[float]:
    """Return five loads, from a quarter of what the base alone can serve to more than that."""
    context = settings.prompt_tokens + settings.new_tokens / 2
    step = system.cost.seconds(settings.max_batch, context, 1, 0)
    # share of a request in the system's time
    seconds = (
        system.prefill(settings.prompt_tokens) + settings.new_tokens * step / settings.max_batch
    )
    mean = sum(settings.parts) / len(settings.parts)
    # three digits, as they are shown
    return [float(f"{share / seconds / mean:.3g}") for share in SHARES]

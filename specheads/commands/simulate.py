"""Simulate many requests: latency by load, without speculation and with it.

specheads simulate run=runs/smollm2
specheads simulate run=runs/smollm2 'rates=[2,8,16]' max_batch=32
specheads simulate run=runs/smollm2 hardware=h100
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from specheads.commands._call import checked_settings, read_run_settings
from specheads.commands._library import load_base
from specheads.config.commands import Simulate, Train
from specheads.core.errors import InputError
from specheads.core.files import dumps, read_json, writable_folder, write_atomic
from specheads.decoding.cost import StepCost
from specheads.decoding.goodput import Goodput
from specheads.decoding.trees.tuned import FILE, Tuned
from specheads.heads.load import load_head
from specheads.measure import simulate as simulation
from specheads.measure.simulate import (
    MEASURED,
    Arrival,
    LoadResults,
    poisson_arrivals,
    read_arrivals,
)
from specheads.runs.directory import RunDirectory


def run(settings: Simulate) -> None:
    """Simulate every load of the settings."""
    Console().print(simulation.load_table(simulate(settings=settings)))
    sys.stdout.write(f"load: {_folder(settings) / 'load.json'}\n")


def simulate(
    run: str | Path = "",
    overrides: Sequence[str] = (),
    *,
    settings: Simulate | None = None,
    out: str | Path = "",
) -> LoadResults:
    """Simulate many requests by load: the base alone, fixed depths and goodput.

    Goodput chooses among chains, without copied text. Times and acceptance are those that
    `specheads tune` measured for the run's head, or computed: `["hardware=h100",
    "rates=[1,4,16]"]`. load.json is written into the run's report, or into `out`.
    """
    settings = settings or checked_settings(Simulate, overrides, run=run, out=out)
    folder, hardware = _folder(settings), settings.hardware
    is_measured = hardware.name == MEASURED
    tuned = None if settings.acceptance and not is_measured else _tuned(settings)
    cost = tuned.cost if tuned and is_measured else _computed_cost(settings)
    measured = tuned.acceptance.per_depth if tuned else ()
    load = simulation.simulate_loads(
        Goodput(cost, settings.acceptance or measured),
        _loads(settings, cost),
        times=MEASURED if is_measured else f"computed for {hardware.name}",
        depths=settings.depths,
        max_batch=settings.max_batch,
        seed=settings.seed,
    )
    write_atomic(folder / "load.json", dumps(load))
    return load


def _folder(settings: Simulate) -> Path:
    """Return the folder of load.json."""
    if not settings.run:
        raise InputError("name whose requests to simulate: run=DIR")
    return writable_folder(settings.out or RunDirectory(Path(settings.run)).report)


def _tuned(settings: Simulate) -> Tuned:
    """Return the measurements of `specheads tune` for the head."""
    file = RunDirectory(Path(settings.run)).head / FILE
    if not file.is_file():
        raise InputError(
            f"a simulation needs measured times and acceptance, and {file} is not there; run "
            "specheads tune first, or give acceptance=[...] and hardware=NAME"
        )
    return Tuned.read(read_json(file), str(file))


def _computed_cost(settings: Simulate) -> StepCost:
    """Return the step times of a run's base and head, computed for a machine."""
    machine = settings.hardware
    if not (machine.bandwidth and machine.flops):
        raise InputError(
            "computed times need hardware.bandwidth and hardware.flops, got none of "
            f"{machine.name!r}; set them, or name a machine of configs/hardware/"
        )
    run = RunDirectory(Path(settings.run))
    base = load_base(read_run_settings(run.config, Train))
    sizes = simulation.model_sizes(base, load_head(run.head, base))
    return simulation.computed_cost(bandwidth=machine.bandwidth, flops=machine.flops, **sizes)


def _loads(settings: Simulate, cost: StepCost) -> dict[str, list[Arrival]]:
    """Return the requests of each load by its name."""
    if settings.arrivals:
        if settings.rates:
            raise InputError("arrivals replaces rates, got both; leave one out")
        return {Path(settings.arrivals).name: read_arrivals(settings.arrivals)}
    lengths = {"prompt_tokens": settings.prompt_tokens, "new_tokens": settings.new_tokens}
    rates = settings.rates or simulation.default_rates(
        cost, **lengths, max_batch=settings.max_batch
    )
    number, seed = settings.num_requests, settings.seed
    return {f"{rate:.15g}": poisson_arrivals(rate, number, **lengths, seed=seed) for rate in rates}

"""Simulate many requests: latency by load, without speculation and with it.

specheads simulate run=runs/smollm2
specheads simulate run=runs/smollm2 'rates=[2,8,16]' max_batch=32
specheads simulate run=runs/smollm2 hardware=h100
"""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from specheads.commands._library import load_base, read_run, settings_for
from specheads.config import Simulate, Train
from specheads.heads.load import load_head
from specheads.measure import simulate as simulation
from specheads.measure.simulate import LoadResults, table
from specheads.runs.directory import RunDirectory


def run(settings: Simulate, overrides: Sequence[str]) -> None:
    """Simulate every load of the settings."""
    load = simulate(settings=settings, overrides=overrides)
    console = Console()
    console.print(table(load))
    if load.computed:
        console.print(f"times are {load.times}, not measured", markup=False)
    path = simulation.folder(settings) / "load.json"
    console.print(f"load: {path}", soft_wrap=True, markup=False)


def simulate(
    run: str | Path = "",
    overrides: Sequence[str] = (),
    *,
    settings: Simulate | None = None,
    out: str | Path = "",
) -> LoadResults:
    """Simulate many requests by load: the base alone, fixed depths and goodput.

    Times and acceptance are those that `specheads tune` measured for the run's head, or computed:
    `["hardware=h100", "rates=[1,4,16]"]`. load.json and a plot are written into the run's report,
    or into `out`.
    """
    settings, _ = settings_for(Simulate, settings, overrides, run=run, out=out)
    folder, sizes = simulation.folder(settings), None
    if simulation.needs_sizes(settings):
        made = RunDirectory(Path(settings.run))
        base = load_base(read_run(made.config, Train))
        sizes = simulation.Sizes.of(base, load_head(made.head, base))
    load = simulation.simulate_loads(settings, sizes)
    simulation.write(folder, load)
    return load

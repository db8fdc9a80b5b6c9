"""What `specheads simulate` and `specheads.simulate` call."""

from collections.abc import Sequence
from pathlib import Path

from specheads.commands import _compose
from specheads.commands._library import load_base, settings_for
from specheads.config import Simulate, Train
from specheads.heads.load import load_head
from specheads.measure import simulate as simulation
from specheads.measure.simulate import LoadResults
from specheads.runs.directory import RunDirectory


def simulate(
    run: str | Path = "",
    overrides: Sequence[str] = (),
    *,
    settings: Simulate | None = None,
    out: str | Path = "",
) -> LoadResults:
    """Simulate many requests, by load, with the base alone, fixed depths and goodput.

    Times and acceptance are those that `specheads tune` measured of the run's head, or computed
    ones: `["hardware=h100", "rates=[1,4,16]"]`. load.json and a plot go into the run's report, or
    into `out`.
    """
    settings, _ = settings_for(Simulate, settings, overrides, run=run, out=out)
    where, sizes = simulation.folder(settings), None
    if simulation.needs_sizes(settings):
        made = RunDirectory(Path(settings.run))
        base = load_base(_compose.read_run(made.config, Train))
        sizes = simulation.Sizes.of(base, load_head(made.head, base))
    load = simulation.simulate_loads(settings, sizes)
    simulation.write(where, load)
    return load

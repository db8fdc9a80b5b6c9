"""Simulate many requests: how long each waits, by load, without speculation and with it.

specheads simulate run=runs/smollm2
specheads simulate run=runs/smollm2 'rates=[2,8,16]' max_batch=32
specheads simulate run=runs/smollm2 hardware=h100
"""

from collections.abc import Sequence

from rich.console import Console

from specheads.commands import _simulating
from specheads.config import Simulate
from specheads.measure import simulate as simulation
from specheads.measure.simulate import table


def run(settings: Simulate, overrides: Sequence[str]) -> None:
    """Simulate the loads that were asked for."""
    load = _simulating.simulate(settings=settings, overrides=overrides)
    console = Console()
    console.print(table(load))
    if load.computed:
        console.print(f"times are {load.times}: no machine took them", markup=False)
    console.print(
        f"load: {simulation.folder(settings) / 'load.json'}", soft_wrap=True, markup=False
    )

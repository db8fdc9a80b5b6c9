"""Choose how a head drafts on this machine: costs, acceptance, and the tree that follows.

specheads tune run=runs/smollm2
specheads tune head=HEAD base=MODEL 'batch_sizes=[1,8]' 'contexts=[128,1024]'
"""

from collections.abc import Sequence

from rich.console import Console

from specheads.commands import _tuning
from specheads.config import Tune
from specheads.decoding.trees.tuned import FILE
from specheads.measure.tune import tables


def run(settings: Tune, overrides: Sequence[str]) -> None:
    """Tune the head of a run, or any head on the base it was made for."""
    tuned = _tuning.tune(settings=settings, overrides=overrides)
    console = Console()
    for table in tables(tuned):
        console.print(table)
    folder = _tuning.head_folder(settings)
    console.print(f"tuned: {folder / FILE}", soft_wrap=True, markup=False)

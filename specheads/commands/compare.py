"""Hold heads against each other, what needs no training, and transformers' own generation.

specheads compare run=runs/smollm2
specheads compare 'heads=[runs/a,runs/b]' 'temperatures=[0,1]' 'batch_sizes=[1,4]'
"""

from collections.abc import Sequence

from rich.console import Console

from specheads.commands import _comparing
from specheads.commands._compared import comparison_folder
from specheads.config import Compare
from specheads.measure.compare import tables


def run(settings: Compare, overrides: Sequence[str]) -> None:
    """Compare heads of one base with each other and with the baselines."""
    comparison = _comparing.compare(settings=settings, overrides=overrides)
    console = Console()
    for table in tables(comparison):
        console.print(table)
    path = comparison_folder(settings) / "compare.json"
    console.print(f"comparison: {path}", soft_wrap=True, markup=False)

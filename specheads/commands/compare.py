"""Hold a head against what needs no training: lookup, a draft model, the base itself, a hybrid."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from specheads.commands import _library
from specheads.config import Compare
from specheads.measure.compare import table
from specheads.runs.directory import RunDirectory


def run(settings: Compare, overrides: Sequence[str]) -> None:
    """Compare the head of a run with the baselines."""
    comparison = _library.compare(settings=settings, overrides=overrides)
    console = Console()
    console.print(table(comparison.drafters))
    folder = Path(settings.out) if settings.out else RunDirectory(Path(settings.run)).report
    console.print(f"comparison: {folder / 'compare.json'}", soft_wrap=True, markup=False)

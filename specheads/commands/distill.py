"""Have the base of a recipe write text, into shards that a distilled phase can train on."""

import sys
from collections.abc import Sequence

from specheads.commands import _compose
from specheads.config.commands import Distill


def run(settings: Distill, _: Sequence[str]) -> None:
    """Write what the folder lacks; a stopped one goes on with the same command."""
    if settings.dry_run:
        sys.stdout.write(_compose.as_yaml(settings))
        return
    # late: what shows settings need not wait for torch
    from rich.console import Console

    from specheads.commands import _library
    from specheads.training.distill.report import as_markdown

    report = _library.distill(settings=settings)
    if report is not None:
        console = Console(markup=False, highlight=False)
        console.print(as_markdown(report), soft_wrap=True)
        console.print(f"text: {settings.out}", soft_wrap=True)

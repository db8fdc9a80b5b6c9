"""Publish a run's head on the Hugging Face Hub, with its card, in one commit.

specheads push run=runs/smollm2 repo=USER/NAME dry_run=true
specheads push run=runs/smollm2 repo=USER/NAME
"""

import sys
from collections.abc import Sequence

from huggingface_hub.utils import disable_progress_bars
from rich.console import Console

from specheads.commands import _library
from specheads.config import Push


def run(settings: Push, _: Sequence[str]) -> None:
    """Push a run."""
    # the client's bars would stand before our line where the upload breaks off
    disable_progress_bars()
    push_run(settings)


def push_run(settings: Push) -> None:
    """Push a run, and print where to, or what would be uploaded."""
    pushed = _library.push(settings=settings)
    if settings.dry_run:
        lines = [f"{size:>15,}  {path}\n" for path, size in pushed.files.items()]
        total = f"{sum(pushed.files.values()):>15,}  bytes in all\n"
        sys.stdout.write("".join([*lines, total]))
    else:
        Console().print(f"pushed: {pushed.address}", soft_wrap=True, markup=False)

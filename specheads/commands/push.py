"""Publish the head of a run on the Hugging Face Hub, with its card, in one commit.

specheads push run=runs/smollm2 repo=USER/NAME dry_run=true
specheads push run=runs/smollm2 repo=USER/NAME
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from huggingface_hub.utils import disable_progress_bars
from huggingface_hub.utils import logging as hub_logging

from specheads.commands._call import checked_settings, read_run_settings
from specheads.config.commands import Push, Train
from specheads.core.errors import InputError
from specheads.core.files import HUB_ID
from specheads.export import hub
from specheads.runs.directory import RunDirectory


def run(settings: Push) -> None:
    """Push a run, and print its address, or the files of a dry run."""
    # progress bars would be printed before our error line
    disable_progress_bars()
    pushed = push(settings=settings)
    if settings.dry_run:
        lines = [f"{size:>15,}  {path}\n" for path, size in pushed.files.items()]
        total = f"{sum(pushed.files.values()):>15,}  bytes in all\n"
        sys.stdout.write("".join([*lines, total]))
    else:
        sys.stdout.write(f"pushed: {pushed.address}\n")


def push(
    run: str | Path = "",
    repo: str = "",
    overrides: Sequence[str] = (),
    *,
    settings: Push | None = None,
    dry_run: bool = False,
) -> hub.Upload:
    """Publish the head of a run on the Hugging Face Hub, with its card, in one commit.

    `overrides` are like `["licence=mit", "private=true"]`. A dry run only returns the files.
    """
    # it would log every retry, with addresses that allow anybody to upload
    hub_logging.set_verbosity_error()
    settings = settings or checked_settings(Push, overrides, run=run, repo=repo, dry_run=dry_run)
    if not settings.run:
        raise InputError("name what to push: run=DIR")
    if not HUB_ID.fullmatch(settings.repo):
        raise InputError(f"name where to push, as repo=USER/NAME; got {settings.repo!r}")
    directory = RunDirectory(Path(settings.run))
    names = "private", "base_repo", "licence", "data_licence", "overwrite", "dry_run"
    options = {name: getattr(settings, name) for name in names}
    return hub.push_run(
        directory, asdict(read_run_settings(directory.config, Train)), settings.repo, **options
    )

"""Generate text with the base of a recipe, for a distilled phase to train on.

specheads distill recipe=tiny_code out=text num_samples=5000
specheads distill recipe=conversations base.model=MODEL data.path=talks.jsonl out=text
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from specheads.base.model import FrozenBase
from specheads.commands import _dry_run
from specheads.commands._call import checked_settings
from specheads.config.commands import Distill
from specheads.config.training import EXTERNAL_ENGINES, distill_settings
from specheads.core.errors import InputError
from specheads.data.remote import output_folder
from specheads.data.sources import refuse_unreadable
from specheads.heads.load import load_head
from specheads.runs.progress import progress_display
from specheads.training.distill.run import refuse_not_decoding, text_job, write_folder
from specheads.training.distill.shards import as_markdown
from specheads.training.processes import (
    accelerator_of_environment,
    explain_lost_process,
    leave_process_group,
    load_base,
    load_text_base,
)


def run(settings: Distill) -> None:
    """Generate the texts that are missing in the folder; the same command resumes."""
    if settings.dry_run:
        _dry_run.show_plan(settings)
    elif settings.preview:
        _dry_run.show_prompts(settings, _dry_run.corpus_tokenizer(settings))
    elif report := distill(settings=settings):
        phases = settings.schedule.phases.items()
        name = next(name for name, phase in phases if phase.distill)
        sys.stdout.write(
            f"{as_markdown(report)}\ntext: {settings.out}\n"
            f"next: specheads train with schedule.phases.{name}.distill.folder={settings.out}\n"
        )
    leave_process_group()


@explain_lost_process()
def distill(
    recipe: str = "",
    overrides: Sequence[str] = (),
    *,
    settings: Distill | None = None,
    base: FrozenBase | None = None,
    out: str | Path = "",
) -> dict[str, Any] | None:
    """Generate text with the base of a recipe, into a folder; return a report.

    `overrides` are like `["num_samples=5000", "engine=vllm"]`. A stopped call resumes in its `out`.

    Returns:
        The report; None in every process but the first.
    """
    settings = settings or checked_settings(Distill, overrides, recipe=recipe, out=out)
    if not settings.out:
        raise InputError("an output folder is needed, got none; add out=FOLDER")
    texts = distill_settings(settings.schedule)
    if settings.head_path:
        if texts.engine != "local":
            raise InputError(
                f"a head can draft with engine=local only, got engine={texts.engine}; remove one"
            )
        texts = replace(texts, use_head=True)
    refuse_unreadable(settings.data)
    accelerator = accelerator_of_environment(settings.base.dtype)
    with output_folder(settings.out, accelerator.is_local_main_process) as (folder, upload):
        if base is None:
            # other engines load the weights themselves
            load = load_text_base if texts.engine in EXTERNAL_ENGINES else load_base
            base = load(settings.base, accelerator)
            refuse_not_decoding(base, texts, folder)
        head = load_head(settings.head_path, base) if settings.head_path else None
        job = text_job(settings.data, base, texts, folder, accelerator, settings.seed, head)
        with progress_display(shown=accelerator.is_main_process) as bar:
            return write_folder(job, bar, upload)

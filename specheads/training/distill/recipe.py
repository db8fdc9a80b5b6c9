"""The text of a recipe's distilled phase, written before any training."""

from dataclasses import replace

from specheads.base.model import FrozenBase
from specheads.config import Distill as Settings
from specheads.config.commands import Distill
from specheads.config.schedule import distilled
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.core.paths import writable_folder
from specheads.data.sources import refuse_unreadable
from specheads.heads.load import load_head
from specheads.runs.progress import progress
from specheads.training.distill.prompts import identity_of, prompts_of
from specheads.training.distill.report import Report
from specheads.training.distill.run import ELSEWHERE, Job, refuse_sharded
from specheads.training.distill.together import write_together
from specheads.training.processes import (
    accelerator_of_environment,
    load_base,
    naming_lost,
)


@naming_lost()
def write_recipe(
    settings: Distill, base: FrozenBase | None = None, head: Head | None = None
) -> Report | None:
    """Have the base write what a folder lacks; on all processes but the first return None.

    Raises:
        ValueError: As `write_text`, or what the settings name is not there or does not fit.
    """
    how = _how(settings, head)
    refuse_unreadable(settings.data)
    folder = writable_folder(settings.out)
    accelerator = accelerator_of_environment()
    if base is None:
        is_here = how.engine not in ELSEWHERE
        named = settings.base if is_here else replace(settings.base, device="cpu")
        base = load_base(named, accelerator)
        refuse_sharded(base, how, folder)
    if head is None and settings.head_path:
        head = load_head(settings.head_path, base)
    prompts = prompts_of(settings.data, base, how, settings.seed)
    job = Job(
        base=base,
        prompts=prompts,
        settings=how,
        folder=folder,
        identity=identity_of(settings.data, base, base.fingerprint, prompts),
        seed=settings.seed,
        head=head,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
    )
    with progress(shown=accelerator.is_main_process) as bar:
        return write_together(job, bar, lambda: None)


def _how(settings: Distill, head: Head | None) -> Settings:
    """Return how text is written, once that and the rest are known to go together."""
    found = distilled(settings.schedule)
    if not settings.out:
        raise InputError("text needs a folder: add out=FOLDER")
    drafts = bool(settings.head_path) or head is not None
    if drafts and found.engine != "local":
        raise InputError(
            f"a head drafts for engine=local, got engine={found.engine}; leave one out"
        )
    # who names a head wants it to draft
    return replace(found, use_head="true") if drafts else found

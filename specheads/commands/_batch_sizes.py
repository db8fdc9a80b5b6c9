"""Numbers in place of `batch_size=auto`, in every command that plans a training."""

from collections.abc import Callable
from pathlib import Path

from accelerate import Accelerator

from specheads.base.loading import load_tokenizer
from specheads.config.commands import Train
from specheads.data.packing import PackedText
from specheads.data.sources import is_on_hub
from specheads.data.tokenise import tokenise_corpus
from specheads.runs.config_file import read_settings
from specheads.runs.directory import RunDirectory
from specheads.training.memory import TrainingSetup
from specheads.training.plan import MAX_TOKENS, auto_phases, largest_batch_sizes

ROWS_PER_SAMPLE = 0.25
"""Assumed rows of a generated text: it may be dropped, or share a row."""


def setup_of(settings: Train) -> TrainingSetup:
    """Return what the plan of a training needs to know."""
    return TrainingSetup(
        base=settings.base,
        head=settings.head,
        init=settings.init,
        schedule=settings.schedule,
        data=settings.data,
        features=settings.features,
        seed=settings.seed,
    )


def resolve_batch_sizes(
    settings: Train, accelerator: Accelerator, announce: Callable[[str], object]
) -> None:
    """Replace every `batch_size=auto` by a number.

    The number is that of the run that resumes, or of the largest batch that fits in memory and
    does not need more rows than the text has.
    """
    names, phases = auto_phases(settings.schedule), settings.schedule.phases
    config = RunDirectory(Path(settings.run_dir)).config
    saved = read_settings(config) if names and config.is_file() else {}
    saved_phases = saved.get("schedule", {}).get("phases", {})
    sizes = {name: saved_phases.get(name, {}).get("batch_size") for name in names}
    if not all(isinstance(size, int) for size in sizes.values()):
        num_rows = {name: _count_rows(settings, name) for name in names}
        sizes = largest_batch_sizes(setup_of(settings), accelerator, num_rows)
    for name, size in sizes.items():
        phases[name].batch_size = size
        if accelerator.is_main_process:
            announce(f"phase {name!r}: batch_size=auto is {size}")


def _count_rows(settings: Train, name: str) -> int:
    """Return the rows of a phase's text: of its corpus, or about those that will be generated.

    A plan downloads no data set, and a base may lack its tokenizer; then nothing limits the rows.
    """
    phase = settings.schedule.phases[name]
    if phase.distill is not None:
        return int(phase.distill.num_samples * ROWS_PER_SAMPLE)
    tokenizer = load_tokenizer(settings.base.model, revision=settings.base.revision)
    is_remote = any(is_on_hub(data.source, data.path) for data in settings.data.active_sources)
    if tokenizer is None or (settings.dry_run and is_remote):
        return MAX_TOKENS
    documents = tokenise_corpus(settings.data, "train", tokenizer, settings.seed)
    length, packing = phase.sequence_length, phase.packing
    return PackedText(
        documents, sequence_length=length, batch_size=1, packing=packing, seed=settings.seed
    ).rows_per_epoch

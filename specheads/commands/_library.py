"""Functions that several commands share."""

from dataclasses import asdict
from pathlib import Path

from specheads.base.model import FrozenBase
from specheads.config.commands import Chat, Compare, Evaluate, Export, Train, Tune
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.heads.load import load_head
from specheads.runs.directory import RunDirectory

SettingsWithEvaluation = Train | Evaluate | Compare
SettingsWithBase = SettingsWithEvaluation | Tune | Export | Chat
SettingsWithHead = Evaluate | Tune | Export | Chat


def load_base(settings: SettingsWithBase) -> FrozenBase:
    """Return the base of the settings."""
    if not settings.base.model:
        raise InputError(
            "a command needs a base, got none; add base=PATH or run=DIR, because a head's folder "
            "does not name its base"
        )
    return FrozenBase.load(**asdict(settings.base))


def load_base_and_head(
    settings: SettingsWithHead, base: FrozenBase | None = None
) -> tuple[FrozenBase, Head]:
    """Return the base and the head that the settings name; a given base is not loaded again."""
    run = RunDirectory(Path(settings.run)) if settings.run else None
    if run:
        run.refuse_unfinished("used")
    elif not settings.head_path:
        raise InputError("name a run as run=DIR, or a head as head=PATH and base=PATH")
    base = base or load_base(settings)
    if run:
        return base, load_run_head(run, base, force=settings.force)
    return base, load_head(settings.head_path, base, force=settings.force)


def load_run_head(run: RunDirectory, base: FrozenBase, *, force: bool = False) -> Head:
    """Return the head of a run; an adapter of joint training is merged into the base."""
    if run.adapter.is_dir():
        base.merge(run.adapter)
    return load_head(run.head, base, force=force)

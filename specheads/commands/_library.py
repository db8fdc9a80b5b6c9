"""Functions that several commands share."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from specheads import config
from specheads.base.model import FrozenBase
from specheads.config import compose
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.data.prompts import Prompt, PromptSet
from specheads.heads.load import load_head
from specheads.runs.directory import RunDirectory
from specheads.runs.settings import read_settings

T = TypeVar("T")

Prompts = str | Path | Sequence[Sequence[int]] | None
"""A name, a .jsonl file, or token ids; None uses the settings."""

SettingsWithEvaluation = config.Train | config.Evaluate | config.Compare
SettingsWithBase = SettingsWithEvaluation | config.Tune | config.Export | config.Chat
SettingsWithHead = config.Evaluate | config.Tune | config.Export | config.Chat


def settings_for(
    kind: type[T],
    given: T | None,
    overrides: Sequence[str],
    head: Head | None = None,
    **arguments: str | Path | bool,
) -> tuple[T, list[str]]:
    """Return the checked settings of a command, and the overrides with full names.

    Arguments that are not empty replace settings of the same name. A run has its own head, so a
    second one is refused.
    """
    command = kind.__name__.lower()
    # a copy, because arguments change it
    settings: T = compose.settings_of(command, overrides) if given is None else deepcopy(given)
    for name, value in arguments.items():
        if value:
            setattr(settings, name, str(value) if isinstance(value, Path) else value)
    config.check(settings)
    if head is not None and (run := getattr(settings, "run", "")):
        raise InputError(f"a run has its own head, got run={run} and a head; give one")
    return settings, compose.lengthen(command, overrides)


def read_run(path: Path, schema: type) -> Any:
    """Return the typed settings of a run's config.yaml."""
    return compose.from_values(schema, read_settings(path), path)


def own(settings: Any, overrides: Sequence[str]) -> tuple[RunDirectory, config.Train]:
    """Return a run and its own settings, changed by the overrides of the command."""
    run = RunDirectory(Path(settings.run))
    trained = read_run(run.config, config.Train)
    trained.tree = getattr(settings, "tree", trained.tree)
    compose.overlay(trained, settings, overrides)
    config.check(trained.evaluation, "evaluation")
    return run, trained


def load_base(settings: SettingsWithBase) -> FrozenBase:
    """Return the base of the settings."""
    return FrozenBase.load(**asdict(settings.base))


def objects(
    settings: SettingsWithHead, base: FrozenBase | None, head: Head | None, verb: str
) -> tuple[FrozenBase, Head]:
    """Return the given base and head, or load those that the settings name."""
    if (head is None and not settings.head_path) or (base is None and not settings.base.model):
        raise InputError(f"name what to {verb}: run=DIR, or head=PATH and base=PATH")
    base = base or load_base(settings)
    return base, head or load_head(settings.head_path, base, force=settings.force)


def head_of(run: RunDirectory, base: FrozenBase, *, force: bool) -> Head:
    """Return the head of a run; an adapter of joint training is merged into the base."""
    if run.adapter.is_dir():
        base.merge(run.adapter)
    return load_head(run.head, base, force=force)


def prompt_set(given: Prompts, settings: SettingsWithEvaluation) -> PromptSet | None:
    """Return prompts given as token ids; a name is put into the settings."""
    if given is None:
        return None
    if isinstance(given, str | Path):
        settings.evaluation.prompts = str(given)
        return None
    return PromptSet.of("given", [Prompt(list(tokens), "given", "") for tokens in given])

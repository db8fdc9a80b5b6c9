"""The heads that `specheads compare` names: runs, or folders and Hub ids of heads."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from specheads.base.model import FrozenBase
from specheads.commands._library import head_of
from specheads.config import Compare
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.heads.load import load_head
from specheads.measure.generation import EvaluationConfig
from specheads.runs.directory import RunDirectory


def comparison_folder(settings: Compare) -> Path:
    """Return where compare.json goes: `out`, or the report of the first run that is named."""
    if settings.out:
        return Path(settings.out)
    if first := first_run(settings):
        return RunDirectory(Path(first)).report
    raise InputError("heads without a run need out=FOLDER for compare.json")


def first_run(settings: Compare) -> str:
    """Return the first run that is named; empty where there are heads only."""
    # what is said to be a run has to be one
    return settings.run or next((place for place in _places(settings) if _run_at(place)), "")


def load_compared(
    settings: Compare, asked: EvaluationConfig, base: FrozenBase | None
) -> tuple[FrozenBase, dict[str, Head]]:
    """Return the base and the heads that are named, by what they are to be called."""
    places = _places(settings)
    runs = {place: run for place in places if (run := _run_at(place))}
    for run in runs.values():
        run.refuse_unfinished("compared")
        if run.adapter.is_dir() and len(places) > 1:
            raise InputError(
                f"heads are compared on one base, and that of {run.path} learned along as an "
                "adapter; compare it by itself, run=DIR"
            )
    base = base or FrozenBase.load(**asdict(asked.base))
    heads = [
        head_of(runs[place], base, force=False) if place in runs else load_head(place, base)
        for place in places
    ]
    return base, dict(zip(_names(places), heads, strict=True))


def _places(settings: Compare) -> list[str]:
    places = [*([settings.run] if settings.run else []), *settings.heads]
    if not places:
        raise InputError("name what to compare: run=DIR, or heads=[DIR,DIR]")
    return places


def _run_at(place: str) -> RunDirectory | None:
    run = RunDirectory(Path(place))
    return run if run.config.is_file() else None


def _names(places: Sequence[str]) -> list[str]:
    """Return the last parts of folders' names, made distinct; a single one is `head`."""
    if len(places) == 1:
        return ["head"]
    paths = [Path(place) for place in places]
    names = [path.parent.name if path.name == "head" else path.name for path in paths]
    return [
        name if names.count(name) == 1 else f"{name}_{names[: place + 1].count(name)}"
        for place, name in enumerate(names)
    ]

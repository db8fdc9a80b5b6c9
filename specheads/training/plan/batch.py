"""The largest batch that fits: `schedule.phases.NAME.batch_size=auto`."""

import os
from collections.abc import Callable
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import gather_object

from specheads.config import Train
from specheads.config.ranges import AUTO
from specheads.core.bounds import available_bytes
from specheads.core.errors import InputError
from specheads.runs.directory import RunDirectory
from specheads.runs.settings import read_settings
from specheads.training.plan.place import Target, target_of
from specheads.training.plan.rehearsal import Rehearsal
from specheads.training.schedule import placed

MARGIN = {"cpu": 0.15, "cuda": 0.25}
"""Share of the memory that is left alone: what the estimate may be wrong by, and fragments."""

MOST_ROWS = 4096
"""Sequences of one process, at most."""


def settle_batches(
    settings: Train, accelerator: Accelerator, tell: Callable[[str], object]
) -> None:
    """Replace every `auto` by a number: that of the run that goes on, or the largest that fits.

    Raises:
        ValueError: Not even one sequence fits.
    """
    if not (names := unsettled(settings)):
        return
    sizes = _before(settings, names) or _largest(settings, accelerator, names)
    for name, size in sizes.items():
        settings.schedule.phases[name].batch_size = size
        if accelerator.is_main_process:
            tell(f"phase {name!r}: batch_size=auto is {size}")


def unsettled(settings: Train) -> list[str]:
    """Return the names of the phases whose batch is yet to be found."""
    return [name for name, one in settings.schedule.phases.items() if one.batch_size == AUTO]


def _before(settings: Train, names: list[str]) -> dict[str, int]:
    """Return the sizes with which a run began."""
    file = RunDirectory(Path(settings.run_dir)).config
    if not file.is_file():
        return {}
    phases = read_settings(file).get("schedule", {}).get("phases", {})
    found = {name: phases.get(name, {}).get("batch_size") for name in names}
    return found if all(type(size) is int for size in found.values()) else {}


def _largest(settings: Train, accelerator: Accelerator, names: list[str]) -> dict[str, int]:
    target = target_of(settings.base, accelerator)
    if not target.is_here:
        raise InputError(
            f"batch_size=auto fills the memory of {target.device}, and this machine has none; say "
            "a number, or dry_run=true for a plan"
        )
    rehearsal = Rehearsal(settings, target.config, target.dtype, target.kind)
    room = room_of(target)
    found: dict[str, int] = {}
    for phase in placed(settings.schedule):
        if phase.name not in names:
            continue
        least = phase.settings.accumulation_steps

        def needed(rows: int, phase=phase) -> int:
            return sum(rehearsal.fresh().step(phase, rows).values())

        rows = largest(needed, room, least)
        # of several processes the one with the least room decides for all
        rows = min(gather_object([rows]))
        if not rows:
            raise InputError(
                f"phase {phase.name!r} must fit {room / 2**30:.3g} GiB, and {least} sequences take "
                f"{needed(least) / 2**30:.3g}; raise accumulation_steps, or shorten sequence_length"
            )
        found[phase.name] = rows * accelerator.num_processes
    return found


def room_of(target: Target) -> int:
    """Return the bytes that one process may take for training."""
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if target.kind == "cpu" else 1
    return int((1 - MARGIN[target.kind]) * available_bytes(target.device) / sharing)


def largest(needed: Callable[[int], int], room: int, least: int = 1) -> int:
    """Return the most rows whose need is no more than the room; zero where the least is."""
    if needed(least) > room:
        return 0
    fits, too_many = least, 2 * least
    while too_many <= MOST_ROWS and needed(too_many) <= room:
        fits, too_many = too_many, 2 * too_many
    # within a sixteenth: the estimate is no better than that
    while too_many - fits > max(1, fits // 16):
        middle = (fits + too_many) // 2
        fits, too_many = (middle, too_many) if needed(middle) <= room else (fits, middle)
    return min(fits, MOST_ROWS)

"""The largest batch that fits: `schedule.phases.NAME.batch_size=auto`."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator

from specheads.base.model import FrozenBase
from specheads.config import Train
from specheads.config.ranges import AUTO
from specheads.core.errors import InputError
from specheads.core.machine import available_bytes, held_bytes
from specheads.runs.directory import RunDirectory
from specheads.runs.settings import read_settings
from specheads.training.plan.trial import REST, Trial, Tried, agreed
from specheads.training.processes import load_base, readers
from specheads.training.schedule import PlacedPhase, placed

MARGIN = {"cpu": 0.15, "cuda": 0.25}
"""Share of the memory that stays free, for errors of the estimate and fragmentation."""

MOST_ROWS = 4096
"""Maximum sequences of one process."""

PATIENCE = 30.0
"""Maximum seconds of a tried step."""


@dataclass(slots=True)
class Climb:
    """Steps of more and more rows."""

    tried: dict[int, Tried] = field(default_factory=dict)
    """By the rows of one process, fewest first."""

    def needed(self, rows: int) -> int:
        """Return the bytes of a step, extended linearly beyond the largest that was tried."""
        if rows in self.tried:
            return self.tried[rows].total
        (few, least), (many, most) = [(1, None), *self.tried.items()][-2:]
        slope = (_tensors(most) - _tensors(least)) / (many - few) if least else _tensors(most)
        return most.total + int(slope * (rows - many))


def _tensors(tried: Tried) -> int:
    # what a C library keeps has no slope to speak of
    return tried.total - tried.memory.get(REST, 0)


def climb(trial: Trial, phase: PlacedPhase, room: int, most: int, *, timed: bool) -> Climb:
    """Try a phase's step with more and more rows: so many at most, and as long as it fits.

    The last step is `timed` if it has them all.
    """
    found, least = Climb(), phase.settings.accumulation_steps
    rows = min(least, most)
    while rows:
        try:
            found.tried[rows] = trial.step(phase, rows, timed=timed and rows == most)
        except torch.OutOfMemoryError:
            break
        tried = found.tried[rows]
        # a line takes two points
        bound = 2 * rows if tried.total + tried.growing <= room else rows
        if len(found.tried) > 1:
            bound = min(4 * rows, largest(found.needed, room))
        more = int(-agreed(-float(min(bound, most))))
        if more <= rows + rows // 16 or tried.seconds > PATIENCE:
            break
        rows = more
    return found


def settle_batches(
    settings: Train,
    accelerator: Accelerator,
    tell: Callable[[str], object],
    base: FrozenBase | None = None,
) -> FrozenBase | None:
    """Replace every `auto` by a number: that of the resumed run, or the largest that fits.

    Returns the base, if one was given or had to be loaded.

    Raises:
        ValueError: Not even one sequence fits.
    """
    if not (names := unsettled(settings)):
        return base
    sizes = _before(settings, names)
    if not sizes:
        base = base or load_base(settings.base, accelerator)
        trial = Trial(settings, base, accelerator, held_bytes(torch.device("cpu")))
        try:
            sizes = {name: _largest(trial, name) for name in names}
        finally:
            trial.leave()
    for name, size in sizes.items():
        settings.schedule.phases[name].batch_size = size
        if accelerator.is_main_process:
            tell(f"phase {name!r}: batch_size=auto is {size}")
    return base


def unsettled(settings: Train) -> list[str]:
    """Return the names of the phases with `batch_size=auto`."""
    return [name for name, one in settings.schedule.phases.items() if one.batch_size == AUTO]


def _before(settings: Train, names: list[str]) -> dict[str, int]:
    """Return the batch sizes in the config of an existing run."""
    file = RunDirectory(Path(settings.run_dir)).config
    if not file.is_file():
        return {}
    phases = read_settings(file).get("schedule", {}).get("phases", {})
    found = {name: phases.get(name, {}).get("batch_size") for name in names}
    return found if all(type(size) is int for size in found.values()) else {}


def _largest(trial: Trial, name: str) -> int:
    """Return the largest batch of a phase, over all processes."""
    device = trial.base.device
    phase = next(one for one in placed(trial.settings.schedule) if one.name == name)
    room = int((1 - MARGIN[memory_kind(device)]) * room_of(device))
    least = phase.settings.accumulation_steps
    found = climb(trial, phase, room, MOST_ROWS, timed=False)
    # of several processes the one with the least room decides for all
    rows = int(-agreed(-float(largest(found.needed, room, least)))) if found.tried else 0
    if not rows:
        raise InputError(
            f"phase {name!r} must fit {room / 2**30:.3g} GiB, and {least} sequences do not; raise "
            "accumulation_steps, or shorten sequence_length"
        )
    return rows * readers(trial.base.sharding, trial.accelerator)["world_size"]


def memory_kind(device: torch.device) -> str:
    """Return the kind of memory of a device: cpu, or cuda for every other device."""
    return "cpu" if device.type == "cpu" else "cuda"


def room_of(device: torch.device) -> int:
    """Return the bytes that this process can use on a device, including those it uses now."""
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if device.type == "cpu" else 1
    # unused memory in torch's CUDA allocator already counts as available
    held = held_bytes(device) if device.type == "cpu" else torch.cuda.memory_allocated(device)
    return available_bytes(device) // sharing + held


def largest(needed: Callable[[int], int], room: int, least: int = 1) -> int:
    """Return the largest number of rows that needs at most `room` bytes; zero if none fits."""
    if needed(least) > room:
        return 0
    fits, too_many = least, 2 * least
    while too_many <= MOST_ROWS and needed(too_many) <= room:
        fits, too_many = too_many, 2 * too_many
    # within a sixteenth, the accuracy of the estimate
    while too_many - fits > max(1, fits // 16):
        middle = (fits + too_many) // 2
        fits, too_many = (middle, too_many) if needed(middle) <= room else (fits, middle)
    return min(fits, MOST_ROWS)

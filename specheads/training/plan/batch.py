"""The largest batch that fits: `schedule.phases.NAME.batch_size=auto`."""

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size

from specheads.base.model import FrozenBase
from specheads.config import Train
from specheads.core.errors import InputError
from specheads.core.machine import available_bytes, held_bytes
from specheads.core.ranges import AUTO
from specheads.runs.directory import RunDirectory
from specheads.runs.settings import read_settings
from specheads.training.plan.shapes import Shapes, target_of
from specheads.training.plan.trial import Trial, Tried, agreed
from specheads.training.processes import load_base, readers
from specheads.training.schedule import PlacedPhase, placed

MARGIN = {"cpu": 0.15, "cuda": 0.25}
"""Share of the memory that stays free, for errors of the estimate and fragmentation."""

MOST_ROWS = 4096
"""Maximum sequences of one process."""

MOST_SECONDS = 30.0
"""Maximum seconds of a step."""


@dataclass(frozen=True, slots=True)
class Fit:
    """The largest step of a phase that fits."""

    rows: int
    """Sequences of one process."""
    tried: Tried
    row_bytes: int
    """Memory of one more sequence, from shapes."""

    def needed(self, rows: int) -> int:
        """Return the bytes of a step with other `rows`, extended linearly."""
        return self.tried.total + self.row_bytes * (rows - self.rows)


def largest_step(
    trial: Trial, shapes: Shapes, phase: PlacedPhase, room: int, most: int, *, timed: bool
) -> Fit | None:
    """Return the largest step with at most `most` rows that fits; None if there is no memory.

    The smallest step is measured; shapes tell how many more rows may fit. accelerate lowers that
    number until a real step fits. A step that reaches `most` is timed if `timed`.
    """
    least = min(phase.settings.accumulation_steps, most)
    try:
        first = Fit(
            least, trial.step(phase, least, timed=timed and least == most), shapes.row_bytes(phase)
        )
    except torch.OutOfMemoryError:
        return None
    fitting = least + max(0, room - first.tried.total) // first.row_bytes
    in_time = int(least * MOST_SECONDS / max(first.tried.seconds, 1e-6))
    start = int(-agreed(-float(min(fitting, in_time, most))))

    @find_executable_batch_size(starting_batch_size=start)
    def attempt(rows: int) -> Fit:
        if rows <= least:
            return first
        tried = trial.step(phase, rows, timed=timed and rows == most)
        if agreed(float(tried.total)) > room:
            raise torch.OutOfMemoryError("the step runs out of memory.")
        return Fit(rows, tried, first.row_bytes)

    return attempt() if start > least else first  # pyright: ignore[reportCallIssue]


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
        base = base or load_base(asdict(settings.base), accelerator)
        trial = Trial(settings, base, accelerator, held_bytes(torch.device("cpu")))
        try:
            shapes = Shapes(settings, target_of(settings.base, accelerator))
            sizes = {name: _largest(trial, shapes, name) for name in names}
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


def _largest(trial: Trial, shapes: Shapes, name: str) -> int:
    """Return the largest batch of a phase, over all processes."""
    device = trial.base.device
    phase = next(one for one in placed(trial.settings.schedule) if one.name == name)
    room = int((1 - MARGIN[memory_kind(device)]) * room_of(device))
    found = largest_step(trial, shapes, phase, room, MOST_ROWS, timed=False)
    if found is None or agreed(float(found.tried.total)) > room:
        least = phase.settings.accumulation_steps
        raise InputError(
            f"phase {name!r} must fit {room / 2**30:.3g} GiB, but {least} sequences do not; raise "
            "accumulation_steps, or lower sequence_length"
        )
    return found.rows * readers(trial.base.sharding, trial.accelerator)["world_size"]


def memory_kind(device: torch.device) -> str:
    """Return the kind of memory of a device: cpu, or cuda for every other device."""
    return "cpu" if device.type == "cpu" else "cuda"


def room_of(device: torch.device) -> int:
    """Return the bytes that a process can use on its device, including those it uses now.

    The process with the least memory decides for all.
    """
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if device.type == "cpu" else 1
    # unused memory in torch's CUDA allocator already counts as available
    held = held_bytes(device) if device.type == "cpu" else torch.cuda.memory_allocated(device)
    return int(-agreed(-float(available_bytes(device) // sharing + held)))

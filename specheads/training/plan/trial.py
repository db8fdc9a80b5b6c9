"""Real steps on random tokens: their time and peak memory, and `batch_size=auto`."""

import os
import time
from statistics import median

import torch
from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size, gather_object

from specheads.base.model import FrozenBase
from specheads.core.errors import InputError
from specheads.core.machine import (
    available_bytes,
    held_bytes,
    peak_bytes,
    restart_peak,
    synchronise,
)
from specheads.core.ranges import AUTO
from specheads.decoding.generate import generate
from specheads.heads.load import build_for, resume_head
from specheads.training import schedule as schedules
from specheads.training.plan.shapes import Setup, Shapes, target_of
from specheads.training.processes import readers
from specheads.training.schedule import PlacedPhase, placed
from specheads.training.settings import Distill, Schedule
from specheads.training.step import Stepper
from specheads.training.teacher import Teacher

MARGIN = {"cpu": 0.15, "cuda": 0.25}
"""Share of the memory that stays free, for errors of the estimate and fragmentation."""

MAX_ROWS = 4096
"""Maximum sequences of one process."""

MAX_SECONDS = 30.0
"""Maximum seconds of a step."""

TIMED_STEPS = 3
TRIAL_TOKENS = 32
"""New tokens per text in a trial of text generation."""


class Trial:
    """A training without text and files, on a loaded base."""

    def __init__(self, setup: Setup, base: FrozenBase, accelerator: Accelerator) -> None:
        self.setup, self.base, self.accelerator = setup, base, accelerator
        if setup.init:
            self.head = resume_head(setup.init, base, setup.head["kind"])
        else:
            self.head = build_for(setup.head, base)
        adapter = schedules.adapter_settings(setup.schedule)
        self.teacher = Teacher(base, self.head, adapter, setup.seed)
        self.stepper = Stepper(self.teacher, setup.schedule, accelerator, setup.seed)
        restart_peak(base.device)

    def step(self, phase: PlacedPhase, rows: int) -> float:
        """Take a step with `rows` rows on this process; return the seconds of the slowest one."""
        self.teacher.begin(phase)
        batch = self.setup.batch(phase.settings, rows, self.base, self.head)
        began = time.perf_counter()
        self.stepper.step(batch, phase, phase.first)
        synchronise(self.base.device)
        return agreed(time.perf_counter() - began)

    def step_seconds(self, phase: PlacedPhase, rows: int) -> float:
        """Return the seconds of a step with `rows` rows on this process."""
        # the first step warms up
        return median([self.step(phase, rows) for _ in range(1 + TIMED_STEPS)][1:])

    def text_seconds(self, distill: Distill) -> float:
        """Return the seconds to generate a phase's text, from a short batch without drafts."""
        number = min(distill.batch_size, distill.num_samples)
        new_tokens = min(TRIAL_TOKENS, distill.new_tokens)
        prompt = [at % self.base.vocab_size for at in range(distill.prompt_tokens)]
        with self.teacher.as_loaded():
            # the first time warms up
            generate(self.base, None, [prompt] * number, max_new_tokens=new_tokens)
            began = time.perf_counter()
            generate(self.base, None, [prompt] * number, max_new_tokens=new_tokens)
        seconds = agreed(time.perf_counter() - began)
        batches = distill.num_samples / number / self.accelerator.num_processes
        return batches * seconds * distill.new_tokens / new_tokens

    @property
    def peak(self) -> int:
        """Peak bytes of this process since the trial began."""
        return peak_bytes(self.base.device)

    def leave(self) -> None:
        """Restore the base."""
        self.teacher.leave()


def automatic(schedule: Schedule) -> list[str]:
    """Return the names of the phases with `batch_size=auto`."""
    return [name for name, one in schedule.phases.items() if one.batch_size == AUTO]


def largest_batches(setup: Setup, base: FrozenBase, accelerator: Accelerator) -> dict[str, int]:
    """Return the largest batch size that fits, over all processes, of each phase with `auto`.

    Shapes tell how many sequences may fit, and the smallest step how many take at most
    `MAX_SECONDS`. accelerate lowers that number until a real step does not run out of memory.

    Raises:
        ValueError: Not even one sequence fits.
    """
    names = automatic(setup.schedule)
    phases = [one for one in placed(setup.schedule) if one.name in names]
    shares = readers(base.sharding, accelerator)["world_size"]
    shapes = Shapes(setup, target_of(setup.base, accelerator))
    trial = Trial(setup, base, accelerator)
    try:
        return {one.name: _largest(shapes, trial, one) * shares for one in phases}
    finally:
        trial.leave()


def _largest(shapes: Shapes, trial: Trial, phase: PlacedPhase) -> int:
    """Return the sequences of one process in the largest step of a phase."""
    device, least = trial.base.device, phase.settings.accumulation_steps
    room = int((1 - MARGIN["cpu" if device.type == "cpu" else "cuda"]) * room_of(device))
    needed = shapes.step(phase, least)
    first = sum(needed.values())
    if device.type == "cpu":
        # the base and the libraries are in memory already
        first += held_bytes(device) - needed["base weights"]
    if first > room:
        raise InputError(
            f"phase {phase.name!r} must fit {room / 2**30:.3g} GiB, but {least} sequences need "
            f"{first / 2**30:.3g}; raise accumulation_steps, or lower sequence_length"
        )
    trial.step(phase, least)
    in_time = least * MAX_SECONDS / max(trial.step(phase, least), 1e-6)
    fitting = least + (room - first) // shapes.row_bytes(phase)
    start = max(least, int(-agreed(-float(min(fitting, in_time, MAX_ROWS)))))

    @find_executable_batch_size(starting_batch_size=start)
    def attempt(rows: int) -> int:
        trial.step(phase, rows)
        return rows

    return attempt()  # pyright: ignore[reportCallIssue]


def room_of(device: torch.device) -> int:
    """Return the bytes that a process can use on its device, including those it uses now.

    The process with the least memory decides for all.
    """
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if device.type == "cpu" else 1
    # unused memory in torch's CUDA allocator already counts as available
    held = held_bytes(device) if device.type == "cpu" else torch.cuda.memory_allocated(device)
    return int(-agreed(-float(available_bytes(device) // sharing + held)))


def agreed(value: float) -> float:
    """Return the maximum over all processes."""
    return max(gather_object([value]))

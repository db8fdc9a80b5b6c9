"""Real steps on random tokens: their time and peak memory, and `batch_size=auto`."""

import os
import time
from statistics import median

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from specheads.base.model import FrozenBase
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
from specheads.training.plan.shapes import Setup
from specheads.training.processes import readers
from specheads.training.schedule import PlacedPhase, placed
from specheads.training.settings import Distill, Schedule
from specheads.training.step import Stepper
from specheads.training.teacher import Teacher

MARGIN = 0.2
"""Share of the memory that stays free, for fragmentation and longer text."""

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

    def step_bytes(self, phase: PlacedPhase, rows: int) -> tuple[int, int, float]:
        """Return the bytes before a step, the peak of the step, and its seconds."""
        device = self.base.device
        restart_peak(device)
        before = held_bytes(device)
        seconds = self.step(phase, rows)
        return before, int(agreed(float(peak_bytes(device)))), seconds

    def text_seconds(self, distill: Distill) -> float:
        """Return the seconds to generate a phase's text, from a short batch without drafts."""
        number = min(distill.batch_size, distill.num_samples)
        new_tokens = min(TRIAL_TOKENS, distill.new_tokens)
        prompts = [[at % self.base.vocab_size for at in range(distill.prompt_tokens)]] * number
        with self.teacher.as_loaded():
            # the first time warms up
            for _ in range(2):
                began = time.perf_counter()
                generate(self.base, None, prompts, max_new_tokens=new_tokens)
        seconds = agreed(time.perf_counter() - began)
        batches = distill.num_samples / number / self.accelerator.num_processes
        return batches * seconds * distill.new_tokens / new_tokens

    def leave(self) -> None:
        """Restore the base."""
        self.teacher.leave()


def automatic(schedule: Schedule) -> list[str]:
    """Return the names of the phases with `batch_size=auto`."""
    return [name for name, one in schedule.phases.items() if one.batch_size == AUTO]


def largest_batches(setup: Setup, base: FrozenBase, accelerator: Accelerator) -> dict[str, int]:
    """Return the batch size, over all processes, of each phase with `auto`."""
    names = automatic(setup.schedule)
    phases = [one for one in placed(setup.schedule) if one.name in names]
    shares = readers(base.sharding, accelerator)["world_size"]
    trial = Trial(setup, base, accelerator)
    try:
        return {one.name: _largest(trial, one) * shares for one in phases}
    finally:
        trial.leave()


def _largest(trial: Trial, phase: PlacedPhase) -> int:
    """Double the sequences of one process as long as a real step shows that twice as many fit."""
    room = (1 - MARGIN) * room_of(trial.base.device)
    rows = phase.settings.accumulation_steps
    # the first step makes the state of the optimizers
    trial.step(phase, rows)
    while 2 * rows <= MAX_ROWS:
        before, peak, seconds = trial.step_bytes(phase, rows)
        # what a step adds is at most proportional to its rows
        if 2 * peak - before > room or 2 * seconds > MAX_SECONDS:
            break
        rows *= 2
    return rows


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

"""Real steps on random tokens, to measure memory and time. Nothing is written to disk."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from specheads.base.model import FrozenBase
from specheads.config import Train
from specheads.core.drafter import Head
from specheads.core.machine import peak_bytes, restart_peak, synchronise
from specheads.decoding.sampling import Sampling
from specheads.heads.load import build_for, drafter_of, resume_head
from specheads.training import schedule as schedules
from specheads.training.distill.engine import GenerationRequest
from specheads.training.distill.engines import local
from specheads.training.distill.engines.local import REFILL
from specheads.training.plan import shapes
from specheads.training.plan.ledger import Ledger
from specheads.training.plan.shapes import Parts
from specheads.training.schedule import PlacedPhase, row_tokens, text_tokens
from specheads.training.settings import Distill
from specheads.training.step import Stepper
from specheads.training.teacher import Teacher

LIBRARIES = "Python and libraries"
REST = "allocator cache, packed weights, and others"
"""Memory of a process beyond torch tensors."""

LEAST_STEPS, MOST_STEPS, SECONDS = 3, 20, 10.0
"""Number of timed steps: as many as take `SECONDS`, within these bounds."""

SHORT, LONG = 8, 40
"""New tokens per text in two trials, to extrapolate the time of a whole text."""


@dataclass(frozen=True, slots=True)
class Tried:
    """Measured memory and time of a step."""

    memory: Parts
    seconds: float

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.memory.values())


class Trial:
    """A training without text and files, on a loaded base."""

    def __init__(
        self, settings: Train, base: FrozenBase, accelerator: Accelerator, libraries: int
    ) -> None:
        self.settings, self.base, self.accelerator = settings, base, accelerator
        self.libraries = libraries if base.device.type == "cpu" else 0
        """Bytes of this process before the base was loaded."""
        self.head = (
            resume_head(settings.init, base, settings.head["kind"])
            if settings.init
            else build_for(settings.head, base)
        )
        adapter = schedules.adapter_settings(settings.schedule)
        self.teacher = Teacher(base, self.head, adapter, settings.seed)
        self.stepper = Stepper(self.teacher, settings.schedule, accelerator, settings.seed)
        learned = [*self.head.parameters(), *self.teacher.parameters]
        self.learned = [one for one in learned if one.requires_grad]

    def step(self, phase: PlacedPhase, rows: int, *, timed: bool = True) -> Tried:
        """Measure steps with `rows` rows on this process: memory, and time if `timed`.

        The first step warms up; the ledger records the second one.
        """
        self.teacher.begin(phase)
        restart_peak(self.base.device)
        self._step(phase, rows)
        with Ledger() as ledger, self._gradients(ledger):
            seconds = agreed(self._step(phase, rows))
        if timed:
            number = min(max(LEAST_STEPS, int(SECONDS / seconds)), MOST_STEPS)
            seconds = agreed(median([self._step(phase, rows) for _ in range(number)]))
        return Tried(self._parts(ledger.peak), seconds)

    def _step(self, phase: PlacedPhase, rows: int) -> float:
        length = row_tokens(phase.settings, self.settings.data, self.base.max_length)
        batch = shapes.made_up(rows, length, phase.settings, self.head)
        began = time.perf_counter()
        self.stepper.step(batch, phase, phase.first)
        synchronise(self.base.device)
        return time.perf_counter() - began

    @contextmanager
    def _gradients(self, ledger: Ledger) -> Iterator[None]:
        """Assign gradients to their own part."""

        def own(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            ledger.belongs(parameter.grad, shapes.GRADIENTS)

        hooks = [one.register_post_accumulate_grad_hook(own) for one in self.learned]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def write(self, distill: Distill) -> Parts:
        """Measure the memory of generating a short batch of text, with a drafter if allowed."""
        drafter, number = None, min(distill.batch_size, distill.num_samples)
        restart_peak(self.base.device)
        with self.teacher.as_loaded(), torch.no_grad():
            if distill.use_head.lower() == "auto":
                # a run times both ways as well
                self._texts(distill, number, SHORT)
            if distill.use_head.lower() != "false":
                drafter = drafter_of(self.head, self.base)
            with Ledger() as ledger:
                self._texts(distill, number, SHORT, drafter, joining=number // REFILL)
            parts = ledger.peak
            if drafter is not None:
                parts[shapes.DRAFTER] = shapes.stored(drafter.parameters())
            return self._parts(parts)

    def writing_seconds(self, distill: Distill) -> float:
        """Return the seconds to generate a phase's text, from two short batches without drafts."""
        number = min(distill.batch_size, distill.num_samples)
        first, last = (min(size, distill.new_tokens) for size in (SHORT, LONG))
        with self.teacher.as_loaded(), torch.no_grad():
            self._texts(distill, number, first)
            short, long = (self._texts(distill, number, size) for size in (first, last))
        token = max(0.0, long - short) / max(1, last - first)
        batches = distill.num_samples / number / self.accelerator.num_processes
        return agreed(batches * (short + token * (distill.new_tokens - first)))

    def _texts(
        self,
        distill: Distill,
        number: int,
        new_tokens: int,
        drafter: Head | None = None,
        joining: int = 0,
    ) -> float:
        """Generate texts and return the seconds; `joining` texts end half-way and others join."""
        chosen = Sampling(temperature=distill.temperature, top_k=distill.top_k, top_p=distill.top_p)
        prompt = [at % self.base.vocab_size for at in range(distill.prompt_tokens)]
        new_tokens = min(new_tokens, distill.new_tokens)
        lengths = [max(1, new_tokens // 2)] * joining + [new_tokens] * number
        requests = iter(
            [GenerationRequest(at, prompt, length, chosen) for at, length in enumerate(lengths)]
        )
        engine = local.build(distill, self.base, drafter, text_tokens(distill))
        began = time.perf_counter()
        for _ in engine(lambda: next(requests, None)):
            pass
        return time.perf_counter() - began

    def _parts(self, found: Parts) -> Parts:
        """Add weights, optimizer state, libraries and the remaining process memory to `found`."""
        states = [held for one in self.stepper.optimizers for held in one.state.values()]
        moments = [value for held in states for value in held.values()]
        head = [*self.head.parameters(), *self.head.buffers()]
        weights = list(self.base.model.parameters())
        parts = {
            LIBRARIES: self.libraries,
            shapes.BASE_WEIGHTS: shapes.stored(weights),
            shapes.HEAD_WEIGHTS: shapes.stored([*weights, *head]) - shapes.stored(weights),
            shapes.OPTIMIZER: shapes.stored(moments),
        } | found
        rest = peak_bytes(self.base.device) - sum(parts.values())
        return {part: size for part, size in (parts | {REST: rest}).items() if size > 0}

    def leave(self) -> None:
        """Restore the base."""
        self.teacher.leave()


def agreed(value: float) -> float:
    """Return the maximum over all processes."""
    return max(gather_object([value]))

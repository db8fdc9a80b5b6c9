"""The training loop over all phases of a schedule."""

import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from rich.progress import Progress

from specheads.base.model import FrozenBase
from specheads.config.training import Schedule
from specheads.core.drafter import Head
from specheads.core.errors import ONE_STOP, InputError
from specheads.core.files import atomic_folder
from specheads.core.machine import return_freed_memory
from specheads.data.packing import BatchStream, TokenBatch
from specheads.runs import checkpoint
from specheads.runs.directory import RunDirectory
from specheads.runs.progress import progress_display
from specheads.runs.trackers import Tracker
from specheads.training.features import FETCHED_BATCHES, FeatureSource
from specheads.training.log import PhaseLog
from specheads.training.schedule import (
    ScheduledPhase,
    TrainState,
    adapter_settings,
    schedule_phases,
)
from specheads.training.step import StepRunner, Teacher
from specheads.training.validation import ValidationSet, Validator


def train(
    base: FrozenBase,
    head: Head,
    schedule: Schedule,
    open_text: Callable[[ScheduledPhase, Progress, Callable[[], None]], BatchStream],
    run: RunDirectory,
    tracker: Tracker | None,
    accelerator: Accelerator,
    *,
    seed: int = 0,
    log_every: int = 10,
    checkpoint_every: int = 0,
    held_out: ValidationSet | None = None,
    source: FeatureSource | None = None,
) -> None:
    """Train a head through every phase; resume from the newest checkpoint.

    The head is trained in place and saved in the run directory after each phase. The base's weights
    never change: joint phases train an adapter, which is saved next to the head.

    `open_text` returns the text of a phase when the phase starts. Its last argument is a function
    that all processes call together, and that raises KeyboardInterrupt after an interrupt.
    `tracker` is None on all processes except the main one. `checkpoint_every` zero writes
    checkpoints at the end of phases only. The features of a frozen base come from `source`; None is
    the base itself.

    The first interrupt (SIGINT or SIGTERM) of any process finishes the current step, writes a
    checkpoint and raises KeyboardInterrupt on all processes. A second one has its default effect.
    """
    teacher = Teacher(base, head, adapter_settings(schedule), seed, source)
    try:
        trainer = _Trainer(StepRunner(teacher, schedule, accelerator, seed), run, checkpoint_every)
        teacher.source.halted = lambda: trainer.stop
        with progress_display(shown=accelerator.is_main_process) as display, trainer.on_interrupt():
            trainer.resume(lambda line: display.console.print(line, markup=False, soft_wrap=True))
            if tracker is not None:
                tracker.resume(trainer.at.step)
            watch = Validator(held_out, trainer.stepper, run, trainer.at) if held_out else None
            for phase in schedule_phases(schedule):
                if trainer.at.step >= phase.end:
                    continue
                # the base generates text without the adapter
                with teacher.as_loaded():
                    text = open_text(phase, display, trainer.halt)
                # a corpus that was tokenised, or text that was generated, leaves 100 MB and more
                return_freed_memory()
                log = PhaseLog(phase, trainer.stepper, trainer.at, tracker, display, log_every)
                try:
                    trainer.run_phase(phase, text, log, watch)
                except InputError:
                    # an interrupted run does not wait for a lost server
                    if trainer.stop:
                        raise KeyboardInterrupt from None
                    raise
    finally:
        teacher.leave()


class _Trainer:
    """State of the training loop."""

    def __init__(self, stepper: StepRunner, run: RunDirectory, checkpoint_every: int) -> None:
        self.stepper, self.run, self.accelerator = stepper, run, stepper.accelerator
        self.head, self.teacher, self.at = stepper.head, stepper.teacher, TrainState()
        self.checkpoint_every, self.stop = checkpoint_every, False

    def run_phase(
        self, phase: ScheduledPhase, text: BatchStream, log: PhaseLog, watch: Validator | None
    ) -> None:
        """Train from the current step to the end of the phase."""
        self.teacher.begin(phase)
        with closing(prefetched(self._batches(text))) as batches:
            for batch, cursor in log.waiting(batches):
                step = self.at.step
                due = watch if watch and watch.is_due(phase, step + 1) else None
                if due and step and self.teacher.source.can_fail:
                    # a failed validation is repeated together with its step
                    self.save()
                try:
                    values = self.stepper.step(batch, phase, step)
                except InputError:
                    # its features cannot be had, and nothing has changed since the step before;
                    # with more processes the others would wait
                    if step and self.accelerator.num_processes == 1:
                        self.save()
                    raise
                tokens = phase.settings.batch_size * batch.tokens.shape[1]
                self.at.step, self.at.tokens = step + 1, self.at.tokens + tokens
                self.at.cursor = cursor
                log.step(values, tokens, partial(due.measure, phase) if due else None)
                if self.at.step == phase.end:
                    break
                stop = self._stops()
                if stop or (self.checkpoint_every and self.at.step % self.checkpoint_every == 0):
                    self.save()
                if stop:
                    raise KeyboardInterrupt
        self.teacher.source.drop()
        self.at.cursor = None
        if self.accelerator.is_main_process:
            # so that phases can be compared later
            with atomic_folder(self.run.phases / phase.name) as folder:
                self.head.save_pretrained(folder)
            if self.teacher.adapter and phase.settings.joint:
                with atomic_folder(self.run.adapter) as folder:
                    self.teacher.adapter.save(folder)
        self.save()
        self.halt()

    def _batches(self, text: BatchStream) -> Iterator[tuple[TokenBatch, dict[str, Any]]]:
        """Yield the remaining batches of a text, in pinned memory for a GPU; fetch features."""
        for batch, cursor in text.batches(self.at.cursor):
            self.teacher.source.ahead(batch)
            yield batch.pinned() if self.teacher.base.device.type == "cuda" else batch, cursor

    def save(self) -> None:
        """Write a checkpoint on the main process; the others wait."""
        if self.accelerator.is_main_process:
            optimizer = {"optimizers": [one.state_dict() for one in self.stepper.optimizers]}
            adapter = self.teacher.adapter.weights() if self.teacher.adapter else {}
            content = asdict(self.at), self.head.state_dict(), optimizer, adapter
            checkpoint.save(self.run.checkpoints, checkpoint.Checkpoint(*content))
        self.accelerator.wait_for_everyone()

    def resume(self, announce: Callable[[str], object]) -> None:
        """Load the newest intact checkpoint, if any; report damaged ones to `announce`."""
        is_main = self.accelerator.is_main_process
        found = checkpoint.load_newest(
            self.run.checkpoints, announce if is_main else lambda _: None
        )
        if found is None:
            return
        try:
            self.at = TrainState(**found.state)
            self.head.load_state_dict(found.weights)
            if self.teacher.adapter:
                self.teacher.adapter.load(found.adapter)
            saved = found.optimizer["optimizers"]
            for optimizer, values in zip(self.stepper.optimizers, saved, strict=True):
                optimizer.load_state_dict(values)
        # the checksums match, so another run wrote the file
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise InputError(
                f"a run resumes from its own checkpoints, but {self.run.checkpoints} has those of "
                "another run; remove the folder to retrain"
            ) from error

    @contextmanager
    def on_interrupt(self) -> Iterator[None]:
        """Turn the first SIGINT or SIGTERM inside the context into a stop request.

        A later one interrupts, unless it comes in the same moment.
        """
        # only the main thread receives signals
        is_main = threading.current_thread() is threading.main_thread()
        # read both handlers first: an interrupt may come after the first replacement
        before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM) if is_main}

        def restore() -> None:
            for number, handler in before.items():
                signal.signal(number, handler)

        first = math.inf

        def request_stop(*_: Any) -> None:
            nonlocal first
            now = time.monotonic()
            if now - first > ONE_STOP:
                restore()
                raise KeyboardInterrupt
            self.stop, first = True, min(first, now)

        try:
            for number in before:
                signal.signal(number, request_stop)
            yield
        finally:
            restore()

    def halt(self) -> None:
        """Raise KeyboardInterrupt on all processes if any of them has a stop request."""
        if self._stops():
            raise KeyboardInterrupt

    def _stops(self) -> bool:
        """Return whether any process has a stop request. With several this synchronises."""
        if self.accelerator.num_processes == 1:
            return self.stop
        request = torch.tensor(float(self.stop), device=self.accelerator.device)
        return bool(self.stepper.total(request) > 0)


Item = TypeVar("Item")


def prefetched(items: Iterator[Item], ahead: int = FETCHED_BATCHES) -> Generator[Item, None, None]:
    """Yield the same items; a thread prepares at most `ahead` of them in advance.

    An exception in the thread is raised in place of its item. Closing waits for the current item.
    """
    over = object()
    worker = ThreadPoolExecutor(1, "text")
    try:
        waiting = deque(worker.submit(next, items, over) for _ in range(ahead))
        while (item := waiting.popleft().result()) is not over:
            waiting.append(worker.submit(next, items, over))
            yield item  # pyright: ignore[reportReturnType]
    finally:
        worker.shutdown(cancel_futures=True)

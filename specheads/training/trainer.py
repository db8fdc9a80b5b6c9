"""The training loop over all phases of a schedule."""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from rich.progress import Progress
from torch import Tensor

from specheads.base.ends import BaseEnds
from specheads.config.training import Schedule
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.core.files import atomic_folder
from specheads.core.machine import cached_matmul_rate, return_freed_memory
from specheads.core.signals import on_stop_signal
from specheads.data.packing import BatchStream, TokenBatch
from specheads.runs import checkpoint
from specheads.runs.directory import RunDirectory
from specheads.runs.progress import progress_display
from specheads.runs.trackers import Tracker
from specheads.training.features import FETCHED_BATCHES, FeatureSource, LocalBase
from specheads.training.log import PhaseLog, ValidationSet, Validator
from specheads.training.memory import count_step_flops
from specheads.training.schedule import (
    ScheduledPhase,
    TrainState,
    adapter_settings,
    schedule_phases,
)
from specheads.training.step import DivergedError, StepRunner, Teacher


def train(
    base: BaseEnds,
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
    teacher = Teacher(base, head, source, adapter_settings(schedule), seed)
    runner = StepRunner(teacher, schedule, accelerator, seed)
    try:
        loop = _TrainingLoop(runner, run, checkpoint_every)
        teacher.source.halted = lambda: loop.stop
        shown = accelerator.is_main_process
        with progress_display(shown=shown) as display, on_stop_signal(loop.request_stop):
            loop.resume(lambda line: display.console.print(line, markup=False, soft_wrap=True))
            if tracker is not None:
                tracker.resume(loop.state.step)
            validator = Validator(held_out, runner, run, loop.state) if held_out else None
            for phase in schedule_phases(schedule):
                if loop.state.step >= phase.end:
                    continue
                # the base generates text without the adapter
                with teacher.base_as_loaded():
                    text = open_text(phase, display, loop.halt)
                # a corpus that was tokenised, or text that was generated, leaves 100 MB and more
                return_freed_memory()
                log = PhaseLog(phase, runner, loop.state, tracker, display, log_every)
                try:
                    loop.run_phase(phase, text, log, validator)
                except DivergedError as error:
                    if accelerator.is_main_process:
                        run.mark_diverged(error.step, by_base=error.by_base)
                    raise
                except InputError:
                    # an interrupted run does not wait for a lost server
                    if loop.stop:
                        raise KeyboardInterrupt from None
                    raise
    finally:
        teacher.close()


class _TrainingLoop:
    """State of the training loop."""

    def __init__(self, runner: StepRunner, run: RunDirectory, checkpoint_every: int) -> None:
        self.runner, self.run, self.accelerator = runner, run, runner.accelerator
        self.head, self.teacher, self.state = runner.head, runner.teacher, TrainState()
        self.checkpoint_every, self.stop = checkpoint_every, False
        self.phase: ScheduledPhase

    def run_phase(
        self, phase: ScheduledPhase, text: BatchStream, log: PhaseLog, validator: Validator | None
    ) -> None:
        """Train from the current step to the end of the phase."""
        self.teacher.begin(phase)
        state, self.phase = self.state, phase
        with closing(prefetched(self._batches(text))) as batches:
            for batch, cursor in log.time_waits(batches):
                step = state.step
                self._count_flops(phase, batch, log)
                validate = None
                if validator and validator.is_due(phase, step + 1):
                    validate = partial(validator.validate, phase)
                if validate and step and self.teacher.source.can_fail:
                    # a failed validation is repeated together with its step
                    self.save()
                metrics = self._take_step(batch, phase)
                tokens = phase.settings.batch_size * batch.tokens.shape[1]
                state.step, state.tokens, state.cursor = step + 1, state.tokens + tokens, cursor
                if validate or log.is_row_due():
                    self.check_finite(with_weights=validate is not None)
                log.log_step(metrics, tokens, validate)
                if state.step == phase.end:
                    break
                stops = self._stops()
                if stops or (self.checkpoint_every and state.step % self.checkpoint_every == 0):
                    self.save()
                if stops:
                    raise KeyboardInterrupt
        self.teacher.source.drop()
        state.cursor = None
        self.check_finite(with_weights=True)
        if self.accelerator.is_main_process:
            # so that phases can be compared later
            with atomic_folder(self.run.phases / phase.name) as folder:
                self.head.save_pretrained(folder)
            if self.teacher.joint and phase.settings.joint:
                with atomic_folder(self.run.adapter) as folder:
                    self.teacher.joint.adapter.save(folder)
        self.save()
        self.halt()

    def _take_step(self, batch: TokenBatch, phase: ScheduledPhase) -> dict[str, Tensor]:
        """Take the next optimizer step; return this process's share of its metrics."""
        step = self.state.step
        try:
            return self.runner.step(batch, phase, step)
        except InputError:
            # its features cannot be had, and nothing has changed since the step before; with more
            # processes the others would wait
            if step and self.accelerator.num_processes == 1:
                self.save()
            raise

    def _count_flops(self, phase: ScheduledPhase, batch: TokenBatch, log: PhaseLog) -> None:
        """Tell the log how long a step takes at the speed of large matrix products, once.

        Zero if the features come from elsewhere: there is no forward of the base here then.
        """
        if log.full_speed_seconds is not None:
            return
        base, log.full_speed_seconds = self.teacher.base, 0.0
        if isinstance(self.teacher.source, LocalBase):
            with log.paused():
                flops = count_step_flops(base, self.head, phase, batch)
                log.full_speed_seconds = flops / cached_matmul_rate(base.device, base.dtype)

    def _batches(self, text: BatchStream) -> Iterator[tuple[TokenBatch, dict[str, Any]]]:
        """Yield the remaining batches of a text, in pinned memory for a GPU; fetch features."""
        for batch, cursor in text.batches(self.state.cursor):
            self.teacher.source.ahead(batch)
            yield batch.pinned() if self.teacher.base.device.type == "cuda" else batch, cursor

    def check_finite(self, *, with_weights: bool) -> None:
        """Raise if a loss, a gradient or a weight is not finite; all processes call this."""
        if fault := self.runner.first_fault():
            step, by_base = fault
            raise DivergedError(step, self.phase, self.teacher.base.dtype, by_base=by_base)
        weights = [*self.head.state_dict().values(), *self.runner.base_parameters]
        if with_weights and not torch.stack([value.isfinite().all() for value in weights]).all():
            dtype, step = self.teacher.base.dtype, self.state.step
            raise DivergedError(step, self.phase, dtype, by_base=False, metric="weight")

    def save(self) -> None:
        """Write a checkpoint on the main process, if all is finite; the others wait."""
        self.check_finite(with_weights=True)
        if self.accelerator.is_main_process:
            states = [optimizer.state_dict() for optimizer in self.runner.optimizers]
            adapter = self.teacher.joint.adapter.weights() if self.teacher.joint else {}
            weights, optimizer = self.head.state_dict(), {"optimizers": states}
            content = checkpoint.Checkpoint(asdict(self.state), weights, optimizer, adapter)
            checkpoint.save(self.run.checkpoints, content)
        self.accelerator.wait_for_everyone()

    def resume(self, announce: Callable[[str], object]) -> None:
        """Load the newest intact checkpoint, if any; report damaged ones to `announce`."""
        log = announce if self.accelerator.is_main_process else lambda _: None
        saved = checkpoint.load_newest(self.run.checkpoints, log)
        if saved is None:
            return
        try:
            self.state = TrainState(**saved.state)
            self.head.load_state_dict(saved.weights)
            if self.teacher.joint:
                self.teacher.joint.adapter.load(saved.adapter)
            states = saved.optimizer["optimizers"]
            for optimizer, state in zip(self.runner.optimizers, states, strict=True):
                optimizer.load_state_dict(state)
        # the checksums match, so another run wrote the file
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise InputError(
                f"a run resumes from its own checkpoints, but {self.run.checkpoints} has those of "
                "another run; remove the folder to retrain"
            ) from error

    def request_stop(self) -> None:
        """Ask all processes to stop at their next checkpoint."""
        self.stop = True

    def halt(self) -> None:
        """Raise KeyboardInterrupt on all processes if any of them has a stop request."""
        if self._stops():
            raise KeyboardInterrupt

    def _stops(self) -> bool:
        """Return whether any process has a stop request. With several this synchronises."""
        if self.accelerator.num_processes == 1:
            return self.stop
        request = torch.tensor(float(self.stop), device=self.accelerator.device)
        return bool(self.runner.total(request) > 0)


Item = TypeVar("Item")


def prefetched(items: Iterator[Item], ahead: int = FETCHED_BATCHES) -> Generator[Item, None, None]:
    """Yield the same items; a thread prepares at most `ahead` of them in advance.

    An exception in the thread is raised in place of its item. Closing waits for the current item.
    """
    end = object()
    worker = ThreadPoolExecutor(1, "text")
    try:
        waiting = deque(worker.submit(next, items, end) for _ in range(ahead))
        while (item := waiting.popleft().result()) is not end:
            waiting.append(worker.submit(next, items, end))
            yield item  # pyright: ignore[reportReturnType]
    finally:
        worker.shutdown(cancel_futures=True)

"""Metrics of training: rows of metrics.jsonl, speed, and the numbers on the progress bar."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor

from specheads.core.machine import peak_gib
from specheads.data.packing import TokenBatch
from specheads.runs.trackers import Tracker
from specheads.training.schedule import ScheduledPhase, TrainState
from specheads.training.step import StepRunner


class PhaseLog:
    """Logs one phase: a row of metrics every few steps, and a progress bar.

    Metrics are summed on the device, and over processes once per row. The time of the phase is
    added to the run's training seconds, without validation.
    """

    def __init__(
        self,
        phase: ScheduledPhase,
        runner: StepRunner,
        state: TrainState,
        tracker: Tracker | None,
        display: Progress,
        every: int,
    ) -> None:
        self.phase, self.runner, self.state = phase, runner, state
        self.tracker, self.display, self.every = tracker, display, every
        self.teacher = runner.teacher
        self.task = display.add_task(
            phase.name, total=phase.settings.steps, completed=state.step - phase.first, numbers=""
        )
        self.full_speed_seconds: float | None = None
        """Seconds that a step's matrix products take at full speed; zero if not known."""
        self.validation_numbers = ""
        self.start_row()

    def time_waits(
        self, batches: Iterable[tuple[TokenBatch, dict[str, Any]]]
    ) -> Iterator[tuple[TokenBatch, dict[str, Any]]]:
        """Yield the same batches and measure the time spent waiting for them."""
        iterator = iter(batches)
        while True:
            start = time.perf_counter()
            if (item := next(iterator, None)) is None:
                return
            self.wait_seconds += time.perf_counter() - start
            yield item

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time inside the context out of the run's training seconds."""
        self._add_seconds()
        yield
        self.clock = time.perf_counter()

    def log_step(
        self,
        metrics: Mapping[str, Tensor],
        tokens: int,
        validate: Callable[[], Mapping[str, float]] | None = None,
    ) -> None:
        """Log one step: its metrics (this process's share) and its tokens over all processes.

        `validate` runs the validation that is due after this step, which gets a row.
        """
        for name, value in metrics.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        self.num_steps += 1
        self.tokens += tokens
        self._add_seconds()
        state = self.state
        if validate or self.is_row_due():
            self._write_row(validate)
            self.start_row()
        self.display.update(self.task, completed=state.step - self.phase.first)

    def is_row_due(self) -> bool:
        """Return whether the last step has a row, also without a validation."""
        return self.state.step % self.every == 0 or self.state.step == self.phase.end

    def start_row(self) -> None:
        """Start a new row; the time since the last step does not count."""
        self.sums: dict[str, Tensor] = {}
        self.num_steps, self.tokens, self.wait_seconds = 0, 0, 0.0
        self.source_wait_seconds = self.teacher.source.waited_seconds
        self.row_start_seconds, self.clock = self.state.seconds, time.perf_counter()

    def _add_seconds(self) -> None:
        """Add the time since the last call to the run's training seconds."""
        clock = time.perf_counter()
        self.state.seconds += clock - self.clock
        self.clock = clock

    def _write_row(self, validate: Callable[[], Mapping[str, float]] | None) -> None:
        """Write a row with the means since the last one."""
        sums = torch.stack(list(self.sums.values()))
        means = self.runner.total(sums / self.num_steps).tolist()
        state, phase = self.state, self.phase
        row: dict[str, Any] = {"step": state.step, "phase": phase.name, "tokens": state.tokens}
        row |= zip(self.sums, means, strict=True)
        self._add_seconds()
        seconds, rates = state.seconds - self.row_start_seconds, phase.rates(state.step - 1)
        row["tokens_per_second"] = self.tokens / seconds
        row["hours"] = state.seconds / 3600
        row["data_wait_share"] = min(self.wait_seconds / seconds, 1.0)
        if (wait_seconds := self.teacher.source.waited_seconds) >= 0:
            wait_share = (wait_seconds - self.source_wait_seconds) / seconds
            row["features_wait_share"] = min(wait_share, 1.0)
        row["peak_gib"] = peak_gib(self.teacher.base.device)
        if self.full_speed_seconds:
            row["mfu"] = self.full_speed_seconds * self.num_steps / seconds
        row["learning_rate"] = rates["head"]
        if phase.settings.joint:
            row["learning_rate/base"] = rates["base"]
            row["head_weight"] = phase.head_weight(state.step - 1)
        if validate:
            row |= validate()
            names = ("validation/loss", "validation/tokens_per_forward")
            numbers = [f"  {name} {row[name]:.3f}" for name in names if name in row]
            self.validation_numbers = "".join(numbers)
        if self.tracker is not None:
            self.tracker.log(row)
        acceptance = " ".join(f"{row[name]:.2f}" for name in row if name.startswith("accept/"))
        numbers = f"loss {row['loss']:.3f}  accept {acceptance}{self.validation_numbers}"
        speed = f"{row['tokens_per_second']:,.0f} tokens/s"
        self.display.update(self.task, numbers=f"{numbers}  {speed}")

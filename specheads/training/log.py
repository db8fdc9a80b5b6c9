"""Metrics of training: rows of metrics.jsonl, speed, and the numbers on the progress bar."""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor

from specheads.core.errors import InputError
from specheads.core.machine import peak_gib, synchronise
from specheads.data.packing import TokenBatch
from specheads.runs.trackers import Tracker
from specheads.training.features import LocalBase
from specheads.training.schedule import ScheduledPhase, TrainState
from specheads.training.step import StepRunner


class PhaseLog:
    """Logs one phase: a row of metrics every few steps, and a progress bar.

    Metrics are summed on the device, and over processes once per row. The time of the phase is
    added to the run's training seconds, without validation and without the count of FLOPs.
    """

    def __init__(
        self,
        phase: ScheduledPhase,
        stepper: StepRunner,
        at: TrainState,
        tracker: Tracker | None,
        display: Progress,
        every: int,
    ) -> None:
        self.phase, self.stepper, self.at = phase, stepper, at
        self.tracker, self.display, self.every = tracker, display, every
        self.teacher = stepper.teacher
        self.task = display.add_task(
            phase.name, total=phase.settings.steps, completed=at.step - phase.first, numbers=""
        )
        self.full_speed_seconds = 0.0
        """Seconds that a step's matrix products take at full speed; zero if not known."""
        self.held_out = ""
        self._clear()

    def waiting(
        self, batches: Iterable[tuple[TokenBatch, dict[str, Any]]]
    ) -> Iterator[tuple[TokenBatch, dict[str, Any]]]:
        """Yield the same batches and measure the time spent waiting for them."""
        source = iter(batches)
        while True:
            began = time.perf_counter()
            if (item := next(source, None)) is None:
                return
            self.waited += time.perf_counter() - began
            # other sources have no forward of the base here
            if not self.full_speed_seconds and isinstance(self.teacher.source, LocalBase):
                self._count_time()
                flops = self.stepper.flops(item[0], self.phase, self.at.step)
                base = self.teacher.base
                self.full_speed_seconds = flops / _matmul_rate(base.device, base.dtype)
                self.read = time.perf_counter()
            yield item

    def step(
        self,
        values: Mapping[str, Tensor],
        tokens: int,
        held_out: Callable[[], Mapping[str, float]] | None = None,
    ) -> None:
        """Log one step: its metrics (this process's share) and its tokens over all processes.

        `held_out` runs the validation that is due after this step, which gets a row.
        """
        for name, value in values.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        self.steps += 1
        self.tokens += tokens
        self._count_time()
        if held_out or self.at.step % self.every == 0 or self.at.step == self.phase.end:
            self._write(held_out)
            self._clear()
        self.display.update(self.task, completed=self.at.step - self.phase.first)

    def _clear(self) -> None:
        """Start a new row; the time since the last one does not count."""
        self.sums: dict[str, Tensor] = {}
        self.steps, self.tokens, self.waited = 0, 0, 0.0
        self.waited_before = self.teacher.source.waited_seconds
        self.since, self.read = self.at.seconds, time.perf_counter()

    def _count_time(self) -> None:
        """Add the time since the last reading."""
        now = time.perf_counter()
        self.at.seconds += now - self.read
        self.read = now

    def _write(self, held_out: Callable[[], Mapping[str, float]] | None) -> None:
        """Write a row with the means since the last one."""
        means = self.stepper.total(torch.stack(list(self.sums.values())) / self.steps).tolist()
        at, phase = self.at, self.phase
        row: dict[str, Any] = {"step": at.step, "phase": phase.name, "tokens": at.tokens}
        row |= zip(self.sums, means, strict=True)
        if not math.isfinite(row["loss"]):
            raise InputError(
                f"the loss must be finite, got {row['loss']} at step {at.step}; lower learning_rate"
            )
        self._count_time()
        seconds, rates = at.seconds - self.since, phase.rates(at.step - 1)
        row["tokens_per_second"] = self.tokens / seconds
        row["hours"] = at.seconds / 3600
        row["data_wait_share"] = min(self.waited / seconds, 1.0)
        if (waited := self.teacher.source.waited_seconds) >= 0:
            row["features_wait_share"] = min((waited - self.waited_before) / seconds, 1.0)
        row["peak_gib"] = peak_gib(self.teacher.base.device)
        if self.full_speed_seconds:
            row["mfu"] = self.full_speed_seconds * self.steps / seconds
        row["learning_rate"] = rates["head"]
        if phase.settings.joint:
            row["learning_rate/base"] = rates["base"]
            row["head_weight"] = phase.head_weight(at.step - 1)
        if held_out:
            row |= held_out()
            names = ("validation/loss", "validation/tokens_per_forward")
            self.held_out = "".join(f"  {one} {row[one]:.3f}" for one in names if one in row)
        if self.tracker is not None:
            self.tracker.log(row)
        accepted = [f"{row[name]:.2f}" for name in row if name.startswith("accept/")]
        numbers = f"loss {row['loss']:.3f}  accept {' '.join(accepted)}"
        speed = f"{row['tokens_per_second']:,.0f} tokens/s"
        self.display.update(self.task, numbers=f"{numbers}{self.held_out}  {speed}")


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the FLOP/s of this machine in large matrix products, in less than a second."""
    side = 1024 if device.type == "cpu" else 8192
    # does not change the random state
    generator = torch.Generator(device).manual_seed(0)
    one = torch.randn(side, side, device=device, generator=generator).to(dtype)
    times = []
    for _ in range(12):
        synchronise(device)
        began = time.perf_counter()
        torch.mm(one, one)
        synchronise(device)
        times.append(time.perf_counter() - began)
    return 2 * side**3 / statistics.median(times)


_matmul_rate = cache(matmul_rate)

"""Metrics of training: rows of metrics.jsonl, speed, and the numbers on the progress bar."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor

from specheads.core.errors import InputError
from specheads.core.machine import peak_gib
from specheads.data.packing import TokenBatch
from specheads.runs.trackers import Tracker
from specheads.training.cost import matmul_rate, step_flops
from specheads.training.schedule import PlacedPhase, Progressed
from specheads.training.teacher import Teacher


class Meter:
    """Measures the time of a phase and adds it to the run's training seconds.

    Time between `row` and `go_on` does not count: validation is not training. Utilisation is that
    of this process; `autocast` is the head's mixed precision.
    """

    def __init__(
        self,
        at: Progressed,
        phase: PlacedPhase,
        teacher: Teacher,
        autocast: Callable[..., AbstractContextManager[Any]],
    ) -> None:
        self.at, self.phase, self.teacher, self.autocast = at, phase, teacher, autocast
        self.use = 0.0
        """Seconds that a step's matrix products take at full speed; zero if not known yet."""
        self.go_on()

    def waiting(
        self, batches: Iterable[tuple[TokenBatch, dict[str, Any]]]
    ) -> Iterator[tuple[TokenBatch, dict[str, Any]]]:
        """Yield the same batches and measure the time spent waiting for them."""
        source = iter(batches)
        while True:
            began = time.perf_counter()
            try:
                item = next(source)
            except StopIteration:
                return
            self.waited += time.perf_counter() - began
            if not self.use and self._is_known():
                self._estimate(item[0])
            yield item

    def _is_known(self) -> bool:
        """Return whether the base's FLOPs are known: it is frozen and reads every batch."""
        return self.phase.settings.joint is None and self.teacher.cache is None

    def _estimate(self, batch: TokenBatch) -> None:
        """Estimate the seconds of a step's matrix products at full speed."""
        base, head, settings = self.teacher.base, self.teacher.head, self.phase.settings
        self.pause()
        with _undrawn(base.device), self.autocast():
            # in the same parts as the step, so that it needs no more memory
            parts = batch.parts(settings.accumulation_steps)
            flops = sum(step_flops(base, head, part, settings).total for part in parts)
        self.use = flops / _matmul_rate(base.device, base.dtype)
        self.read = time.perf_counter()

    def step(self, tokens: int) -> None:
        """Count one step with this number of tokens over all processes."""
        self.steps += 1
        self.tokens += tokens
        self.pause()

    def pause(self) -> None:
        """Add the time since the last reading."""
        now = time.perf_counter()
        self.at.seconds += now - self.read
        self.read = now

    def row(self) -> dict[str, float]:
        """Return the metrics since the last row, under the names of metrics.jsonl."""
        self.pause()
        seconds = self.at.seconds - self.since
        figures = {
            "tokens_per_second": self.tokens / seconds,
            "hours": self.at.seconds / 3600,
            "data_wait_share": min(self.waited / seconds, 1.0),
            "peak_gib": peak_gib(self.teacher.base.device),
        }
        if self.use:
            figures["mfu"] = self.use * self.steps / seconds
        return figures

    def go_on(self) -> None:
        """Start a new row; the time since the last one does not count."""
        self.steps, self.tokens, self.waited = 0, 0, 0.0
        self.since, self.read = self.at.seconds, time.perf_counter()


@cache
def _matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return the machine's FLOP/s, measured once per process."""
    with _undrawn(device):
        return matmul_rate(device, dtype)


def _undrawn(device: torch.device) -> AbstractContextManager[None]:
    """Restore the random states at the end of the context."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


class PhaseLog:
    """Logs one phase: a row of metrics every few steps, and a progress bar.

    Metrics are summed on the device, and over processes once per row.
    """

    def __init__(
        self,
        phase: PlacedPhase,
        at: Progressed,
        tracker: Tracker | None,
        display: Progress,
        total: Callable[[Tensor], Tensor],
        every: int,
        meter: Meter,
    ) -> None:
        self.phase, self.at, self.tracker, self.display = phase, at, tracker, display
        self.total, self.every, self.meter, self.held_out = total, every, meter, ""
        self.task = display.add_task(
            phase.name, total=phase.settings.steps, completed=at.step - phase.first, numbers=""
        )
        self._clear()

    def step(
        self,
        values: Mapping[str, Tensor],
        tokens: int,
        held_out: Callable[[], Mapping[str, float]] | None = None,
    ) -> None:
        """Log one step: its metrics (this process's share) and its number of tokens.

        `held_out` runs the validation that is due after this step; such a step always gets a row.
        """
        for name, value in values.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        self.steps += 1
        self.meter.step(tokens)
        if held_out or self.at.step % self.every == 0 or self.at.step == self.phase.end:
            self._write(held_out)
            self._clear()
        self.display.update(self.task, completed=self.at.step - self.phase.first)

    def print(self, line: str) -> None:
        """Print a line on the main process."""
        if self.tracker is not None:
            self.display.console.print(line, markup=False, soft_wrap=True)

    def _clear(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.steps = 0
        self.meter.go_on()

    def _write(self, held_out: Callable[[], Mapping[str, float]] | None) -> None:
        """Write a row with the means since the last one."""
        means = self.total(torch.stack(list(self.sums.values())) / self.steps).tolist()
        at = self.at
        row: dict[str, Any] = {"step": at.step, "phase": self.phase.name, "tokens": at.tokens}
        row |= zip(self.sums, means, strict=True)
        if not math.isfinite(row["loss"]):
            raise InputError(
                f"the loss must be finite, got {row['loss']} at step {at.step}; lower learning_rate"
            )
        row |= self.meter.row()
        rates = self.phase.rates(at.step - 1)
        row["learning_rate"] = rates["head"]
        if self.phase.settings.joint:
            row["learning_rate/base"] = rates["base"]
            row["head_weight"] = self.phase.head_weight(at.step - 1)
        if held_out:
            measured = held_out()
            row |= measured
            self.held_out = _brief(measured)
        if self.tracker is not None:
            self.tracker.log(row)
        accepted = [f"{row[name]:.2f}" for name in row if name.startswith("accept/")]
        numbers = f"loss {row['loss']:.3f}  accept {' '.join(accepted)}"
        speed = f"{row['tokens_per_second']:,.0f} tokens/s"
        self.display.update(self.task, numbers=f"{numbers}{self.held_out}  {speed}")


def _brief(measured: Mapping[str, float]) -> str:
    """Return the validation metrics for the progress bar."""
    shown = {"loss": "held out", "tokens_per_forward": "tokens/forward"}
    figures = {name: measured.get(f"validation/{name}") for name in shown}
    return "".join(
        f"  {shown[name]} {value:.3f}" for name, value in figures.items() if value is not None
    )

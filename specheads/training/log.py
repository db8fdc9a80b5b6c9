"""What training tells while it runs: rows of metrics, and numbers beside the bar."""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor

from specheads.core.errors import InputError
from specheads.runs.trackers import Tracker
from specheads.training.schedule import PlacedPhase, Progressed


class PhaseLog:
    """Tells of one phase: a row every few steps, and its line of the display.

    Figures are summed up on the device, and over processes when they are read, once a row.
    """

    def __init__(
        self,
        phase: PlacedPhase,
        at: Progressed,
        tracker: Tracker | None,
        display: Progress,
        total: Callable[[Tensor], Tensor],
        every: int,
    ) -> None:
        self.phase, self.at, self.tracker, self.display = phase, at, tracker, display
        self.total, self.every, self.held_out = total, every, ""
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
        """Tell of one more step: its figures, which are summed over processes, and its tokens.

        `held_out` measures on held-out text, in steps after which that is done: they get a row.
        """
        for name, value in values.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        self.steps += 1
        self.tokens += tokens
        if held_out or self.at.step % self.every == 0 or self.at.step == self.phase.end:
            self._write(held_out)
            self._clear()
        self.display.update(self.task, completed=self.at.step - self.phase.first)

    def _clear(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.steps, self.tokens, self.since = 0, 0, time.perf_counter()

    def _write(self, held_out: Callable[[], Mapping[str, float]] | None) -> None:
        """Tell what happened since the last row."""
        means = self.total(torch.stack(list(self.sums.values())) / self.steps).tolist()
        at = self.at
        row: dict[str, Any] = {"step": at.step, "phase": self.phase.name, "tokens": at.tokens}
        row |= zip(self.sums, means, strict=True)
        if not math.isfinite(row["loss"]):
            raise InputError(
                f"training needs a finite loss, got {row['loss']} at step {at.step}; lower "
                "learning_rate"
            )
        row["tokens_per_second"] = self.tokens / (time.perf_counter() - self.since)
        rates = self.phase.rates(at.step - 1)
        row["learning_rate"] = rates["head"]
        if self.phase.settings.first_batch_share < 1:
            row["batch_size"] = self.phase.batch_size_at(at.step - 1)
        if self.phase.settings.joint:
            row["learning_rate/base"] = rates["base"]
            row["head_weight"] = self.phase.head_weight(at.step - 1)
        if held_out:
            row |= held_out()
            self.held_out = f"  held out {row['validation/loss']:.3f}"
        if self.tracker is not None:
            self.tracker.log(row)
        accepted = [f"{row[name]:.2f}" for name in row if name.startswith("accept/")]
        numbers = f"loss {row['loss']:.3f}  accept {' '.join(accepted)}"
        speed = f"{row['tokens_per_second']:,.0f} tokens/s"
        self.display.update(self.task, numbers=f"{numbers}{self.held_out}  {speed}")

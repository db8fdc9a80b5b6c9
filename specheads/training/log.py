"""What training tells while it runs: rows of metrics, and numbers beside the bar."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor

from specheads.core.errors import InputError
from specheads.runs.trackers import Tracker
from specheads.training.meter import Meter
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
        """Tell of one more step: its figures, which are summed over processes, and its tokens.

        `held_out` measures on held-out text, in steps after which that is done: they get a row.
        """
        for name, value in values.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        self.steps += 1
        self.meter.step(tokens)
        if held_out or self.at.step % self.every == 0 or self.at.step == self.phase.end:
            self._write(held_out)
            self._clear()
        self.display.update(self.task, completed=self.at.step - self.phase.first)

    def tell(self, line: str) -> None:
        """Tell people something, on the main process."""
        if self.tracker is not None:
            self.display.console.print(line, markup=False, soft_wrap=True)

    def _clear(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.steps = 0
        self.meter.go_on()

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
        row |= self.meter.row()
        rates = self.phase.rates(at.step - 1)
        row["learning_rate"] = rates["head"]
        if self.phase.settings.first_batch_share < 1:
            row["batch_size"] = self.phase.batch_size_at(at.step - 1)
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
    """Return what is shown beside the bar of a measurement on held-out text."""
    shown = {"loss": "held out", "tokens_per_forward": "tokens/forward"}
    figures = {name: measured.get(f"validation/{name}") for name in shown}
    return "".join(
        f"  {shown[name]} {value:.3f}" for name, value in figures.items() if value is not None
    )

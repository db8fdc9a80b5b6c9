"""What training tells while it runs: rows of metrics, and numbers beside the bar."""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor

from specheads.runs.trackers import Tracker
from specheads.training.losses.depth_loss import DepthLoss
from specheads.training.phase import PlacedPhase, Progressed


def figures(loss: DepthLoss) -> dict[str, Tensor]:
    """Return what is logged of a head's loss, under the names of metrics.jsonl."""
    by_depth, agreement = loss.by_depth.unbind(), loss.agreement.unbind()
    return (
        {"loss": loss.total.detach()}
        | {f"loss/depth_{level}": value for level, value in enumerate(by_depth)}
        | {f"accept/depth_{level}": value for level, value in enumerate(agreement)}
    )


class Meter:
    """Sums up what happened since the last row, on the device, read once a row."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.steps, self.tokens, self.since = 0, 0, time.perf_counter()

    def add(self, values: Mapping[str, Tensor], tokens: int) -> None:
        """Count a step: its figures, and the tokens that all processes read."""
        for name, value in values.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        self.steps += 1
        self.tokens += tokens

    def take(self, over_processes: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Return means since the last call, and begin again.

        Args:
            over_processes: Gives the mean of a tensor over all processes.
        """
        means = over_processes(torch.stack(list(self.sums.values())) / self.steps).tolist()
        now = time.perf_counter()
        row = dict(zip(self.sums, means, strict=True))
        row["tokens_per_second"] = self.tokens / (now - self.since)
        self.sums = {}
        self.steps, self.tokens, self.since = 0, 0, now
        return row


class PhaseLog:
    """Tells of one phase: a row every few steps, and its line of the display.

    Args:
        phase: Phase that is told of.
        step: Step of the run it goes on from.
        tracker: Where rows of metrics go, if anywhere.
        display: Where progress is shown.
        mean: Gives the mean of a tensor over all processes.
        every: Steps between two rows.
    """

    def __init__(
        self,
        phase: PlacedPhase,
        step: int,
        tracker: Tracker | None,
        display: Progress,
        mean: Callable[[Tensor], Tensor],
        every: int,
    ) -> None:
        self.phase, self.tracker, self.display = phase, tracker, display
        self.mean, self.every, self.meter = mean, every, Meter()
        self.task = display.add_task(
            phase.name, total=phase.settings.steps, completed=step - phase.first, numbers=""
        )

    def step(self, at: Progressed, values: Mapping[str, Tensor], tokens: int) -> None:
        """Tell of one more step.

        Args:
            at: Where training stands after the step.
            values: Figures of the step.
            tokens: Tokens that all processes read in it.

        Raises:
            ValueError: The loss is no longer finite.
        """
        self.meter.add(values, tokens)
        if at.step % self.every == 0 or at.step == self.phase.end:
            self._row(at)
        self.display.update(self.task, completed=at.step - self.phase.first)

    def _row(self, at: Progressed) -> None:
        """Write what happened since the last row, and show it."""
        row: dict[str, Any] = {"step": at.step, "phase": self.phase.name, "tokens": at.tokens}
        row |= self.meter.take(self.mean)
        rates = self.phase.rates(at.step - 1)
        row["learning_rate"] = rates["head"]
        if self.phase.settings.joint:
            row["learning_rate/base"] = rates["base"]
        refuse_divergence(row)
        if self.tracker is not None:
            self.tracker.log(row)
        self.display.update(self.task, numbers=describe(row))


def refuse_divergence(row: Mapping[str, Any]) -> None:
    """Stop training whose loss is no number any more.

    Raises:
        ValueError: Says at which step.
    """
    if not math.isfinite(row["loss"]):
        raise ValueError(
            f"training needs a finite loss, got {row['loss']} at step {row['step']}; lower "
            "learning_rate"
        )


def describe(row: Mapping[str, Any]) -> str:
    """Return what stands beside the bar."""
    accepted = (value for name, value in row.items() if name.startswith("accept/"))
    return (
        f"loss {row['loss']:.3f}  accept {' '.join(f'{value:.2f}' for value in accepted)}  "
        f"{row['tokens_per_second']:,.0f} tokens/s"
    )

"""What training shows while it runs: sums since the last row, and a bar."""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from specheads.training.losses.depth_loss import DepthLoss


def progress_bar(*, shown: bool) -> Progress:
    """Return a bar with a field `numbers`; on all processes but the main one it is not shown."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[numbers]}"),
        disable=not shown,
    )


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

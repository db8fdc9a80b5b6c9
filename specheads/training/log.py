"""Metrics of training: rows of metrics.jsonl, the progress bar, and validation.

Validation measures loss and score on held-out text, and keeps the best head. See docs/train.md.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor

from specheads.base.model import FrozenBase
from specheads.core.files import read_json
from specheads.core.machine import peak_gib
from specheads.data.packing import TokenBatch
from specheads.heads.load import copy_for_drafting
from specheads.measure.generation import GenerationSettings, decode_prompts
from specheads.runs.directory import RunDirectory
from specheads.runs.trackers import Tracker
from specheads.training.depth_loss import DepthLoss
from specheads.training.objective import draft_labels, draw_labels, sum_counts
from specheads.training.schedule import ScheduledPhase, TrainState
from specheads.training.step import DivergedError, StepRunner, Teacher

SCORE = "validation/tokens_per_forward"


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
        self.ledger = self.teacher.source.ledger()
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
        before, now = self.ledger, self.teacher.source.ledger()
        if before and now:
            waited_seconds = now.waited_seconds - before.waited_seconds
            row["features_wait_share"] = min(waited_seconds / seconds, 1.0)
            row["features_read_share"] = (now.read_seconds - before.read_seconds) / seconds
            read_gb = (now.read_bytes - before.read_bytes) / 1e9
            row["features_gb_per_second"] = read_gb / seconds
            row["features_pool_gb"] = now.pool_bytes / 1e9
        row["peak_gib"] = peak_gib(self.teacher.base.device)
        if self.full_speed_seconds:
            row["mfu"] = self.full_speed_seconds * self.num_steps / seconds
        row["learning_rate"] = rates["head"]
        if phase.settings.joint:
            row["learning_rate/base"] = rates["base"]
            row["head_weight"] = phase.head_weight(state.step - 1)
        if validate:
            row |= validate()
            names = ("validation/loss", SCORE)
            numbers = [f"  {name} {row[name]:.3f}" for name in names if name in row]
            self.validation_numbers = "".join(numbers)
        if self.tracker is not None:
            self.tracker.log(row)
        acceptance = " ".join(f"{row[name]:.2f}" for name in row if name.startswith("accept/"))
        numbers = f"loss {row['loss']:.3f}  accept {acceptance}{self.validation_numbers}"
        speed = f"{row['tokens_per_second']:,.0f} tokens/s"
        self.display.update(self.task, numbers=f"{numbers}  {speed}")


# --- validation ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ValidationSet:
    """Text for validation."""

    batches: list[TokenBatch] | None
    """This process's share of the rows. None: no loss is measured."""
    every: int
    """Steps between two validations. Zero validates at the end of each phase only."""
    prompts: list[list[int]] | None = None
    """This process's share of the prompts to decode. None: no decoding."""
    new_tokens: int = 64
    """Tokens decoded per prompt."""
    identity: str = ""
    """Identifies the prompts of all processes and `new_tokens`."""


@torch.no_grad()
def validate(
    validation_set: ValidationSet,
    teacher: Teacher,
    objective: Callable[..., DepthLoss],
    phase: ScheduledPhase,
    total: Callable[[Tensor], Tensor],
    step: int = 0,
) -> dict[str, float]:
    """Return the phase's loss and the agreement of each depth, under the names of metrics.jsonl.

    All labels count with the same weight, independent of batch and process. Validation draws no
    random numbers, so it does not change training. `total` sums over processes; every process calls
    it exactly twice. After `step` steps it raises if a loss is not finite.
    """
    head, device = teacher.head, teacher.base.device
    depth, precision = head.depth, torch.promote_types(teacher.base.dtype, torch.float32)
    batches = [batch.to(device) for batch in validation_set.batches or []]
    labels = [
        draft_labels(head, batch, draw_labels(batch, head, phase.settings)) for batch in batches
    ]
    pairs = list(zip(batches, labels, strict=True))
    counts = sum_counts([label.count(batch) for batch, label in pairs], total, depth, device)
    sums = torch.zeros(2 * depth + 2, dtype=precision, device=device)
    for batch, label in pairs:
        features = teacher.source.features(batch)
        loss = objective(features, batch, label, teacher.project, phase.settings, counts)
        by_base = ~features.is_finite()[None]
        sums += torch.cat([loss.total[None], loss.by_depth, loss.agreement, by_base])
    has_labels = counts.labelled > 0
    has_values = torch.cat([has_labels[:1], has_labels, has_labels])
    sums = total(sums)
    values, num_faults = sums[:-1], sums[-1].item()
    if not values[has_values].isfinite().all():
        dtype, by_base = teacher.base.dtype, num_faults > 0 and phase.settings.joint is None
        raise DivergedError(step, phase, dtype, by_base=by_base, metric="validation loss")
    values = values.where(has_values, math.nan).tolist()
    metrics = [f"{metric}/depth_{level}" for metric in ("loss", "accept") for level in range(depth)]
    return dict(zip([f"validation/{name}" for name in ("loss", *metrics)], values, strict=True))


class Validator:
    """Validates, and saves the head with the most tokens per forward of the run.

    Sums are over processes, so all processes take the same decision.
    """

    def __init__(
        self,
        validation_set: ValidationSet,
        runner: StepRunner,
        run: RunDirectory,
        state: TrainState,
    ) -> None:
        self.validation_set, self.run, self.state = validation_set, run, state
        self.runner, self.teacher = runner, runner.teacher
        # DDP's wrapper synchronises at each batch, and processes may have different numbers of them
        self.objective = runner.accelerator.unwrap_model(runner.objective)
        self.best_score = 0.0
        if run.best_score.is_file():
            # its step may be later than the checkpoint's: a resumed run repeats those steps exactly
            saved = read_json(run.best_score)
            score = saved.get("tokens_per_forward")
            # scores on other prompts are not comparable
            if saved.get("prompts") == validation_set.identity and isinstance(score, float):
                self.best_score = score

    def is_due(self, phase: ScheduledPhase, step: int) -> bool:
        """Return whether a validation follows this step."""
        every = self.validation_set.every
        return step == phase.end or bool(every and step % every == 0)

    def validate(self, phase: ScheduledPhase) -> dict[str, float]:
        """Validate after the last step; save the head if it is the best one."""
        rows, state, teacher = self.validation_set, self.state, self.teacher
        metrics: dict[str, float] = {}
        score: float | None = None
        # without dropout and gradients of the adapter
        teacher.begin()
        if rows.batches is not None:
            metrics = validate(rows, teacher, self.objective, phase, self.runner.total, state.step)
        if rows.prompts is not None:
            score = tokens_per_forward(rows.prompts, rows.new_tokens, teacher, self.runner.total)
        teacher.begin(phase)
        if score is None:
            return metrics
        if score > self.best_score:
            self.best_score = score
            if self.runner.accelerator.is_main_process:
                content = {
                    "step": state.step,
                    "phase": phase.name,
                    "tokens": state.tokens,
                    "tokens_per_forward": score,
                    "prompts": rows.identity,
                }
                joint = teacher.joint
                self.run.keep_best(teacher.head, joint and joint.adapter, content)
        return metrics | {SCORE: score}


def tokens_per_forward(
    prompts: list[list[int]], new_tokens: int, teacher: Teacher, total: Callable[[Tensor], Tensor]
) -> float | None:
    """Return the tokens per forward of greedy decoding with a chain; None without a forward.

    The base decodes with the current adapter; the drafter is a copy of the head. `prompts` is this
    process's share. `total` sums over processes; every process calls it exactly once.
    """
    base = teacher.base
    assert isinstance(base, FrozenBase)
    drafter = copy_for_drafting(teacher.head, base)
    settings = GenerationSettings(max_new_tokens=new_tokens, batch_size=max(1, len(prompts)))
    counts = [text.counts for text in decode_prompts(base, drafter, prompts, settings)]
    sums = [sum(count.new_tokens for count in counts), sum(count.forwards for count in counts)]
    tokens, forwards = total(torch.tensor(sums, device=base.device)).tolist()
    return tokens / forwards if forwards else None

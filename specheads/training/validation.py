"""Validation during training: loss and score on held-out text, and the best head.

See docs/train.md.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specheads.base.model import FrozenBase
from specheads.core.files import read_json
from specheads.data.packing import TokenBatch
from specheads.heads.load import copy_for_drafting
from specheads.measure.generation import GenerationSettings, decode_prompts
from specheads.runs.directory import RunDirectory
from specheads.training.depth_loss import DepthLoss
from specheads.training.divergence import divergence
from specheads.training.objective import draft_labels, draw_labels, sum_counts
from specheads.training.schedule import ScheduledPhase, TrainState
from specheads.training.step import StepRunner, Teacher

SCORE = "validation/tokens_per_forward"


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
        raise divergence(step, phase, dtype, by_base=by_base, metric="validation loss")
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
        self.teacher, self.total = runner.teacher, runner.total
        self.is_main = runner.accelerator.is_main_process
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
            metrics = validate(rows, teacher, self.objective, phase, self.total, state.step)
        if rows.prompts is not None:
            score = tokens_per_forward(rows.prompts, rows.new_tokens, teacher, self.total)
        teacher.begin(phase)
        if score is None:
            return metrics
        if score > self.best_score:
            self.best_score = score
            if self.is_main:
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

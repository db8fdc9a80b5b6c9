"""Validation during training: loss and score on held-out text, and the best head.

See docs/train.md.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specheads.config.training import Phase
from specheads.core.files import read_json
from specheads.data.packing import TokenBatch
from specheads.heads.load import copy_for_drafting
from specheads.measure.generation import GenerationSettings, decode_prompts
from specheads.runs.directory import RunDirectory
from specheads.training.depth_loss import DepthLoss
from specheads.training.objective import drawn_labels, label_counts
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
    held_out: ValidationSet,
    teacher: Teacher,
    objective: Callable[..., DepthLoss],
    phase: Phase,
    total: Callable[[Tensor], Tensor],
) -> dict[str, float]:
    """Return the phase's loss and the agreement of each depth, under the names of metrics.jsonl.

    All labels count with the same weight, independent of batch and process. Validation draws no
    random numbers, so it does not change training. `total` sums over processes; every process calls
    it exactly twice.
    """
    head, device = teacher.head, teacher.base.device
    depth, rows = head.depth, []
    counts = torch.zeros(2 * depth + 1, dtype=torch.long, device=device)
    for batch in held_out.batches or []:
        batch = batch.to(device)
        loss_mask = drawn_labels(batch, head, phase)
        counts += label_counts(head, batch, loss_mask, phase)
        rows.append((batch, loss_mask))
    precision = torch.promote_types(teacher.base.dtype, torch.float32)
    counts, sums = total(counts), torch.zeros(2 * depth + 1, dtype=precision, device=device)
    for batch, loss_mask in rows:
        seen = teacher.source.features(batch), batch, loss_mask
        loss = objective(*seen, teacher.logits_of, phase, counts)
        sums += torch.cat([loss.total[None], loss.by_depth, loss.agreement])
    labels = counts[depth:-1] > 0
    values = total(sums).where(torch.cat([labels[:1], labels, labels]), math.nan).tolist()
    names = [f"{what}/depth_{level}" for what in ("loss", "accept") for level in range(depth)]
    return dict(zip([f"validation/{name}" for name in ("loss", *names)], values, strict=True))


class Validator:
    """Validates, and saves the head with the most tokens per forward of the run.

    Sums are over processes, so all processes take the same decision.
    """

    def __init__(
        self, held_out: ValidationSet, stepper: StepRunner, run: RunDirectory, at: TrainState
    ) -> None:
        self.held_out, self.run, self.at = held_out, run, at
        self.teacher, self.total = stepper.teacher, stepper.total
        self.is_main = stepper.accelerator.is_main_process
        # DDP's wrapper synchronises at each batch, and processes may have different numbers of them
        self.objective = stepper.accelerator.unwrap_model(stepper.objective)
        self.best = 0.0
        if run.best_score.is_file():
            # its step may be later than the checkpoint's: a resumed run repeats those steps exactly
            saved = read_json(run.best_score)
            score = saved.get("tokens_per_forward")
            # scores on other prompts are not comparable
            if saved.get("prompts") == held_out.identity and isinstance(score, float):
                self.best = score

    def is_due(self, phase: ScheduledPhase, step: int) -> bool:
        """Return whether a validation follows this step."""
        every = self.held_out.every
        return step == phase.end or bool(every and step % every == 0)

    def measure(self, phase: ScheduledPhase) -> dict[str, float]:
        """Validate after the last step; save the head if it is the best one."""
        held_out, at, values, score = self.held_out, self.at, {}, None
        # without dropout and gradients of the adapter
        self.teacher.begin()
        if held_out.batches is not None:
            values = validate(held_out, self.teacher, self.objective, phase.settings, self.total)
        if (prompts := held_out.prompts) is not None:
            score = tokens_per_forward(prompts, held_out.new_tokens, self.teacher, self.total)
        self.teacher.begin(phase)
        if score is None:
            return values
        if score > self.best:
            self.best = score
            if self.is_main:
                about = {
                    "step": at.step,
                    "phase": phase.name,
                    "tokens": at.tokens,
                    "tokens_per_forward": score,
                    "prompts": held_out.identity,
                }
                self.run.keep_best(self.teacher.head, self.teacher.adapter, about)
        return values | {SCORE: score}


def tokens_per_forward(
    prompts: list[list[int]], new_tokens: int, teacher: Teacher, total: Callable[[Tensor], Tensor]
) -> float | None:
    """Return the tokens per forward of greedy decoding with a chain; None without a forward.

    The base decodes with the current adapter; the drafter is a copy of the head. `prompts` is this
    process's share. `total` sums over processes; every process calls it exactly once.
    """
    drafter = copy_for_drafting(teacher.head, teacher.base)
    how = GenerationSettings(max_new_tokens=new_tokens, batch_size=max(1, len(prompts)))
    counts = [one.counts for one in decode_prompts(teacher.base, drafter, prompts, how)]
    sums = [sum(one.new_tokens for one in counts), sum(one.forwards for one in counts)]
    tokens, forwards = total(torch.tensor(sums, device=teacher.base.device)).tolist()
    return tokens / forwards if forwards else None

"""Validation during training: loss and score on held-out text, the best head, early stopping.

See docs/train.md.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from specheads.core.files import read_json
from specheads.data.packing import TokenBatch
from specheads.heads.load import drafter_of
from specheads.measure.generation import GenerationSettings, decode_prompts
from specheads.runs.directory import RunDirectory
from specheads.training.depth_loss import DepthLoss
from specheads.training.objective import label_counts
from specheads.training.schedule import PlacedPhase, Progressed
from specheads.training.teacher import Teacher


@dataclass(frozen=True, slots=True)
class HeldOut:
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
    patience: int = 0
    """Validations without a higher score after which a phase ends. Zero: never."""

    def due(self, step: int, phase: PlacedPhase) -> bool:
        """Return whether to validate after this step."""
        return step == phase.end or bool(self.every and step % self.every == 0)


@torch.no_grad()
def validate(
    held_out: HeldOut,
    teacher: Teacher,
    objective: Callable[..., DepthLoss],
    phase: PlacedPhase,
    total: Callable[[Tensor], Tensor],
) -> dict[str, float]:
    """Return the phase's loss and the agreement of each depth, under the names of metrics.jsonl.

    All labels count with the same weight, independent of batch and process. Validation draws no
    random numbers, so it does not change training. `total` sums over processes; every process calls
    it exactly twice.
    """
    depth, settings, device = teacher.head.depth, phase.settings, teacher.base.device
    batches = [batch.to(device) for batch in held_out.batches or []]
    masks = [phase.loss_mask(batch, teacher.head) for batch in batches]
    counts = torch.zeros(depth + 2, dtype=torch.long, device=device)
    for batch, loss_mask in zip(batches, masks, strict=True):
        counts += label_counts(teacher.head, batch.tokens, batch.document_ids, loss_mask, settings)
    precision = torch.promote_types(teacher.base.dtype, torch.float32)
    counts, sums = total(counts), torch.zeros(2 * depth + 1, dtype=precision, device=device)
    with teacher.at_rest() as frozen:
        for batch, loss_mask in zip(batches, masks, strict=True):
            seen = frozen.read(batch), batch.tokens, loss_mask
            loss = objective(*seen, frozen.logits_of, settings, counts)
            sums += torch.cat([loss.total[None], loss.by_depth, loss.agreement])
    values = total(sums).where(counts[depth] > 0, math.nan).tolist()
    names = [f"{what}/depth_{level}" for what in ("loss", "accept") for level in range(depth)]
    return dict(zip([f"validation/{name}" for name in ("loss", *names)], values, strict=True))


SCORE = "validation/tokens_per_forward"


class Watch:
    """Validates, saves the best head, and ends a phase whose score no longer rises.

    Sums are over processes, so all processes take the same decision. The highest score of the phase
    is part of `at` and of checkpoints; the highest score of the run is saved with the best head.
    """

    def __init__(
        self,
        held_out: HeldOut | None,
        teacher: Teacher,
        objective: Callable[..., DepthLoss],
        run: RunDirectory,
        at: Progressed,
        total: Callable[[Tensor], Tensor],
        is_main: bool,
    ) -> None:
        self.held_out, self.teacher, self.objective = held_out, teacher, objective
        self.run, self.at, self.total, self.is_main = run, at, total, is_main
        if held_out is not None and at.scored_on != held_out.identity:
            # scores on other prompts are not comparable
            at.scored_on, at.highest, at.unrisen = held_out.identity, 0.0, 0
        self.best = self._best()

    def due(self, phase: PlacedPhase) -> Callable[[], dict[str, float]] | None:
        """Return the validation to run after this step, or None."""
        if self.held_out is None or not self.held_out.due(self.at.step, phase):
            return None
        return partial(self._measure, self.held_out, phase)

    def ends(self, phase: PlacedPhase) -> str:
        """Return the reason to end the phase early, or an empty string."""
        patience = self.held_out.patience if self.held_out else 0
        if not patience or self.at.unrisen < patience or self.at.step == phase.end:
            return ""
        return (
            f"phase {phase.name!r} ends after {self.at.step - phase.first} of "
            f"{phase.settings.steps} steps: tokens per forward did not rise above "
            f"{self.at.highest:.3f} in {patience} validation{'s' if patience > 1 else ''}"
        )

    def _measure(self, held_out: HeldOut, phase: PlacedPhase) -> dict[str, float]:
        values: dict[str, float] = {}
        if held_out.batches is not None:
            values = validate(held_out, self.teacher, self.objective, phase, self.total)
        if held_out.prompts is None:
            return values
        score = tokens_per_forward(held_out.prompts, held_out.new_tokens, self.teacher, self.total)
        if score is None:
            return values
        if score > self.at.highest:
            self.at.highest, self.at.unrisen = score, 0
        else:
            self.at.unrisen += 1
        if score > self.best:
            self.best = score
            self._keep(held_out, phase)
        return values | {SCORE: score}

    def _keep(self, held_out: HeldOut, phase: PlacedPhase) -> None:
        if not self.is_main:
            return
        score = {
            "step": self.at.step,
            "phase": phase.name,
            "tokens": self.at.tokens,
            "tokens_per_forward": self.best,
            "prompts": held_out.identity,
        }
        self.run.keep_best(self.teacher.head, self.teacher.adapter, score)

    def _best(self) -> float:
        """Return the score of the saved best head; zero without one for these prompts.

        Its step may be later than the checkpoint's: a resumed run repeats those steps exactly.
        """
        if self.held_out is None or not self.run.best_score.is_file():
            return 0.0
        saved = read_json(self.run.best_score)
        score = saved.get("tokens_per_forward")
        same = saved.get("prompts") == self.held_out.identity
        return score if same and isinstance(score, float) else 0.0


def tokens_per_forward(
    prompts: list[list[int]], new_tokens: int, teacher: Teacher, total: Callable[[Tensor], Tensor]
) -> float | None:
    """Return the tokens per forward of greedy decoding with a chain; None without a forward.

    The base decodes with the current adapter; the drafter is a copy of the head. `prompts` is this
    process's share. `total` sums over processes; every process calls it exactly once.
    """
    with teacher.at_rest():
        drafter = drafter_of(teacher.head, teacher.base)
        how = GenerationSettings(max_new_tokens=new_tokens, batch_size=max(1, len(prompts)))
        counts = [one.counts for one in decode_prompts(teacher.base, drafter, prompts, how)]
    sums = [sum(one.new_tokens for one in counts), sum(one.forwards for one in counts)]
    tokens, forwards = total(torch.tensor(sums, device=teacher.base.device)).tolist()
    return tokens / forwards if forwards else None

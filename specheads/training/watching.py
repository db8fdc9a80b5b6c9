"""Watching a head while it is trained: what it scores, the best one, and when a phase may end.

See docs/train.md.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from specheads.core.files import read_json
from specheads.heads.load import drafter_of
from specheads.measure.generation import GenerationSettings, decode_prompts
from specheads.runs.directory import RunDirectory
from specheads.training.losses.depth_loss import DepthLoss
from specheads.training.schedule import PlacedPhase, Progressed
from specheads.training.teacher import Teacher
from specheads.training.validation import HeldOut, validate

SCORE = "validation/tokens_per_forward"


class Watch:
    """Measures now and then, keeps the best head, and ends a phase that no longer gets better.

    Sums are over processes, so all of them see the same and decide alike. The highest score of the
    phase is part of `at`, and with it of checkpoints; that of the run stands beside its best head.
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
            # scores on other prompts say nothing about these
            at.scored_on, at.highest, at.unrisen = held_out.identity, 0.0, 0
        self.best = self._best()

    def due(self, phase: PlacedPhase) -> Callable[[], dict[str, float]] | None:
        """Return what measures on held-out text, where it is time for that."""
        if self.held_out is None or not self.held_out.due(self.at.step, phase):
            return None
        return partial(self._measure, self.held_out, phase)

    def ends(self, phase: PlacedPhase) -> str:
        """Return why a phase ends before its last step; empty where it goes on."""
        patience = self.held_out.patience if self.held_out else 0
        if not patience or self.at.unrisen < patience or self.at.step == phase.end:
            return ""
        return (
            f"phase {phase.name!r} ends after {self.at.step - phase.first} of "
            f"{phase.settings.steps} steps: in {patience} measurement{'s' if patience > 1 else ''} "
            f"tokens per forward did not rise above {self.at.highest:.3f}"
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
        told = {
            "step": self.at.step,
            "phase": phase.name,
            "tokens": self.at.tokens,
            "tokens_per_forward": self.best,
            "prompts": held_out.identity,
        }
        self.run.keep_best(self.teacher.head, self.teacher.adapter, told)

    def _best(self) -> float:
        """Return the score of the best head that is kept, zero where none of these prompts is.

        It may be of a later step than the checkpoint: training comes there again, and to the same.
        """
        if self.held_out is None or not self.run.best_score.is_file():
            return 0.0
        told = read_json(self.run.best_score)
        score = told.get("tokens_per_forward")
        same = told.get("prompts") == self.held_out.identity
        return score if same and isinstance(score, float) else 0.0


def tokens_per_forward(
    prompts: list[list[int]], new_tokens: int, teacher: Teacher, total: Callable[[Tensor], Tensor]
) -> float | None:
    """Return what a chain of the head as it is now gives, decoded greedily; None without a forward.

    The base decodes as it is now too, adapter and all. The head that is trained is only copied.
    Prompts are this process's share: `total` sums over processes, and each calls it once.
    """
    with teacher.at_rest():
        drafter = drafter_of(teacher.head, teacher.base)
        how = GenerationSettings(max_new_tokens=new_tokens, batch_size=max(1, len(prompts)))
        counts = [one.counts for one in decode_prompts(teacher.base, drafter, prompts, how)]
    sums = [sum(one.new_tokens for one in counts), sum(one.forwards for one in counts)]
    tokens, forwards = total(torch.tensor(sums, device=teacher.base.device)).tolist()
    return tokens / forwards if forwards else None

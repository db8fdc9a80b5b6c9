"""How a head does on text it is not trained on, while it is trained."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specheads.data.packing import TokenBatch
from specheads.training.losses.depth_loss import DepthLoss
from specheads.training.objective import label_counts
from specheads.training.schedule import PlacedPhase
from specheads.training.teacher import Teacher


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Text that is measured on."""

    batches: list[TokenBatch] | None
    """This process's share of it. None: no loss is measured."""
    every: int
    """Steps between two measurements. Zero measures at the end of each phase only."""
    prompts: list[list[int]] | None = None
    """This process's share of the texts that are continued. None: none are."""
    new_tokens: int = 64
    """Tokens decoded after each."""
    identity: str = ""
    """Which prompts they are, of all processes, and how long they are continued."""
    patience: int = 0
    """Measurements without a higher score after which a phase ends. Zero: never."""

    def due(self, step: int, phase: PlacedPhase) -> bool:
        """Return whether it is time to measure, after so many steps."""
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

    All labels that could be drafted are scored, and weigh alike whatever batch and process they
    are in. Nothing is drawn, so that training goes on as if nothing had been measured. `total` sums
    over processes, and every one of them calls it twice, whatever its share.
    """
    depth, settings, device = teacher.head.depth, phase.settings, teacher.base.device
    batches = [batch.to(device) for batch in held_out.batches or []]
    scored = [phase.scored(batch, teacher.head) for batch in batches]
    counts = torch.zeros(depth + 2, dtype=torch.long, device=device)
    for batch, labels in zip(batches, scored, strict=True):
        counts += label_counts(teacher.head, batch.tokens, batch.document_ids, labels, settings)
    precision = torch.promote_types(teacher.base.dtype, torch.float32)
    counts, sums = total(counts), torch.zeros(2 * depth + 1, dtype=precision, device=device)
    with teacher.at_rest() as frozen:
        for batch, labels in zip(batches, scored, strict=True):
            seen = frozen.read(batch), batch.tokens, labels
            loss = objective(*seen, frozen.logits_of, settings, counts)
            sums += torch.cat([loss.total[None], loss.by_depth, loss.agreement])
    values = total(sums).where(counts[depth] > 0, math.nan).tolist()
    names = [f"{what}/depth_{level}" for what in ("loss", "accept") for level in range(depth)]
    return dict(zip([f"validation/{name}" for name in ("loss", *names)], values, strict=True))

"""How a head does on text it is not trained on, while it is trained."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specheads.data.packing import TokenBatch
from specheads.training.losses.depth_loss import DepthLoss
from specheads.training.objective import early_enough
from specheads.training.schedule import PlacedPhase
from specheads.training.teacher import Teacher


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Text that is measured on."""

    batches: list[TokenBatch]
    """This process's share of it."""
    every: int
    """Steps between two measurements. Zero measures at the end of each phase only."""

    def due(self, step: int, phase: PlacedPhase) -> bool:
        """Return whether it is time to measure, after so many steps."""
        return step == phase.end or bool(self.every and step % self.every == 0)


@torch.no_grad()
def validate(
    held_out: HeldOut,
    teacher: Teacher,
    objective: Callable[..., DepthLoss],
    phase: PlacedPhase,
    mean: Callable[[Tensor], Tensor],
) -> dict[str, float]:
    """Return the phase's loss and the agreement of each depth, under the names of metrics.jsonl.

    All labels that could be drafted are scored, and weigh alike whatever batch and process they
    are in. Nothing is drawn, so that training goes on as if nothing had been measured. `mean` is
    over processes, and every one of them calls it once.
    """
    depth, device = teacher.head.depth, teacher.base.device
    sums = torch.zeros(2 * depth + 2, device=device)
    with teacher.at_rest() as frozen:
        for batch in (one.to(device) for one in held_out.batches):
            features = frozen.read(batch)
            scored = early_enough(phase.scored(batch, depth), features, depth)
            loss = objective(features, batch.tokens, scored, frozen.logits_of, phase.settings)
            one = scored.sum()[None].to(sums)
            values = torch.cat([loss.total[None], loss.by_depth, loss.agreement]).to(sums)
            sums += torch.cat([values * one, one])
    *found, labels = mean(sums).tolist()
    values = [value / labels if labels else math.nan for value in found]
    names = [f"{what}/depth_{level}" for what in ("loss", "accept") for level in range(depth)]
    return dict(zip([f"validation/{name}" for name in ("loss", *names)], values, strict=True))

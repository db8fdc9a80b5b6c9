"""A phase in its place: what follows from a step's number."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from specheads.config import Phase, Schedule
from specheads.training.losses.depth_loss import whole_chains
from specheads.training.schedule import learning_rate_share, peak_rates


@dataclass(slots=True)
class Progressed:
    """Where training stands; what a checkpoint's state.json holds."""

    step: int = 0
    """Optimizer steps done, over all phases."""
    tokens: int = 0
    """Tokens read by the base, over all processes."""
    cursor: dict[str, Any] | None = None
    """Place in the current phase's text."""


@dataclass(frozen=True, slots=True)
class PlacedPhase:
    """One phase of a schedule, and where it stands among the steps of the run."""

    name: str
    settings: Phase
    first: int
    """Step of the run at which it begins."""
    peaks: dict[str, float]
    """Peak learning rate of each role."""

    @property
    def end(self) -> int:
        """Step of the run at which the next phase begins."""
        return self.first + self.settings.steps

    def elapsed(self, step: int) -> float:
        """Return how much of the phase lies before a step: 0 at its first, 1 at its last."""
        return (step - self.first) / max(self.settings.steps - 1, 1)

    def rates(self, step: int) -> dict[str, float]:
        """Return the learning rate of each role at a step."""
        share = learning_rate_share(step - self.first, self.settings)
        return {role: share * peak for role, peak in self.peaks.items()}

    def scored(
        self, counted: Bool[Tensor, "batch time"], depth: int, seed: int
    ) -> Bool[Tensor, "batch time"]:
        """Return which labels the losses of one step cover, of all that the text counts."""
        if self.settings.weighting == "dpace":
            counted = whole_chains(counted, depth)
        if self.settings.scored_share == 1.0:
            return counted
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.rand(counted.shape, generator=generator)
        return counted & (drawn < self.settings.scored_share)


@dataclass(frozen=True, slots=True)
class Step:
    """What one process reads in one step."""

    phase: PlacedPhase
    number: int
    """Step of the run."""
    seed: int
    """Drawn from number and process, so that a resumed run draws the same."""
    tokens: Int[Tensor, "batch time"]
    scored: Bool[Tensor, "batch time"]
    """Labels that the losses cover."""


def placed(schedule: Schedule) -> list[PlacedPhase]:
    """Return the phases of a schedule, each in its place."""
    found: list[PlacedPhase] = []
    for name, settings in schedule.phases.items():
        first = found[-1].end if found else 0
        found.append(PlacedPhase(name, settings, first, peak_rates(settings, schedule)))
    return found

"""The line of a run that diverged: what is not finite, from which step on, and a remedy."""

import torch

from specheads.core.errors import InputError
from specheads.core.machine import dtype_name
from specheads.training.schedule import ScheduledPhase


class DivergedError(InputError):
    """A loss, a gradient or a weight is not finite."""

    def __init__(self, line: str, step: int, *, by_base: bool) -> None:
        super().__init__(line)
        self.step, self.by_base = step, by_base
        """The first step, and whether the base's hidden states are the cause."""


def divergence(
    step: int,
    phase: ScheduledPhase,
    dtype: torch.dtype,
    *,
    by_base: bool,
    metric: str = "loss and gradient",
) -> DivergedError:
    """Return the error of a run that diverged at a step, with a remedy that its resume accepts."""
    rule = f"every {metric} must be finite, and step {step + 1} has one that is not"
    if by_base:
        rule += f": hidden states of the base exceed {dtype_name(dtype)}"
        if dtype in (torch.float32, torch.float64):
            line = f"{rule}, so its weights are damaged; choose another base.model= and name="
            return DivergedError(line, step, by_base=by_base)
        line = f"{rule}; run the command again with base.dtype=float32"
    else:
        prefix = f"schedule.phases.{phase.name}"
        rates = {f"{prefix}.learning_rate": phase.settings.learning_rate}
        if phase.muon_learning_rate:
            rates["schedule.muon_learning_rate"] = phase.muon_learning_rate
        if phase.settings.joint:
            rates[f"{prefix}.joint.learning_rate"] = phase.settings.joint.learning_rate
        lower = " ".join(f"{setting}={rate / 10:g}" for setting, rate in rates.items())
        line = f"{rule}; lower learning_rate: run the command again, for example with {lower}"
    line = f"{line}, which resumes from the last good checkpoint"
    return DivergedError(line, step, by_base=by_base)

"""Phases of a schedule: their steps, learning rates, labels and checks.

See docs/train.md.
"""

import math
from dataclasses import dataclass
from typing import Any

from specheads.config.data import DataSettings
from specheads.config.training import DistillSettings, JointSettings, Phase, Schedule
from specheads.core.errors import InputError


@dataclass(slots=True)
class TrainState:
    """Training progress, stored as a checkpoint's state.json."""

    step: int = 0
    """Optimizer steps so far, over all phases."""
    tokens: int = 0
    """Tokens read by the base, over all processes."""
    cursor: dict[str, Any] | None = None
    """Position in the text of the current phase, the same on all processes."""
    seconds: float = 0.0
    """Training time without validation and without text generation."""


@dataclass(frozen=True, slots=True)
class ScheduledPhase:
    """One phase of a schedule with its first step in the run."""

    name: str
    settings: Phase
    first: int
    """First step, counted over the run."""
    muon_learning_rate: float = 0.0

    @property
    def end(self) -> int:
        """First step of the next phase, counted over the run."""
        return self.first + self.settings.steps

    def rates(self, step: int) -> dict[str, float]:
        """Return the learning rate of each role at a step: see `optimizers.roles`."""
        settings = self.settings
        base = settings.joint.learning_rate if settings.joint else 0.0
        peaks = {"head": settings.learning_rate, "hidden": self.muon_learning_rate, "base": base}
        share = learning_rate_share(step - self.first, settings)
        return {role: share * peak for role, peak in peaks.items()}

    def head_weight(self, step: int) -> float:
        """Return the weight of the head's loss relative to the base's own loss at a step.

        Source: arXiv:2401.10774, section 2.3.2, for the sine.
        """
        joint, last_step = self.settings.joint, self.settings.steps - 1
        assert joint
        elapsed = (step - self.first) / max(last_step, 1)
        return joint.head_weight * (math.sin(math.pi / 2 * elapsed) if joint.ramp == "sine" else 1)


def schedule_phases(schedule: Schedule) -> list[ScheduledPhase]:
    """Return the phases of a schedule with their first steps."""
    phases: list[ScheduledPhase] = []
    for name, settings in schedule.phases.items():
        first = phases[-1].end if phases else 0
        phases.append(ScheduledPhase(name, settings, first, schedule.muon_learning_rate))
    return phases


def learning_rate_share(step: int, phase: Phase) -> float:
    """Return the learning rate of a step as a share of the phase's peak.

    It is the minimum of a parabolic warm-up and a cosine that ends at `final_share`. Every phase
    warms up again.

    Source: Wertheimer et al. 2024, arXiv:2404.19124; fms-fsdp, speculator/train_speculator.py.
    """
    warmup = min(2000, round(phase.steps * phase.warmup_share))
    rising = 1.0 - (1.0 - min(step, warmup) / warmup) ** 2 if warmup else 1.0
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(step / phase.steps, 1.0)))
    return min(rising, phase.final_share + (1.0 - phase.final_share) * cosine)


def adapter_settings(schedule: Schedule) -> JointSettings | None:
    """Return the settings of the adapter, the same for all joint phases; None without one."""
    return next((phase.joint for phase in schedule.phases.values() if phase.joint), None)


def row_tokens(phase: Phase, data: DataSettings, context: int) -> int:
    """Return the maximum row length of a phase; a conversation may fill the context."""
    if phase.sequence_length or phase.distill is None:
        return phase.sequence_length
    chats = any(source.kind.rows == "conversations" for source in data.active_sources)
    return context if chats else text_tokens(phase.distill)


def longest_row(schedule: Schedule, data: DataSettings, context: int) -> int:
    """Return the maximum row length of all phases."""
    return max(row_tokens(phase, data, context) for phase in schedule.phases.values())


def text_tokens(distill: DistillSettings) -> int:
    """Return the maximum length of a continued text."""
    return distill.prompt_tokens + distill.new_tokens


def refuse_misfit(name: str, phase: Phase, context: int, depth: int, processes: int = 1) -> None:
    """Raise if a phase does not fit the base's context, the head's depth or the processes."""
    if phase.batch_size < processes * phase.accumulation_steps:
        raise InputError(
            f"phase {name!r} needs a sequence for each process and accumulation step, but "
            f"{processes} processes with accumulation_steps={phase.accumulation_steps} share "
            f"batch_size={phase.batch_size}; raise it, or start fewer processes"
        )
    text = text_tokens(phase.distill) if phase.distill else phase.sequence_length
    for tokens in (text, phase.sequence_length or text):
        if not depth + 2 <= tokens <= context:
            raise InputError(
                f"phase {name!r} needs sequences of {depth + 2} tokens, for the depth of the head, "
                f"to {context}, the base's context, got {tokens}; change sequence_length, or "
                "prompt_tokens and new_tokens"
            )
    if len(phase.depth_weights) not in (0, depth):
        raise InputError(
            f"phase {name!r} needs depth_weights for each of the head's {depth} depths, got "
            f"{len(phase.depth_weights)}; give one weight per depth"
        )

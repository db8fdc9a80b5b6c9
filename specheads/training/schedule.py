"""Phases of a schedule: their steps and checks, their learning rates and the optimizers.

See docs/train.md.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from specheads.config.data import DataSettings
from specheads.config.training import DistillSettings, JointSettings, Phase, Schedule
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.core.machine import computes_bfloat16

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic Newton-Schulz iteration, as in torch."""
ITERATIONS = 5
BETAS = (0.9, 0.95)
"""Betas of AdamW."""


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
        """Return the learning rate of each role at a step: see `roles`."""
        settings = self.settings
        base = settings.joint.learning_rate if settings.joint else 0.0
        peaks = {"head": settings.learning_rate, "hidden": self.muon_learning_rate, "base": base}
        share = learning_rate_share(step - self.first, settings)
        return {role: share * peak for role, peak in peaks.items()}

    def head_weight(self, step: int) -> float:
        """Return the weight of the head's loss relative to the base's own loss at a step.

        Source: arXiv:2401.10774, section 2.3.2, for the sine.
        """
        joint, progress = self.settings.joint, self.progress(step)
        assert joint
        return joint.head_weight * (math.sin(math.pi / 2 * progress) if joint.ramp == "sine" else 1)

    def progress(self, step: int) -> float:
        """Return how far a step is in this phase: zero is the first step, one is the last."""
        return (step - self.first) / max(self.settings.steps - 1, 1)


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


def refuse_misfit(
    phases: Mapping[str, Phase], context: int, depth: int, processes: int = 1
) -> None:
    """Raise if a phase does not fit the processes, the base's context or the head's depth."""
    sizes = {name: processes * phase.accumulation_steps for name, phase in phases.items()}
    if small := [name for name, phase in phases.items() if phase.batch_size < sizes[name]]:
        shares = [
            f"batch_size={phases[name].batch_size} with accumulation_steps="
            f"{phases[name].accumulation_steps} in phase {name!r}"
            for name in small
        ]
        overrides = [f"schedule.phases.{name}.batch_size={sizes[name]}" for name in small]
        raise InputError(
            "each phase needs a sequence for each process and accumulation step, but "
            f"{processes} processes share {', '.join(shares)}; add {' '.join(overrides)}, or start "
            "fewer processes"
        )
    for name, phase in phases.items():
        text = text_tokens(phase.distill) if phase.distill else phase.sequence_length
        for tokens in (text, phase.sequence_length or text):
            if not depth + 2 <= tokens <= context:
                raise InputError(
                    f"phase {name!r} needs sequences of {depth + 2} tokens, for the depth of the "
                    f"head, to {context}, the base's context, got {tokens}; change "
                    "sequence_length, or prompt_tokens and new_tokens"
                )


# --- optimizers ----------------------------------------------------------------------------------


def roles(
    head: Head, schedule: Schedule, adapter: Sequence[nn.Parameter] = ()
) -> dict[str, list[nn.Parameter]]:
    """Return the trained parameters by role, which selects their learning rate.

    Role `hidden` has the matrices without a vocabulary axis, which Muon updates.
    """
    parameters: dict[str, list[nn.Parameter]] = {"head": [], "base": list(adapter), "hidden": []}
    vocabulary_sizes = {head.vocab_size, head.drafted_size}
    for parameter in head.parameters():
        is_hidden = parameter.ndim == 2 and not vocabulary_sizes & set(parameter.shape)
        if parameter.requires_grad:
            by_muon = schedule.muon_learning_rate > 0 and is_hidden
            parameters["hidden" if by_muon else "head"].append(parameter)
    return parameters


def optimizers(
    head: Head, schedule: Schedule, adapter: Sequence[nn.Parameter] = ()
) -> list[torch.optim.Optimizer]:
    """Return AdamW for all parameters, or Muon for the hidden matrices and AdamW for the others.

    The adapter of joint phases has its own AdamW. The `role` of a group selects its learning rate.
    """
    groups = [
        {"params": parameters, "role": role}
        for role, parameters in roles(head, schedule, adapter).items()
        if parameters
    ]
    decay = schedule.weight_decay
    return [
        Muon([group], lr=1.0, weight_decay=decay)
        if group["role"] == "hidden"
        else torch.optim.AdamW([group], lr=1.0, betas=BETAS, weight_decay=decay, fused=True)
        for group in groups
    ]


class Muon(torch.optim.Muon):
    """`torch.optim.Muon`, with float32 iterations on a CPU that emulates bfloat16.

    torch always iterates in bfloat16. On a CPU with AVX2 only, a whole training step of
    recipe=tiny_code then takes twice as long (3.7 s instead of 1.9 s). On other devices this is
    `torch.optim.Muon` bit for bit.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take an optimizer step."""
        parameters = [value for group in self.param_groups for value in group["params"]]
        if computes_bfloat16() or any(value.device.type != "cpu" for value in parameters):
            return super().step(closure)
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if (gradient := parameter.grad) is None:
                    continue
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(gradient)
                momentum = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
                update = orthogonalize(gradient.lerp(momentum, group["momentum"]).float())
                rows, columns = parameter.shape
                rate = group["lr"] * max(1.0, rows / columns) ** 0.5
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update.to(parameter.dtype), alpha=-rate)
        return loss


def orthogonalize(matrix: Float[Tensor, "width aux"]) -> Float[Tensor, "width aux"]:
    """Return a matrix with the same singular vectors and singular values between 0.7 and 1.2."""
    first, second, third = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    out = matrix.T if is_tall else matrix
    out = out / out.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = out @ out.T
        update = torch.addmm(gram, gram, gram, beta=second, alpha=third)
        out = torch.addmm(out, update, out, beta=first)
    return out.T if is_tall else out

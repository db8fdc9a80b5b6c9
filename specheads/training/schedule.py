"""The shape of a schedule: learning rates, optimizers, and what a phase must be.

See docs/two_phases.md.
"""

import math
from collections.abc import Mapping, Sequence

import torch

from specheads.config import Joint, Phase, Schedule
from specheads.core.drafter import Head
from specheads.training.losses.depth_loss import KINDS, WEIGHTINGS
from specheads.training.muon import Muon

MOST_WARMUP_STEPS = 2000

JOINT_CHOICES = {"ramp": ("constant", "sine"), "target": ("text", "base")}
ADAPTER_SETTINGS = ("rank", "alpha", "dropout", "target_modules")


def learning_rate_share(step: int, phase: Phase) -> float:
    """Return the learning rate of a phase's step as a share of its peak.

    A parabolic warm-up under a cosine that ends at `final_share`: the smaller of both counts.
    Every phase warms up again.

    Source: Wertheimer et al. 2024, arXiv:2404.19124; fms-fsdp, speculator/train_speculator.py.
    """
    warmup = min(MOST_WARMUP_STEPS, round(phase.steps * phase.warmup_share))
    rising = 1.0 - (1.0 - min(step, warmup) / warmup) ** 2 if warmup else 1.0
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(step / phase.steps, 1.0)))
    return min(rising, phase.final_share + (1.0 - phase.final_share) * cosine)


def optimizers(
    head: Head, schedule: Schedule, adapter: Sequence[torch.nn.Parameter] = ()
) -> list[torch.optim.Optimizer]:
    """Return AdamW for all parameters, or Muon for the hidden matrices and AdamW for the rest.

    Hidden matrices are two-dimensional and have no vocabulary axis; orthogonalised updates
    suit them and not tables of rows per token. A group's `role` says whose learning rate it has:
    see `peak_rates`.

    Args:
        head: Trained.
        schedule: Schedule with the optimizer's settings.
        adapter: What joint phases train of the base; it has an AdamW of its own.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon.
    """
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    hidden = [
        parameter
        for parameter in trained
        if schedule.muon_learning_rate > 0
        and parameter.ndim == 2
        and not {head.vocab_size, head.drafted_size} & set(parameter.shape)
    ]
    known = {id(parameter) for parameter in hidden}
    rest = [parameter for parameter in trained if id(parameter) not in known]
    decay = schedule.weight_decay
    betas = (schedule.betas[0], schedule.betas[1])
    found: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(
            [{"params": parameters, "role": role}], lr=1.0, betas=betas, weight_decay=decay
        )
        for role, parameters in (("head", rest), ("base", list(adapter)))
        if parameters
    ]
    if hidden:
        found.append(Muon([{"params": hidden, "role": "hidden"}], lr=1.0, weight_decay=decay))
    return found


def peak_rates(phase: Phase, schedule: Schedule) -> dict[str, float]:
    """Return the peak learning rate of each role: the head, its hidden matrices, the base."""
    return {
        "head": phase.learning_rate,
        "hidden": schedule.muon_learning_rate,
        "base": phase.joint.learning_rate if phase.joint else 0.0,
    }


def adapter_settings(schedule: Schedule) -> Joint | None:
    """Return the settings of the one adapter that all joint phases train, None without any.

    Raises:
        ValueError: Two phases disagree.
    """
    joint = [phase.joint for phase in schedule.phases.values() if phase.joint]
    for setting in ADAPTER_SETTINGS:
        values = [getattr(one, setting) for one in joint]
        if any(value != values[0] for value in values):
            raise ValueError(
                f"all joint phases train one adapter: joint.{setting} must be the same in each, "
                f"got {values}"
            )
    return joint[0] if joint else None


def check_names(phases: Mapping[str, Phase]) -> None:
    """Refuse settings for phases that the schedule does not have.

    Raises:
        ValueError: Names them all, and what takes them away.
    """
    if strangers := [name for name, phase in phases.items() if not phase.text]:
        remedy = " ".join(f"~schedule.phases.{name}" for name in strangers)
        raise ValueError(
            f"the schedule has no phase {strangers[0]!r} and the recipe changes it: it was made "
            f"for another schedule; add {remedy}"
        )


def check_phase(name: str, phase: Phase, context: int, depth: int | None = None) -> None:
    """Refuse a phase that could only fail once training has begun.

    Args:
        name: Name of the phase.
        phase: Settings of the phase.
        context: Tokens the base can read.
        depth: Levels of the head; None leaves open how many weights there must be.

    Raises:
        ValueError: Names the setting, its value and what it must be.
    """
    check_names({name: phase})
    if phase.text not in ("corpus", "distilled") or (phase.text == "distilled") != bool(
        phase.distill
    ):
        raise ValueError(
            f"phase {name!r} needs text=corpus, or text=distilled with distill settings, got "
            f"text={phase.text!r}"
        )
    _check_loss(name, phase, depth)
    positive = {"steps": phase.steps, "batch_size": phase.batch_size}
    length = phase.sequence_length
    if phase.distill is not None:
        length = phase.distill.prompt_tokens + phase.distill.new_tokens
        positive |= {"num_samples": phase.distill.num_samples}
    positive |= {"sequence_length": length}
    if wrong := [setting for setting, value in positive.items() if value < 1]:
        raise ValueError(
            f"phase {name!r} needs {wrong[0]} >= 1, got {positive[wrong[0]]}; leave the phase out "
            "to skip it"
        )
    if length > context:
        raise ValueError(
            f"phase {name!r} reads {length} tokens at once, the base's context holds {context}; "
            "shorten sequence_length, or prompt_tokens and new_tokens"
        )
    if not 0 < phase.scored_share <= 1:
        raise ValueError(
            f"phase {name!r} needs scored_share above 0 and at most 1, got {phase.scored_share}"
        )
    if phase.joint is not None:
        _check_joint(name, phase.joint)


def _check_loss(name: str, phase: Phase, depth: int | None) -> None:
    for setting, choices in (("loss", KINDS), ("weighting", WEIGHTINGS)):
        if (value := getattr(phase, setting)) not in choices:
            raise ValueError(f"{setting} must be one of {', '.join(choices)}, got {value!r}")
    if (phase.depth_weights or phase.weighting == "dpace") and phase.decay != 1.0:
        raise ValueError(
            f"phase {name!r} weighs depths in two ways, by decay={phase.decay} and by "
            f"{'depth_weights' if phase.depth_weights else 'weighting=dpace'}; leave decay at 1"
        )
    if phase.depth_weights and phase.weighting == "dpace":
        raise ValueError(
            f"phase {name!r} weighs depths in two ways, by weighting=dpace and by depth_weights="
            f"{phase.depth_weights}; leave one out"
        )
    if phase.depth_weights and depth not in (None, len(phase.depth_weights)):
        raise ValueError(
            f"phase {name!r} needs one of depth_weights for each of the head's {depth} depths, got "
            f"{len(phase.depth_weights)}"
        )
    weights = [phase.decay, *phase.depth_weights]
    if min(weights) < 0 or not any(phase.depth_weights or [1.0]):
        raise ValueError(
            f"phase {name!r} needs depth weights of at least 0 and not all 0, got "
            f"decay={phase.decay} and depth_weights={phase.depth_weights}"
        )


def _check_joint(name: str, joint: Joint) -> None:
    for setting, choices in JOINT_CHOICES.items():
        if (value := getattr(joint, setting)) not in choices:
            raise ValueError(
                f"phase {name!r} needs joint.{setting} to be one of {', '.join(choices)}, got "
                f"{value!r}"
            )
    if not 0 <= joint.dropout < 1:
        raise ValueError(
            f"phase {name!r} needs joint.dropout at least 0 and below 1, got {joint.dropout}"
        )
    least = {"rank": 1, "alpha": 0, "learning_rate": 0, "head_weight": 0}
    for setting, bound in least.items():
        if (value := getattr(joint, setting)) < bound:
            raise ValueError(f"phase {name!r} needs joint.{setting} >= {bound}, got {value}")

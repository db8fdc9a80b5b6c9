"""The shape of a schedule: learning rates, optimizers, and what a phase must be.

See docs/two_phases.md.
"""

import math

import torch

from specheads import losses
from specheads.config import Phase, Schedule
from specheads.drafter import Head
from specheads.muon import Muon

MOST_WARMUP_STEPS = 2000


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


def optimizers(head: Head, schedule: Schedule) -> list[torch.optim.Optimizer]:
    """Return AdamW for all parameters, or Muon for the hidden matrices and AdamW for the rest.

    Hidden matrices are two-dimensional and have no vocabulary axis; orthogonalised updates
    suit them and not tables of rows per token.

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
    found: list[torch.optim.Optimizer] = []
    if rest:
        found.append(
            torch.optim.AdamW(
                [{"params": rest, "is_muon": False}], lr=1.0, betas=betas, weight_decay=decay
            )
        )
    if hidden:
        found.append(Muon([{"params": hidden, "is_muon": True}], lr=1.0, weight_decay=decay))
    return found


def check_phase(name: str, phase: Phase, context: int) -> None:
    """Refuse a phase that could only fail once training has begun.

    Args:
        name: Of the phase.
        phase: Its settings.
        context: Tokens the base can read.

    Raises:
        ValueError: Names the setting, its value and what it must be.
    """
    if not phase.text:
        raise ValueError(
            f"phase {name!r} has settings, but the schedule has no such phase: the recipe changes "
            f"a phase of another schedule; add ~schedule.phases.{name}"
        )
    if phase.text not in ("corpus", "distilled") or (phase.text == "distilled") != bool(
        phase.distill
    ):
        raise ValueError(
            f"phase {name!r} needs text=corpus, or text=distilled with distill settings, got "
            f"text={phase.text!r}"
        )
    if phase.loss not in losses.KINDS:
        raise ValueError(f"loss must be one of {', '.join(losses.KINDS)}, got {phase.loss!r}")
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

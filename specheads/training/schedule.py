"""The shape of a schedule: phases in their places, learning rates, optimizers, refusals.

See docs/train.md.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from specheads.config import Data, Distill, Joint, Phase, Schedule
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.core.seeds import derive_seed
from specheads.data.packing import TokenBatch
from specheads.training.losses.depth_loss import whole_chains
from specheads.training.muon import Muon
from specheads.training.objective import in_chains

MOST_WARMUP_STEPS = 2000

CONVERSATIONS = {"chat", "stdlib_instructions"}
"""Sources in which somebody asks: see docs/data.md."""


@dataclass(slots=True)
class Progressed:
    """Where training stands; what a checkpoint's state.json holds."""

    step: int = 0
    """Optimizer steps done, over all phases."""
    tokens: int = 0
    """Tokens read by the base, over all processes."""
    cursor: dict[str, Any] | None = None
    """Place in the current phase's text, the same for all processes."""
    seconds: float = 0.0
    """Time spent training, without measuring on held-out text and without what the base writes."""
    scored_on: str = ""
    """Which held-out prompts, continued how far, gave the scores."""
    highest: float = 0.0
    """Most tokens per forward in the current phase; zero before one is measured."""
    unrisen: int = 0
    """Measurements since then."""

    def end_phase(self) -> None:
        """Forget what was of one phase only."""
        self.cursor, self.highest, self.unrisen = None, 0.0, 0


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

    def batch_size_at(self, step: int) -> int:
        """Return the sequences of a step, over all processes."""
        return batch_size(step - self.first, self.settings)

    def rates(self, step: int) -> dict[str, float]:
        """Return the learning rate of each role at a step."""
        share = learning_rate_share(step - self.first, self.settings)
        return {role: share * peak for role, peak in self.peaks.items()}

    def head_weight(self, step: int) -> float:
        """Return the weight of the head's loss beside the base's own at a step."""
        assert self.settings.joint
        return head_weight(self.settings.joint, self.elapsed(step))

    def scored(
        self, batch: TokenBatch, head: Head, seed: int | None = None
    ) -> Bool[Tensor, "batch time"]:
        """Return which labels the losses of one step cover, of all that the text counts.

        What is drawn of a sample follows from the step's seed and its own number. Without a seed
        all that could be drawn are covered; of a head that learns from anchors the same ones each
        time, since what it costs grows with them.
        """
        loss_mask, share, most = batch.loss_mask, self.settings.scored_share, head.num_anchors
        if in_chains(head, self.settings):
            loss_mask = whole_chains(loss_mask, head.depth, batch.document_ids)
        if seed is None:
            share, seed = 1.0, 0
        if share == 1.0 and not 0 < most < loss_mask.shape[1]:
            return loss_mask
        seeds = [derive_seed(seed, sample) for sample in batch.samples]
        drawn = torch.stack(
            [
                torch.rand(loss_mask.shape[1], generator=torch.Generator().manual_seed(one))
                for one in seeds
            ]
        ).to(loss_mask.device)
        loss_mask = loss_mask & (drawn < share)
        if 0 < most < loss_mask.shape[1]:
            least = drawn.masked_fill(~loss_mask, 1.0).kthvalue(most, dim=1, keepdim=True).values
            loss_mask &= drawn <= least
        return loss_mask


@dataclass(frozen=True, slots=True)
class Step:
    """What one process reads at once in one step: its share, or a part of that."""

    phase: PlacedPhase
    number: int
    """Step of the run."""
    seed: int
    """Drawn from the run's seed and number."""
    batch: TokenBatch
    """On the base's device."""
    scored: Bool[Tensor, "batch time"]
    """Labels that the losses cover."""
    counts: Int[Tensor, " level"]
    """Over how many labels the means are, those of all processes and parts together: see
    `objective.label_counts`."""


def placed(schedule: Schedule) -> list[PlacedPhase]:
    """Return the phases of a schedule, each in its place."""
    found: list[PlacedPhase] = []
    for name, settings in schedule.phases.items():
        first = found[-1].end if found else 0
        found.append(PlacedPhase(name, settings, first, peak_rates(settings, schedule)))
    return found


def batch_size(step: int, phase: Phase) -> int:
    """Return the sequences of a phase's step, over all processes."""
    rising = round(phase.steps * phase.batch_ramp_share)
    first = phase.first_batch_share
    share = first + (1.0 - first) * step / rising if step < rising else 1.0
    return max(1, round(share * phase.batch_size))


def batch_sizes(phase: Phase) -> list[int]:
    """Return the sequences of a phase's first steps, of which the last one's stay."""
    rising = round(phase.steps * phase.batch_ramp_share) if phase.first_batch_share < 1.0 else 0
    return [batch_size(step, phase) for step in range(rising + 1)]


def row_tokens(phase: Phase, data: Data, context: int) -> int:
    """Return the tokens of a phase's rows, at most; a conversation may fill the context."""
    if phase.sequence_length or phase.distill is None:
        return phase.sequence_length
    sources = {one.source for one in data.sources.values() if one.weight} | {data.source}
    return context if sources & CONVERSATIONS else text_tokens(phase.distill)


def text_tokens(distill: Distill) -> int:
    """Return the tokens of a text that the base goes on with, at most."""
    return distill.prompt_tokens + distill.new_tokens


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


def roles(
    head: Head, schedule: Schedule, adapter: Sequence[torch.nn.Parameter] = ()
) -> dict[str, list[torch.nn.Parameter]]:
    """Return what is learned, by whose learning rate it has: see `peak_rates`.

    Hidden matrices are two-dimensional and have no vocabulary axis; orthogonalised updates
    suit them and not tables of rows per token.
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
    return {"head": rest, "base": list(adapter), "hidden": hidden}


def optimizers(
    head: Head, schedule: Schedule, adapter: Sequence[torch.nn.Parameter] = ()
) -> list[torch.optim.Optimizer]:
    """Return AdamW for all parameters, or Muon for the hidden matrices and AdamW for the rest.

    What joint phases train of the base, its adapter, has an AdamW of its own. A group's `role`
    says whose learning rate it has.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon.
    """
    learned = roles(head, schedule, adapter)
    hidden = learned.pop("hidden")
    decay, betas = schedule.weight_decay, (schedule.betas[0], schedule.betas[1])
    found: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(
            [{"params": parameters, "role": role}],
            lr=1.0,
            betas=betas,
            weight_decay=decay,
            fused=True,
        )
        for role, parameters in learned.items()
        if parameters
    ]
    if hidden:
        found.append(Muon([{"params": hidden, "role": "hidden"}], lr=1.0, weight_decay=decay))
    return found


def peak_rates(phase: Phase, schedule: Schedule) -> dict[str, float]:
    """Return the peak learning rate of each role: the head, its hidden matrices, the base."""
    base = phase.joint.learning_rate if phase.joint else 0.0
    return {"head": phase.learning_rate, "hidden": schedule.muon_learning_rate, "base": base}


def head_weight(joint: Joint, elapsed: float) -> float:
    """Return the weight of the head's loss beside the base's own, at this share of a phase.

    Source: arXiv:2401.10774, section 2.3.2, for the sine.
    """
    return joint.head_weight * (math.sin(math.pi / 2 * elapsed) if joint.ramp == "sine" else 1.0)


def adapter_settings(schedule: Schedule) -> Joint | None:
    """Return the settings of the one adapter that all joint phases train, None without any."""
    return next((phase.joint for phase in schedule.phases.values() if phase.joint), None)


def refuse_misfit(name: str, phase: Phase, context: int, depth: int, processes: int = 1) -> None:
    """Refuse a phase whose text does not fit the base's context, the head's levels, or us all."""
    if (first := batch_size(0, phase)) < processes * phase.accumulation_steps:
        begins = "" if first == phase.batch_size else f", which begins with {first}"
        raise InputError(
            f"phase {name!r} needs a sequence for each process and part of a step, and "
            f"{processes} processes with accumulation_steps={phase.accumulation_steps} share out "
            f"batch_size={phase.batch_size}{begins}; raise it, or start fewer processes"
        )
    text = text_tokens(phase.distill) if phase.distill else phase.sequence_length
    row = phase.sequence_length or text
    if max(text, row) > context:
        raise InputError(
            f"phase {name!r} reads {max(text, row)} tokens at once, the base's context holds "
            f"{context}; shorten sequence_length, or prompt_tokens and new_tokens"
        )
    if min(text, row) < depth + 2:
        raise InputError(
            f"phase {name!r} needs at least {depth + 2} tokens to train {depth} depths, got "
            f"{min(text, row)}; raise sequence_length, or new_tokens"
        )
    if len(phase.depth_weights) not in (0, depth):
        raise InputError(
            f"phase {name!r} needs one of depth_weights for each of the head's {depth} depths, got "
            f"{len(phase.depth_weights)}"
        )

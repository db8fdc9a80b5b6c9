"""The plan of a run: memory by part, tokens, disk, hours, and changes if it does not fit."""

import math
from dataclasses import asdict, dataclass, field

import torch
from accelerate import Accelerator

from specheads.config import Train
from specheads.core.errors import InputError
from specheads.core.machine import held_bytes
from specheads.runs.checkpoint import KEPT
from specheads.training.feature_cache import cache_bytes
from specheads.training.plan.batch import largest_step, room_of, settle_batches, unsettled
from specheads.training.plan.shapes import Parts, Shapes, Target, target_of
from specheads.training.plan.trial import Trial
from specheads.training.processes import load_base, readers, sharding_of
from specheads.training.schedule import (
    PlacedPhase,
    placed,
    refuse_misfit,
    row_tokens,
    text_tokens,
)

TOKEN_BYTES = 5
"""Bytes of a token of text: an int32 and its loss mask."""

EXTENDED = "more for all sequences, extended linearly"

LEVERS = (
    "a shorter sequence_length, or a lower scored_share",
    "base.dtype=bfloat16 (half the weights of a base in float32)",
    "base.quantization=8bit or 4bit (on CUDA)",
    "head.draft_tokens (a smaller projection: less of weights, gradients, moments and loss)",
    "a smaller base",
)
"""Changes if not even one sequence fits."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a run and its peak memory by part."""

    name: str
    memory: Parts

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.memory.values())


@dataclass(frozen=True, slots=True)
class PhasePlan:
    """Tokens and time of a phase."""

    name: str
    steps: int
    batch_size: int
    tokens: int
    hours: float | None = None
    """Hours of its steps; None if they were not timed."""
    writing_hours: float | None = None
    """Hours to generate its text, without drafts."""


@dataclass(slots=True)
class Plan:
    """Memory, disk and time of a run."""

    device: str
    processes: int
    shares: int
    """Shares of the sequences of a step; several processes may read the same share."""
    room: int | None
    """Bytes available on the device; None if this machine does not have it."""
    stages: list[Stage]
    phases: list[PhasePlan]
    disk: Parts
    """Maximum bytes on disk."""
    notes: list[str] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    """Settings to change if it does not fit."""

    @property
    def peak(self) -> Stage:
        """The stage with the highest peak."""
        return max(self.stages, key=lambda stage: stage.total)

    @property
    def fits(self) -> bool | None:
        """Whether the run fits; None if not known."""
        return None if self.room is None else self.peak.total <= self.room and not self.changes

    @property
    def hours(self) -> float | None:
        """Hours of all phases including text; None if one was not timed."""
        if any(one.hours is None for one in self.phases):
            return None
        return sum((one.hours or 0.0) + (one.writing_hours or 0.0) for one in self.phases)


def plan(settings: Train, accelerator: Accelerator) -> Plan:
    """Return the plan of a run. Nothing is written; only the base's config.json is downloaded.

    Memory and hours come from a few real steps. Without the device or the base's weights, or if the
    weights do not fit, memory is computed from shapes and there are no hours.

    Raises:
        ValueError: The settings are invalid.
    """
    libraries = held_bytes(torch.device("cpu"))
    target = target_of(settings.base, accelerator)
    shapes = Shapes(settings, target)
    room = room_of(target.device) if target.is_here else None
    notes: list[str] = []
    why = _unmeasured(target, shapes, room)
    base = None if why else load_base(asdict(settings.base), accelerator)
    if base is not None:
        settle_batches(settings, accelerator, notes.append, base)
    elif names := unsettled(settings):
        raise InputError(
            f"batch_size=auto needs real steps, but phase {names[0]!r} cannot run: {why}; set a "
            "number"
        )
    processes, phases = accelerator.num_processes, placed(settings.schedule)
    sharding = (
        base.sharding
        if base
        else sharding_of(accelerator, settings.base.device, settings.base.quantization)
    )
    shares = readers(sharding, accelerator)["world_size"]
    for one in phases:
        refuse_misfit(one.name, one.settings, shapes.base.max_length, shapes.head.depth, shares)
    disk = _disk(settings, shapes)
    found = Plan(str(target.device), processes, shares, room, [], [], disk, notes)
    if base is None:
        notes.append(f"memory is computed from shapes, and there are no hours: {why}")
        for one in phases:
            _compute(found, shapes, one)
        return found
    trial = Trial(settings, base, accelerator, libraries)
    try:
        _try(found, shapes, trial, phases)
    finally:
        trial.leave()
    return found


def _unmeasured(target: Target, shapes: Shapes, room: int | None) -> str:
    """Return the reason why no steps can run here, or an empty string."""
    weights = sum(shapes.weights().values())
    if not target.is_here:
        return f"this machine has no {target.device}"
    if not target.has_weights:
        return "the weights of the base are not on this machine"
    if room is not None and weights > room:
        return "weights and optimizer state alone do not fit"
    return ""


def _compute(found: Plan, shapes: Shapes, phase: PlacedPhase) -> None:
    """Plan a phase by shapes alone."""
    distill = phase.settings.distill
    if distill and distill.engine == "local":
        found.stages.append(Stage(f"{phase.name}: text", shapes.write(distill)))

    found.stages.append(Stage(phase.name, shapes.step(phase, _rows(phase, found))))
    found.phases.append(_phase_plan(phase, shapes))
    found.changes += _changes(found, phase, shapes)


def _try(found: Plan, shapes: Shapes, trial: Trial, phases: list[PlacedPhase]) -> None:
    """Plan all phases with real steps, with as many sequences as fit."""
    assert found.room is not None
    for phase in phases:
        distill = phase.settings.distill
        here = distill if distill and distill.engine == "local" else None
        if here:
            found.stages.append(Stage(f"{phase.name}: text", trial.write(here)))
        rows = _rows(phase, found)
        fit = largest_step(trial, shapes, phase, found.room, rows, timed=True)
        if fit is None:
            found.notes.append(
                f"phase {phase.name!r}: there was no memory for the first step that was tried; "
                "what it holds is computed from shapes"
            )
            found.stages.append(Stage(phase.name, shapes.step(phase, rows)))
            found.phases.append(_phase_plan(phase, shapes))
            found.changes += _levers(phase)
            continue
        more = fit.needed(rows) - fit.tried.total
        memory = fit.tried.memory | ({EXTENDED: more} if more else {})
        found.stages.append(Stage(phase.name, memory))
        if more:
            found.notes.append(
                f"phase {phase.name!r}: a step of {fit.rows} sequences was measured and extended "
                f"linearly to {rows}"
            )
        seconds = fit.tried.seconds * rows / fit.rows
        # last, because it leaves more memory behind than a run does
        writing = trial.writing_seconds(here) if here else 0.0
        found.phases.append(_phase_plan(phase, shapes, seconds, writing))
        found.changes += _changes(found, phase, shapes)
    if any(one.writing_hours for one in found.phases):
        found.notes.append(
            "hours of generated text are without drafts, memory is with drafts; a good head is "
            "faster"
        )


def _rows(phase: PlacedPhase, found: Plan) -> int:
    """Return the maximum sequences of one process in a step."""
    return -(-phase.settings.batch_size // found.shares)


def _phase_plan(
    phase: PlacedPhase,
    shapes: Shapes,
    seconds: float | None = None,
    writing: float | None = None,
) -> PhasePlan:
    """Return the plan of a phase from the seconds of its largest step."""
    settings = phase.settings
    sequences = settings.steps * settings.batch_size
    steps = sequences / settings.batch_size
    return PhasePlan(
        phase.name,
        settings.steps,
        settings.batch_size,
        tokens=sequences * row_tokens(settings, shapes.settings.data, shapes.base.max_length),
        hours=None if seconds is None else steps * seconds / 3600,
        writing_hours=None if writing is None else writing / 3600,
    )


def _changes(found: Plan, phase: PlacedPhase, shapes: Shapes) -> list[str]:
    """Return changes that make the last stage fit; empty if it fits or is not known."""
    rows, parts = _rows(phase, found), phase.settings.accumulation_steps
    excess = found.stages[-1].total - (found.room or 0)
    if found.room is None or excess <= 0:
        return []
    # all parts except the first run next to gradients
    too_many = math.ceil((excess + shapes.gradients) / shapes.row_bytes(phase))
    fitting = (rows - too_many) // parts
    if fitting < 1:
        return _levers(phase)
    setting = f"schedule.phases.{phase.name}"
    return [
        f"{setting}.accumulation_steps={-(-rows // fitting)} (parts of {fitting} sequences, the "
        f"same training), or {setting}.batch_size={fitting * parts * found.shares}"
    ]


def _levers(phase: PlacedPhase) -> list[str]:
    return [f"schedule.phases.{phase.name}: {lever}" for lever in LEVERS]


def _disk(settings: Train, shapes: Shapes) -> Parts:
    head, kept = shapes.saved_bytes, KEPT
    phases = settings.schedule.phases.values()
    tokens = sum(
        one.distill.num_samples * text_tokens(one.distill) for one in phases if one.distill
    )
    found = {
        f"checkpoints ({kept}, and one in progress)": (kept + 1) * (head + shapes.moments),
        "heads (after each phase, the best, and the last)": (len(phases) + 2) * head,
        "generated text, at most": tokens * TOKEN_BYTES,
    }
    if settings.feature_cache.gib:
        found["feature cache"] = cache_bytes(settings, shapes.base, len(shapes.head.aux_layers))
    return {name: size for name, size in found.items() if size}

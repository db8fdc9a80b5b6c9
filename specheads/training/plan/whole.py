"""The plan of a run: memory of each device by part, tokens, disk, hours, and what to change."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from accelerate import Accelerator

from specheads.config import Train
from specheads.core.errors import InputError
from specheads.core.machine import held_bytes
from specheads.runs.checkpoint import KEPT
from specheads.training.feature_cache import cache_bytes
from specheads.training.plan.batch import climb, largest, room_of, settle_batches, unsettled
from specheads.training.plan.place import Target, target_of
from specheads.training.plan.shapes import Parts, Shapes
from specheads.training.plan.trial import Trial
from specheads.training.processes import load_base, readers, sharding_of
from specheads.training.schedule import (
    PlacedPhase,
    batch_size,
    placed,
    refuse_misfit,
    row_tokens,
    text_tokens,
)

TOKEN_BYTES = 5
"""Of a token of text: a number of 32 bits, and whether it counts."""

EXTENDED = "more for all sequences, extended linearly"

LEVERS = (
    "a shorter sequence_length, or a lower scored_share",
    "base.dtype=bfloat16 (half the weights of a base in float32)",
    "base.quantization=8bit or 4bit (on CUDA)",
    "head.draft_tokens (a smaller projection: less of weights, gradients, moments and loss)",
    "a smaller base",
)
"""What is left where one sequence is too much."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Something a run does, and what a device holds of each part when that is the most."""

    name: str
    memory: Parts

    @property
    def total(self) -> int:
        """Bytes of all parts together."""
        return sum(self.memory.values())


@dataclass(frozen=True, slots=True)
class PhasePlan:
    """What a phase reads and takes."""

    name: str
    steps: int
    batch_size: int
    tokens: int
    hours: float | None = None
    """Of its steps; None where they were not timed."""
    writing_hours: float | None = None
    """Of the text that the base writes for it, without drafts."""


@dataclass(slots=True)
class Plan:
    """What a run will take."""

    device: str
    processes: int
    shares: int
    """Parts in which they read the sequences of a step; several may read the same ones."""
    room: int | None
    """Bytes that the device has for it; None where it is not here."""
    stages: list[Stage]
    phases: list[PhasePlan]
    disk: Parts
    """Bytes on disk at most."""
    notes: list[str] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    """What to set where it does not fit."""

    @property
    def peak(self) -> Stage:
        """The stage that holds most."""
        return max(self.stages, key=lambda stage: stage.total)

    @property
    def fits(self) -> bool | None:
        """Whether all of it has room; None where nobody knows."""
        return None if self.room is None else self.peak.total <= self.room and not self.changes

    @property
    def hours(self) -> float | None:
        """Hours of all phases, text included; None where one was not timed."""
        if any(one.hours is None for one in self.phases):
            return None
        return sum((one.hours or 0.0) + (one.writing_hours or 0.0) for one in self.phases)


def plan(settings: Train, accelerator: Accelerator) -> Plan:
    """Return what a run would take; nothing is written or downloaded but the base's config.json.

    Memory and hours come from a few real steps on the device. Where it or the base's weights are
    not at hand, or what is held all the time does not fit, memory is computed from shapes.

    Raises:
        ValueError: Settings that no run could have.
    """
    libraries = held_bytes(torch.device("cpu"))
    target = target_of(settings.base, accelerator)
    shapes = Shapes(settings, target)
    room = room_of(target.device) if target.is_here else None
    notes: list[str] = []
    why = _unmeasured(target, shapes, room)
    base = None if why else load_base(settings.base, accelerator)
    if base is not None:
        settle_batches(settings, accelerator, notes.append, base)
    elif names := unsettled(settings):
        raise InputError(
            f"batch_size=auto is found by trying, and phase {names[0]!r} cannot be tried: {why}; "
            "say a number"
        )
    processes, phases = accelerator.num_processes, placed(settings.schedule)
    sharding = base.sharding if base else sharding_of(settings.base, accelerator)
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
    """Return why nothing can be tried here; empty where it can."""
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

    def needed(rows: int) -> int:
        return sum(shapes.step(phase, rows).values())

    found.stages.append(Stage(phase.name, shapes.step(phase, _rows(phase, found))))
    found.phases.append(_phase_plan(phase, shapes))
    found.changes += _changes(found, phase, needed, shapes.gradients)


def _try(found: Plan, shapes: Shapes, trial: Trial, phases: list[PlacedPhase]) -> None:
    """Fill a plan by real steps, of as many sequences as fit."""
    assert found.room is not None
    for phase in phases:
        distill = phase.settings.distill
        here = distill if distill and distill.engine == "local" else None
        if here:
            found.stages.append(Stage(f"{phase.name}: text", trial.write(here)))
        rows = _rows(phase, found)
        climbed = climb(trial, phase, found.room, rows, timed=True)
        if not climbed.tried:
            found.notes.append(
                f"phase {phase.name!r}: there was no memory for the first step that was tried; "
                "what it holds is computed from shapes"
            )
            found.stages.append(Stage(phase.name, shapes.step(phase, rows)))
            found.phases.append(_phase_plan(phase, shapes))
            found.changes += _levers(phase)
            continue
        most, tried = list(climbed.tried.items())[-1]
        more = climbed.needed(rows) - tried.total
        found.stages.append(Stage(phase.name, tried.memory | ({EXTENDED: more} if more else {})))
        if more:
            found.notes.append(
                f"phase {phase.name!r}: steps of up to {most} sequences were tried, and extended "
                f"linearly to {rows}"
            )
        seconds = tried.seconds * rows / most
        # afterwards, for it leaves memory behind that a run does not
        writing = trial.writing_seconds(here) if here else 0.0
        found.phases.append(_phase_plan(phase, shapes, seconds, writing))
        found.changes += _changes(found, phase, climbed.needed, shapes.gradients)
    if any(one.writing_hours for one in found.phases):
        found.notes.append(
            "text is timed without drafts, and there is memory for them where a head may draft; "
            "one that drafts well writes faster"
        )


def _rows(phase: PlacedPhase, found: Plan) -> int:
    """Return the sequences of a step that one process reads, at most."""
    return -(-phase.settings.batch_size // found.shares)


def _phase_plan(
    phase: PlacedPhase,
    shapes: Shapes,
    seconds: float | None = None,
    writing: float | None = None,
) -> PhasePlan:
    """Return what a phase reads, and takes by the seconds of its largest step."""
    settings = phase.settings
    sequences = sum(batch_size(step, settings) for step in range(settings.steps))
    steps = sequences / settings.batch_size
    return PhasePlan(
        phase.name,
        settings.steps,
        settings.batch_size,
        tokens=sequences * row_tokens(settings, shapes.settings.data, shapes.base.max_length),
        hours=None if seconds is None else steps * seconds / 3600,
        writing_hours=None if writing is None else writing / 3600,
    )


def _changes(
    found: Plan, phase: PlacedPhase, needed: Callable[[int], int], gradients: int
) -> list[str]:
    """Return settings with which a phase fits; none where it does, or nobody knows."""
    rows, parts = _rows(phase, found), phase.settings.accumulation_steps
    if found.room is None or needed(rows) <= found.room:
        return []
    # of several parts all but the first find gradients
    fitting = min(largest(needed, found.room - gradients, parts), rows) // parts
    if not fitting:
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
        f"checkpoints ({kept}, and one that is written)": (kept + 1) * (head + shapes.moments),
        "heads (after each phase, the best, and the last)": (len(phases) + 2) * head,
        "text by the base, at most": tokens * TOKEN_BYTES,
    }
    if settings.feature_cache.gib:
        found["feature cache"] = cache_bytes(settings, shapes.base, len(shapes.head.aux_layers))
    return {name: size for name, size in found.items() if size}

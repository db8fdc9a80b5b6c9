"""The plan of a run: memory of each device by part, tokens, disk, hours, and what to change."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from accelerate import Accelerator

from specheads.base.loading import load_tokenizer
from specheads.config import Train
from specheads.core.bounds import available_bytes, resident_bytes
from specheads.core.errors import InputError
from specheads.heads.load import configure
from specheads.runs.checkpoint import KEPT
from specheads.training.feature_cache import cache_bytes
from specheads.training.plan import advice, burst
from specheads.training.plan.batch import settle_batches
from specheads.training.plan.place import Target, target_of
from specheads.training.plan.rehearsal import Parts, Rehearsal, length_of, longest_of
from specheads.training.processes import load_base
from specheads.training.schedule import PlacedPhase, placed, refuse_misfit

LIBRARIES, CONTEXT = "Python and libraries", "CUDA's own (assumed)"
CONTEXT_BYTES = 600 * 2**20
GATHERED = "gradients, once more for other processes"
TOKEN_BYTES = 5
"""Of a token of text: a number of 32 bits, and whether it counts."""


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
    flops: int
    """Of one step, of all processes."""
    hours: float | None = None
    """Of its steps; None where they were not timed."""
    writing_hours: float | None = None
    """Of the text that the base writes for it, without drafts."""


@dataclass(slots=True)
class Plan:
    """What a run will take."""

    device: str
    processes: int
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
        """Whether the peak has room; None where nobody knows."""
        return None if self.room is None else self.peak.total <= self.room

    @property
    def hours(self) -> float | None:
        """Hours of all phases, text included; None where one was not timed."""
        if any(one.hours is None for one in self.phases):
            return None
        return sum((one.hours or 0.0) + (one.writing_hours or 0.0) for one in self.phases)


def plan(settings: Train, accelerator: Accelerator, *, timed: bool = True) -> Plan:
    """Return what a run would take; nothing is written or downloaded but the base's config.json.

    Memory comes from a rehearsal on tensors without content, hours (where they are `timed`) from a
    few real steps on the device; where it or the base's weights are not at hand there are none.

    Raises:
        ValueError: Settings that no run could have.
    """
    depth: int = configure(settings.head).depth
    target, notes = target_of(settings.base, accelerator), list[str]()
    settle_batches(settings, accelerator, notes.append)
    rehearsal = Rehearsal(settings, target.config, target.dtype, target.kind)
    processes, phases = accelerator.num_processes, placed(settings.schedule)
    for one in phases:
        refuse_misfit(one.name, one.settings, rehearsal.base.max_length, depth, processes)
    rows: dict[str, int] = {one.name: -(-one.settings.batch_size // processes) for one in phases}
    stages, flops = _stages(rehearsal, phases, rows, processes)
    # what reading text and optimizing bring in is there by now
    load_tokenizer(target.source, revision=settings.base.revision)
    own = {LIBRARIES: resident_bytes()} if target.kind == "cpu" else {CONTEXT: CONTEXT_BYTES}
    room = _room(target, own) if target.is_here else None
    found = Plan(
        device=str(target.device),
        processes=processes,
        room=room,
        stages=[Stage(one.name, own | one.memory) for one in stages],
        phases=[_phase_plan(one, flops[one.name] * processes) for one in phases],
        disk=_disk(settings, rehearsal),
        notes=notes,
    )
    if room is not None and not found.fits:
        found.changes = advice.changes(rehearsal, phases, rows, room - sum(own.values()))
    _time(found, settings, target, accelerator, rows, timed)
    return found


def _phase_plan(phase: PlacedPhase, flops: int) -> PhasePlan:
    settings = phase.settings
    tokens = settings.steps * settings.batch_size * length_of(settings)
    return PhasePlan(phase.name, settings.steps, settings.batch_size, tokens, flops)


def _stages(
    rehearsal: Rehearsal, phases: Sequence[PlacedPhase], rows: dict[str, int], processes: int
) -> tuple[list[Stage], dict[str, int]]:
    """Return what is held in each phase and while text is written for it, and FLOPs of steps."""
    found, flops = list[Stage](), dict[str, int]()
    for phase in phases:
        if (distill := phase.settings.distill) and distill.engine == "local":
            found.append(Stage(f"{phase.name}: text", rehearsal.write(distill)))
        memory = rehearsal.step(phase, rows[phase.name])
        if processes > 1:
            learned = sum(one.nbytes for one in rehearsal.learned)
            memory |= {GATHERED: learned}
        found.append(Stage(phase.name, memory))
        flops[phase.name] = rehearsal.flops
    return found, flops


def _room(target: Target, own: Parts) -> int:
    """Return the bytes that a device has for this run; what this process has is the run's too."""
    here = sum(own.values()) if target.kind == "cpu" else 0
    return available_bytes(target.device) + here


def _disk(settings: Train, rehearsal: Rehearsal) -> Parts:
    head, states = rehearsal.saved_bytes
    phases = settings.schedule.phases.values()
    tokens = sum(one.distill.num_samples * longest_of(one.distill) for one in phases if one.distill)
    found = {
        f"checkpoints ({KEPT}, and one that is written)": (KEPT + 1) * (head + states),
        "heads (after each phase, and the last)": (len(phases) + 1) * head,
        "text by the base, at most": tokens * TOKEN_BYTES,
    }
    if settings.feature_cache.gib:
        size = cache_bytes(settings, rehearsal.base, len(rehearsal.head.aux_layers))
        found["feature cache"] = size
    return {name: size for name, size in found.items() if size}


def _time(
    found: Plan,
    settings: Train,
    target: Target,
    accelerator: Accelerator,
    rows: dict[str, int],
    timed: bool,
) -> None:
    """Put the hours of a plan into it, or say why it has none."""
    reasons = {
        "they were not asked for": not timed,
        f"this machine has no {target.device}": not target.is_here,
        "the weights of the base are not on this machine": not target.has_weights,
        "it does not fit": found.fits is False,
    }
    if why := next((reason for reason, holds in reasons.items() if holds), ""):
        found.notes.append(f"memory is computed from shapes; no hours, since {why}")
        return
    base = load_base(settings.base, accelerator)
    if base.tokenizer is None:
        raise InputError(f"training reads text: the base {base.name} needs a tokenizer")
    bursts = burst.measure(settings, base, accelerator, rows)
    found.phases = [
        replace(
            one,
            hours=one.steps * bursts[one.name].step_seconds / 3600,
            writing_hours=bursts[one.name].write_seconds / 3600,
        )
        for one in found.phases
    ]
    if any(one.writing_hours for one in found.phases):
        found.notes.append("text is timed without drafts; a head that drafts well writes faster")

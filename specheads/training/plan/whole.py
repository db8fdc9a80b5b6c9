"""The plan of a run: memory by part, tokens, FLOPs, disk, hours, and changes if it does not fit."""

import math
from typing import Any

import torch
from accelerate import Accelerator

from specheads.core.machine import held_bytes
from specheads.runs.checkpoint import KEPT
from specheads.training.cost import step_flops
from specheads.training.feature_cache import cache_bytes
from specheads.training.plan.shapes import Setup, Shapes, Target, target_of
from specheads.training.plan.trial import Trial, room_of
from specheads.training.processes import load_base, readers, sharding_of
from specheads.training.schedule import PlacedPhase, placed, refuse_misfit, row_tokens, text_tokens

TOKEN_BYTES = 5
"""Bytes of a token of text: an int32 and its loss mask."""

LEVERS = (
    "a shorter sequence_length, or a lower scored_share",
    "base.dtype=bfloat16 (half the weights of a base in float32)",
    "head.draft_tokens (a smaller projection: less of weights, gradients, moments and loss)",
    "a smaller base",
)
"""Changes if not even one sequence fits."""


def plan(setup: Setup, accelerator: Accelerator) -> dict[str, Any]:
    """Return the plan of a run as plain values; only the base's config.json is downloaded.

    Memory (bytes of one process) and FLOPs are computed from shapes. If this machine has the device
    and the base, and the run fits, a few real steps give hours and the measured peak.

    Raises:
        ValueError: A phase does not fit the base, the head or the processes.
    """
    process = {"Python and libraries": held_bytes(torch.device("cpu"))}
    target = target_of(setup.base, accelerator)
    shapes, phases = Shapes(setup, target), placed(setup.schedule)
    sharding = sharding_of(accelerator, setup.base["device"])
    shares = readers(sharding, accelerator)["world_size"]
    rows = {one.name: -(-one.settings.batch_size // shares) for one in phases}
    room = room_of(target.device) if target.is_here else None
    memory: dict[str, dict[str, int]] = {}
    changes: list[str] = []
    for phase in phases:
        settings, context = phase.settings, shapes.base.max_length
        refuse_misfit(phase.name, settings, context, shapes.head.depth, shares)
        libraries = process if target.device.type == "cpu" else {}
        if settings.distill and settings.distill.engine == "local":
            memory[f"{phase.name}: text"] = libraries | shapes.text(settings.distill)
        memory[phase.name] = libraries | shapes.step(phase, rows[phase.name])
        excess = sum(memory[phase.name].values()) - room if room else 0
        changes += _changes(shapes, phase, rows[phase.name], shares, excess)
    peak = max(sum(parts.values()) for parts in memory.values())
    fits = None if room is None else peak <= room
    if why := _untried(target, fits):
        hours, note = {}, f"there are no hours: {why}"
    else:
        hours, peak = _try(setup, accelerator, phases, rows)
        note = "hours and the peak are measured in a few steps; hours of text are without drafts"
    return {
        "device": str(target.device),
        "processes": accelerator.num_processes,
        "fits": fits,
        "room_bytes": room,
        "peak_bytes": peak,
        "memory_bytes": memory,
        "phases": {one.name: _work(shapes, one) for one in phases},
        "hours": hours,
        "disk_bytes": _disk(shapes),
        "changes": changes,
        "note": note,
    }


def _untried(target: Target, fits: bool | None) -> str:
    """Return the reason why no steps can run here, or an empty string."""
    if not target.is_here:
        return f"this machine has no {target.device}"
    if not target.has_weights:
        return "the weights of the base are not on this machine"
    return "" if fits else "the run does not fit"


def _try(
    setup: Setup, accelerator: Accelerator, phases: list[PlacedPhase], rows: dict[str, int]
) -> tuple[dict[str, float], int]:
    """Return the hours of each stage and the peak bytes in real steps."""
    trial = Trial(setup, load_base(setup.base, accelerator), accelerator)
    hours = {}
    try:
        for phase in phases:
            distill = phase.settings.distill
            if distill and distill.engine == "local":
                hours[f"{phase.name}: text"] = trial.text_seconds(distill) / 3600
            seconds = trial.step_seconds(phase, rows[phase.name])
            hours[phase.name] = phase.settings.steps * seconds / 3600
        return hours, trial.peak
    finally:
        trial.leave()


def _work(shapes: Shapes, phase: PlacedPhase) -> dict[str, Any]:
    """Return the work of a phase over all processes: see `cost.step_flops` for FLOPs."""
    settings, setup = phase.settings, shapes.setup
    sequences = settings.steps * settings.batch_size
    batch = setup.batch(settings, 1, shapes.base, shapes.head)
    flops = step_flops(shapes.base, shapes.head, batch, settings).total
    return {
        "steps": settings.steps,
        "batch_size": settings.batch_size,
        "tokens": sequences * row_tokens(settings, setup.data, shapes.base.max_length),
        "flops": sequences * flops,
    }


def _changes(shapes: Shapes, phase: PlacedPhase, rows: int, shares: int, excess: int) -> list[str]:
    """Return changes that make a step fit that needs `excess` bytes too many."""
    if excess <= 0:
        return []
    setting, parts = f"schedule.phases.{phase.name}", phase.settings.accumulation_steps
    # all parts except the first run next to gradients
    too_many = math.ceil((excess + shapes.gradients) / shapes.row_bytes(phase))
    fitting = (rows - too_many) // parts
    if fitting < 1:
        return [f"{setting}: {lever}" for lever in LEVERS]
    return [
        f"{setting}.accumulation_steps={-(-rows // fitting)} (parts of {fitting} sequences, the "
        f"same training), or {setting}.batch_size={fitting * parts * shares}"
    ]


def _disk(shapes: Shapes) -> dict[str, int]:
    """Return the most bytes that a run writes."""
    setup, head = shapes.setup, shapes.saved_bytes
    phases = setup.schedule.phases.values()
    texts = [one.distill for one in phases if one.distill]
    tokens = sum(one.num_samples * text_tokens(one) for one in texts)
    cached = 0
    if setup.caches_features:
        rows, num_aux = setup.validation_rows, len(shapes.head.aux_layers)
        cached = cache_bytes(phases, setup.data, rows, shapes.base, num_aux)
    return {
        f"checkpoints ({KEPT}, and one in progress)": (KEPT + 1) * (head + shapes.moments),
        "heads (after each phase, the best, and the last)": (len(phases) + 2) * head,
        "generated text": tokens * TOKEN_BYTES,
        "feature cache": cached,
    }

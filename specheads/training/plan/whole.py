"""The plan of a run: memory by part, tokens, FLOPs, disk, hours, and changes if it does not fit."""

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from huggingface_hub import try_to_load_from_cache

from specheads.base.gguf import located
from specheads.core.machine import held_bytes, peak_bytes
from specheads.runs.checkpoint import KEPT
from specheads.training.feature_cache import cache_bytes
from specheads.training.plan.shapes import Setup, Shapes, device_of
from specheads.training.plan.trial import Trial, room_of
from specheads.training.processes import load_base, readers, sharding_of
from specheads.training.schedule import PlacedPhase, placed, refuse_misfit, row_tokens, text_tokens

TOKEN_BYTES = 5
"""Bytes of a token of text: an int32 and its loss mask."""

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")

CHANGES = (
    "a larger accumulation_steps (the same training), or a smaller batch_size",
    "a shorter sequence_length, or a lower scored_share",
    "base.dtype=bfloat16 (half the weights of a base in float32)",
    "base.quantization=8bit or 4bit (on CUDA)",
    "head.draft_tokens (a smaller projection: less of weights, gradients, moments and loss)",
    "a smaller base",
)
"""Changes for a run that does not fit."""


def plan(setup: Setup, accelerator: Accelerator) -> dict[str, Any]:
    """Return the plan of a run as plain values; only the base's config.json is downloaded.

    Memory (bytes of one process) and FLOPs are computed from shapes. If this machine has the device
    and the base, and the run fits, a few real steps give hours and the measured peak.

    Raises:
        ValueError: A phase does not fit the base, the head or the processes.
    """
    device = device_of(setup.base, accelerator)
    on_cpu = device.type == "cpu"
    libraries = {"Python and libraries": held_bytes(device)} if on_cpu else {}
    shapes, phases = Shapes(setup, device), placed(setup.schedule)
    sharding = sharding_of(accelerator, setup.base["device"], setup.base["quantization"])
    shares = readers(sharding, accelerator)["world_size"]
    rows = {one.name: -(-one.settings.batch_size // shares) for one in phases}
    memory: dict[str, dict[str, int]] = {}
    for phase in phases:
        settings, context = phase.settings, shapes.base.max_length
        refuse_misfit(phase.name, settings, context, shapes.head.depth, shares)
        if settings.distill and settings.distill.engine == "local":
            memory[f"{phase.name}: text"] = libraries | shapes.text(settings.distill)
        memory[phase.name] = libraries | shapes.step(phase, rows[phase.name])
    peak = max(sum(parts.values()) for parts in memory.values())
    room = room_of(device) if _is_here(device) else None
    fits = None if room is None else peak <= room
    hours = {}
    if fits is None:
        note = f"there are no hours: this machine has no {device}"
    elif not _has_weights(setup):
        note = "there are no hours: the weights of the base are not on this machine"
    elif not fits:
        note = "there are no hours: the run does not fit"
    else:
        hours, peak = _try(setup, accelerator, phases, rows)
        note = "hours and the peak are measured in a few steps; hours of text are without drafts"
    return {
        "device": str(device),
        "processes": accelerator.num_processes,
        "fits": fits,
        "room_bytes": room,
        "peak_bytes": peak,
        "memory_bytes": memory,
        "phases": {one.name: _work(shapes, one) for one in phases},
        "hours": hours,
        "disk_bytes": _disk(shapes),
        "changes": list(CHANGES) if fits is False else [],
        "note": note,
    }


def _is_here(device: torch.device) -> bool:
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError):
        return False
    return True


def _has_weights(setup: Setup) -> bool:
    source = located(setup.base["model"])
    if (folder := Path(source)).is_dir():
        return any(folder.glob("*.safetensors"))
    revision = setup.base["revision"]
    found = (try_to_load_from_cache(source, name, revision=revision) for name in WEIGHTS)
    return any(isinstance(one, str) for one in found)


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
        return hours, peak_bytes(trial.base.device)
    finally:
        trial.leave()


def _work(shapes: Shapes, phase: PlacedPhase) -> dict[str, Any]:
    """Return the work of a phase over all processes."""
    settings, data = phase.settings, shapes.setup.data
    sequences = settings.steps * settings.batch_size
    return {
        "steps": settings.steps,
        "batch_size": settings.batch_size,
        "tokens": sequences * row_tokens(settings, data, shapes.base.max_length),
        "flops": int(sequences * shapes.row_flops[phase.name]),
    }


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

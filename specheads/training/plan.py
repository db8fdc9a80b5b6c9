"""Plan of a training: memory, tokens, FLOPs, disk and hours, from shapes or a few real steps.

See docs/scale.md.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from accelerate import Accelerator
from huggingface_hub import try_to_load_from_cache

from specheads.base.gguf import load_path
from specheads.base.model import FrozenBase
from specheads.config.commands import Train
from specheads.config.shared import BaseSettings
from specheads.config.training import DistillSettings
from specheads.core import machine
from specheads.decoding.generate import generate
from specheads.heads.load import build_for_base, resume_head
from specheads.runs.checkpoint import NUM_CHECKPOINTS
from specheads.training.batch_sizes import (
    SMALLER_STEP,
    device_exists,
    maximum,
    planned_device,
    usable_bytes,
)
from specheads.training.memory import (
    MetaTraining,
    StageMemory,
    TrainingStepCost,
    meta_base,
    planned_teacher,
    random_batch,
    server_dtype,
    weights_bytes,
)
from specheads.training.processes import load_base, load_served_base, row_share, sharding_of
from specheads.training.schedule import (
    ScheduledPhase,
    longest_row,
    refuse_misfit,
    row_tokens,
    schedule_phases,
    text_tokens,
)
from specheads.training.step import StepRunner

TIMED_STEPS, TIMED_NEW_TOKENS = 3, 32
"""Steps, and new tokens of each text, whose time is measured."""
TEXT_STAGE = ": text"
"""End of the name of a stage that generates a phase's text."""
NUMBERS_OF_GPUS = (1, 2, 4, 8)
"""Numbers of GPUs of a server in a plan."""


@dataclass(frozen=True, slots=True)
class PhaseWork:
    """Work of a phase over all processes."""

    steps: int
    batch_size: int
    tokens: int
    flops: int
    feature_bytes: int
    """What a cache stores, or a server sends."""


@dataclass(frozen=True, slots=True)
class DiskUse:
    """Most bytes that a run writes, without a feature cache."""

    checkpoints_bytes: int
    """The kept ones, and one in progress."""
    heads_bytes: int
    """Heads after each phase, the best, and the last."""
    generated_text_bytes: int

    @property
    def total_bytes(self) -> int:
        """Sum of all files."""
        return self.checkpoints_bytes + self.heads_bytes + self.generated_text_bytes


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Memory of one GPU of a server."""

    weights_bytes: int
    cache_bytes_per_token: int
    cache_bytes_of_open_requests: int


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """What a server of all trainers of a run needs."""

    layers: list[int]
    """Layers whose states it sends."""
    feature_bytes_per_token: int
    folder_bytes: int
    """Largest size of the files in the shared folder."""
    memory_by_gpus: dict[int, GpuMemory]
    """By the number of GPUs that share the weights."""


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """Plan of a run. A stage is a phase, or the generation of its text."""

    device: str
    processes: int
    fits: bool | None
    """Whether the run fits in memory; None if this machine has no such device."""
    room_bytes: int | None
    """Memory of a process on the device."""
    peak_bytes: int
    """Largest memory of a process in the run."""
    memory_bytes: dict[str, StageMemory]
    """Memory of each stage."""
    phases: dict[str, PhaseWork]
    hours: dict[str, float]
    """Hours of each stage; empty if they cannot be measured here."""
    server: ServerPlan | None
    disk_bytes: DiskUse
    note: str


def plan_training(settings: Train, accelerator: Accelerator) -> TrainingPlan:
    """Return the plan of a run; only the base's config.json is downloaded.

    Memory (bytes of one process) and FLOPs are computed from shapes. If this machine has the device
    and the base, and the run fits, a few real steps give hours and the measured peak.
    """
    device, phases = planned_device(settings, accelerator), schedule_phases(settings.schedule)
    libraries_bytes = machine.process_bytes(device) if device.type == "cpu" else 0
    training = MetaTraining(settings, device)
    # processes, or groups of them, that share the rows of a step
    num_shares = row_share(sharding_of(accelerator, settings.base.device), accelerator).world_size
    context, depth = training.base.max_length, training.head.depth
    refuse_misfit(settings.schedule.phases, context, depth, num_shares)
    rows = {phase.name: -(-phase.settings.batch_size // num_shares) for phase in phases}
    steps = {phase.name: training.measure_step(phase, rows[phase.name]) for phase in phases}
    memory = _memory_by_stage(training, phases, steps, libraries_bytes)
    peak_bytes = max(stage.total_bytes for stage in memory.values())
    room_bytes = usable_bytes(device) if device_exists(device) else None
    fits = None if room_bytes is None else peak_bytes <= room_bytes
    server = plan_server(training, accelerator.num_processes) if training.is_served else None
    hours = dict[str, float]()
    if room_bytes is None:
        note = f"there are no hours: this machine has no {device}"
    elif not fits:
        largest_stage = max(memory, key=lambda name: memory[name].total_bytes)
        note = f"the run does not fit; {_remedy(largest_stage)}, or set base.dtype=bfloat16"
    elif not _has_weights(settings.base):
        note = "there are no hours: the weights of the base are not on this machine"
    else:
        hours, measured_bytes = _measure_stages(settings, accelerator, phases, rows)
        note = "hours and the peak are measured in a few steps; hours of text are without drafts"
        if server:
            note = "hours are measured, for a server that never lets the trainer wait"
        else:
            peak_bytes = measured_bytes
    return TrainingPlan(
        device=str(device),
        processes=accelerator.num_processes,
        fits=fits,
        room_bytes=room_bytes,
        peak_bytes=peak_bytes,
        memory_bytes=memory,
        phases={phase.name: _work_of(training, phase, steps[phase.name]) for phase in phases},
        hours=hours,
        server=server,
        disk_bytes=disk_use(training),
        note=note,
    )


def _memory_by_stage(
    training: MetaTraining,
    phases: list[ScheduledPhase],
    steps: dict[str, TrainingStepCost],
    libraries_bytes: int,
) -> dict[str, StageMemory]:
    memory = {}
    for phase in phases:
        distill = phase.settings.distill
        if distill and distill.engine == "local" and not training.is_served:
            memory[f"{phase.name}{TEXT_STAGE}"] = training.text_memory(distill)
        memory[phase.name] = steps[phase.name].memory
    return {name: replace(stage, libraries_bytes=libraries_bytes) for name, stage in memory.items()}


def _remedy(stage: str) -> str:
    """Return which settings make a stage that does not fit smaller."""
    if stage.endswith(TEXT_STAGE):
        return f"lower schedule.phases.{stage.removesuffix(TEXT_STAGE)}.distill.batch_size"
    return f"raise accumulation_steps (the same training), lower batch_size, or {SMALLER_STEP}"


def _has_weights(base: BaseSettings) -> bool:
    source = load_path(base.model)
    if (folder := Path(source)).is_dir():
        return any(folder.glob("*.safetensors"))
    names = ("model.safetensors", "model.safetensors.index.json")
    files = (try_to_load_from_cache(source, name, revision=base.revision) for name in names)
    return any(isinstance(file, str) for file in files)


def _measure_stages(
    settings: Train, accelerator: Accelerator, phases: list[ScheduledPhase], rows: dict[str, int]
) -> tuple[dict[str, float], int]:
    """Return the hours of each stage and the peak bytes, from real steps on random tokens."""
    load = load_served_base if settings.features.source == "vllm" else load_base
    base = load(settings.base, accelerator)
    if settings.init:
        head = resume_head(settings.init, base, settings.head["kind"])
    else:
        head = build_for_base(settings.head, base)
    hours, teacher = dict[str, float](), planned_teacher(settings, base, head)
    runner = StepRunner(teacher, settings.schedule, accelerator, settings.seed)
    try:
        machine.reset_peak_bytes(base.device)
        for phase in phases:
            distill = phase.settings.distill
            if distill and distill.engine == "local" and isinstance(base, FrozenBase):
                with teacher.base_as_loaded():
                    seconds = _text_seconds(distill, base) / accelerator.num_processes
                hours[f"{phase.name}{TEXT_STAGE}"] = seconds / 3600
            teacher.begin(phase)

            def take_step(phase: ScheduledPhase = phase) -> None:
                batch = random_batch(settings, phase.settings, rows[phase.name], base, head)
                runner.step(batch, phase, phase.first)
                machine.synchronise(base.device)

            step_seconds = _measure_seconds(take_step, TIMED_STEPS)
            hours[phase.name] = phase.settings.steps * step_seconds / 3600
        return hours, machine.peak_bytes(base.device)
    finally:
        teacher.close()


def _text_seconds(distill: DistillSettings, base: FrozenBase) -> float:
    """Return the seconds to generate a phase's text, from a short batch without drafts."""
    num_prompts = min(distill.batch_size, distill.num_samples)
    new_tokens = min(TIMED_NEW_TOKENS, distill.new_tokens)
    prompts = [[token % base.vocab_size for token in range(distill.prompt_tokens)]] * num_prompts
    run = partial(generate, base, None, prompts, max_new_tokens=new_tokens)
    batches = distill.num_samples / num_prompts
    return batches * _measure_seconds(run, 1) * distill.new_tokens / new_tokens


def _measure_seconds(action: Callable[[], object], times: int) -> float:
    """Return the median time of an action after a first one; the slowest process counts."""
    seconds = []
    for _ in range(1 + times):
        start = time.perf_counter()
        action()
        seconds.append(maximum(time.perf_counter() - start))
    return median(seconds[1:])


def _work_of(training: MetaTraining, phase: ScheduledPhase, step: TrainingStepCost) -> PhaseWork:
    settings, data = phase.settings, training.settings.data
    rows = settings.steps * settings.batch_size
    tokens = rows * row_tokens(settings, data, training.base.max_length)
    return PhaseWork(
        steps=settings.steps,
        batch_size=settings.batch_size,
        tokens=tokens,
        flops=int(rows * step.flops_per_row),
        feature_bytes=tokens * training.feature_bytes_per_token,
    )


def disk_use(training: MetaTraining) -> DiskUse:
    """Return what a run writes at most."""
    phases, head_bytes = training.settings.schedule.phases.values(), training.head_bytes
    num_tokens = sum(
        phase.distill.num_samples * text_tokens(phase.distill) for phase in phases if phase.distill
    )
    return DiskUse(
        checkpoints_bytes=(NUM_CHECKPOINTS + 1) * (head_bytes + training.optimizer_bytes),
        heads_bytes=(len(phases) + 2) * head_bytes,
        # an int32 and its loss mask
        generated_text_bytes=num_tokens * 5,
    )


def plan_server(training: MetaTraining, num_processes: int) -> ServerPlan:
    """Return what a server needs for `num_processes` trainers."""
    settings, features = training.settings, training.settings.features
    base = meta_base(settings.base, server_dtype(settings.base.dtype))
    num_requests = features.concurrency * num_processes
    row_tokens = longest_row(settings.schedule, settings.data, base.max_length)
    config: Any = base.config
    num_heads = config.num_attention_heads
    num_key_value_heads = getattr(config, "num_key_value_heads", None) or num_heads
    states_bytes = len(training.server_layers) * base.width * base.dtype.itemsize
    memory_by_gpus = {}
    for num_gpus in NUMBERS_OF_GPUS:
        if num_heads % num_gpus == 0:
            # each GPU has all numbers of a state, and its share of the keys and values
            token_bytes = base.slot_bytes // min(num_gpus, num_key_value_heads) + states_bytes
            memory_by_gpus[num_gpus] = GpuMemory(
                weights_bytes=weights_bytes(base.model) // num_gpus,
                cache_bytes_per_token=token_bytes,
                cache_bytes_of_open_requests=token_bytes * num_requests * row_tokens,
            )
    return ServerPlan(
        layers=training.server_layers,
        feature_bytes_per_token=training.feature_bytes_per_token,
        folder_bytes=largest_folder(training, num_processes, len(features.url) or 1),
        memory_by_gpus=memory_by_gpus,
    )


def largest_folder(training: MetaTraining, num_processes: int, num_servers: int) -> int:
    """Return the most bytes of features that servers have written and trainers have not read."""
    settings, features = training.settings, training.settings.features
    row_tokens = longest_row(settings.schedule, settings.data, training.base.max_length)
    num_rows = features.concurrency * num_processes * num_servers
    files_bytes = num_rows * row_tokens * training.feature_bytes_per_token
    return min(files_bytes, int(num_processes * features.max_gib * 2**30))

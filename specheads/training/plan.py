"""Plan of a training: memory, tokens, FLOPs, disk and hours, from shapes or a few real steps.

See docs/scale.md.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from huggingface_hub import try_to_load_from_cache

from specheads.base.gguf import load_path
from specheads.base.loading import device_of
from specheads.base.model import FrozenBase
from specheads.config.training import DistillSettings, Schedule
from specheads.core import machine
from specheads.core.errors import InputError
from specheads.core.ranges import AUTO
from specheads.decoding.generate import generate
from specheads.heads.load import build_for_base, resume_head
from specheads.runs.checkpoint import NUM_CHECKPOINTS
from specheads.training.memory import MetaTraining, StageMemory, StepCost, TrainingSetup
from specheads.training.processes import load_base, load_served_base, row_share, sharding_of
from specheads.training.schedule import (
    ScheduledPhase,
    refuse_misfit,
    row_tokens,
    schedule_phases,
    text_tokens,
)
from specheads.training.server_plan import ServerPlan, plan_server
from specheads.training.step import StepRunner

FREE_SHARE = 0.2
"""Share of the memory that `batch_size=auto` leaves free, for fragmentation and longer text."""
MAX_TOKENS = 2**16
"""Most tokens of one process's share of a step with `batch_size=auto`."""
TIMED_STEPS, TIMED_NEW_TOKENS = 3, 32
"""Steps, and new tokens of each text, whose time is measured."""
TEXT_STAGE = ": text"
"""End of the name of a stage that generates a phase's text."""


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


def plan_training(setup: TrainingSetup, accelerator: Accelerator) -> TrainingPlan:
    """Return the plan of a run; only the base's config.json is downloaded.

    Memory (bytes of one process) and FLOPs are computed from shapes. If this machine has the device
    and the base, and the run fits, a few real steps give hours and the measured peak.
    """
    device, phases = _device_of(setup, accelerator), schedule_phases(setup.schedule)
    libraries_bytes = machine.process_bytes(device) if device.type == "cpu" else 0
    training = MetaTraining(setup, device)
    num_shares = _num_shares(setup, accelerator)
    for phase in phases:
        context, depth = training.base.max_length, training.head.depth
        refuse_misfit(phase.name, phase.settings, context, depth, num_shares)
    rows = {phase.name: -(-phase.settings.batch_size // num_shares) for phase in phases}
    steps = {phase.name: training.measure_step(phase, rows[phase.name]) for phase in phases}
    memory = _memory_by_stage(training, phases, steps, libraries_bytes)
    peak_bytes = max(stage.total_bytes for stage in memory.values())
    room_bytes = usable_bytes(device) if _exists(device) else None
    fits = None if room_bytes is None else peak_bytes <= room_bytes
    server = plan_server(training, accelerator.num_processes) if setup.is_served else None
    hours = dict[str, float]()
    if room_bytes is None:
        note = f"there are no hours: this machine has no {device}"
    elif not fits:
        largest_stage = max(memory, key=lambda name: memory[name].total_bytes)
        note = f"the run does not fit; {_remedy(largest_stage)}, or set base.dtype=bfloat16"
    elif not _has_weights(setup):
        note = "there are no hours: the weights of the base are not on this machine"
    else:
        hours, measured_bytes = _measure_stages(setup, accelerator, phases, rows)
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
        disk_bytes=_disk_use(training),
        note=note,
    )


def _memory_by_stage(
    training: MetaTraining,
    phases: list[ScheduledPhase],
    steps: dict[str, StepCost],
    libraries_bytes: int,
) -> dict[str, StageMemory]:
    memory = {}
    for phase in phases:
        distill = phase.settings.distill
        if distill and distill.engine == "local" and not training.setup.is_served:
            memory[f"{phase.name}{TEXT_STAGE}"] = training.text_memory(distill)
        memory[phase.name] = steps[phase.name].memory
    return {name: replace(stage, libraries_bytes=libraries_bytes) for name, stage in memory.items()}


def _remedy(stage: str) -> str:
    """Return which settings make a stage that does not fit smaller."""
    if stage.endswith(TEXT_STAGE):
        return f"lower schedule.phases.{stage.removesuffix(TEXT_STAGE)}.distill.batch_size"
    return (
        "raise accumulation_steps (the same training), lower batch_size, sequence_length, "
        "scored_share or head.draft_tokens"
    )


def _device_of(setup: TrainingSetup, accelerator: Accelerator) -> torch.device:
    """Return the device of a base, which this machine need not have."""
    name = setup.base.device
    name = str(accelerator.device) if name == "auto" else name
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise InputError(
            f"base.device must name a torch device, got {name!r:.80}; use cpu, cuda, or auto"
        ) from error


def _num_shares(setup: TrainingSetup, accelerator: Accelerator) -> int:
    """Return the number of processes, or groups of them, that share the rows of a step."""
    return row_share(sharding_of(accelerator, setup.base.device), accelerator).world_size


def _exists(device: torch.device) -> bool:
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError):
        return False
    return True


def _has_weights(setup: TrainingSetup) -> bool:
    source = load_path(setup.base.model)
    if (folder := Path(source)).is_dir():
        return any(folder.glob("*.safetensors"))
    names = ("model.safetensors", "model.safetensors.index.json")
    revision = setup.base.revision
    files = (try_to_load_from_cache(source, name, revision=revision) for name in names)
    return any(isinstance(file, str) for file in files)


def _measure_stages(
    setup: TrainingSetup,
    accelerator: Accelerator,
    phases: list[ScheduledPhase],
    rows: dict[str, int],
) -> tuple[dict[str, float], int]:
    """Return the hours of each stage and the peak bytes, from real steps on random tokens."""
    load = load_served_base if setup.is_served else load_base
    base = load(setup.base, accelerator)
    if setup.init:
        head = resume_head(setup.init, base, setup.head["kind"])
    else:
        head = build_for_base(setup.head, base)
    hours = dict[str, float]()
    runner = StepRunner(setup.teacher(base, head), setup.schedule, accelerator, setup.seed)
    try:
        machine.reset_peak_bytes(base.device)
        for phase in phases:
            distill = phase.settings.distill
            if distill and distill.engine == "local" and isinstance(base, FrozenBase):
                with runner.base_as_loaded():
                    seconds = _text_seconds(distill, base) / accelerator.num_processes
                hours[f"{phase.name}{TEXT_STAGE}"] = seconds / 3600
            runner.begin(phase)

            def take_step(phase: ScheduledPhase = phase) -> None:
                batch = setup.random_batch(phase.settings, rows[phase.name], base, head)
                runner.step(batch, phase, phase.first)
                machine.synchronise(base.device)

            step_seconds = _measure_seconds(take_step, TIMED_STEPS)
            hours[phase.name] = phase.settings.steps * step_seconds / 3600
        return hours, machine.peak_bytes(base.device)
    finally:
        runner.close()


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
        seconds.append(_maximum(time.perf_counter() - start))
    return median(seconds[1:])


def _work_of(training: MetaTraining, phase: ScheduledPhase, step: StepCost) -> PhaseWork:
    settings, data = phase.settings, training.setup.data
    rows = settings.steps * settings.batch_size
    tokens = rows * row_tokens(settings, data, training.base.max_length)
    return PhaseWork(
        steps=settings.steps,
        batch_size=settings.batch_size,
        tokens=tokens,
        flops=int(rows * step.flops_per_row),
        feature_bytes=tokens * training.feature_bytes_per_token,
    )


def _disk_use(training: MetaTraining) -> DiskUse:
    phases, head_bytes = training.setup.schedule.phases.values(), training.head_bytes
    num_tokens = sum(
        phase.distill.num_samples * text_tokens(phase.distill) for phase in phases if phase.distill
    )
    return DiskUse(
        checkpoints_bytes=(NUM_CHECKPOINTS + 1) * (head_bytes + training.optimizer_bytes),
        heads_bytes=(len(phases) + 2) * head_bytes,
        # an int32 and its loss mask
        generated_text_bytes=num_tokens * 5,
    )


# --- batch_size=auto -----------------------------------------------------------------------------


def auto_phases(schedule: Schedule) -> list[str]:
    """Return the names of the phases with `batch_size=auto`."""
    return [name for name, phase in schedule.phases.items() if phase.batch_size == AUTO]


def largest_batch_sizes(
    setup: TrainingSetup, accelerator: Accelerator, num_rows: dict[str, int]
) -> dict[str, int]:
    """Return the batch size, over all processes, of each phase with `auto`.

    `num_rows` are the rows of the text of each phase, which limit a batch.
    """
    device = device_of(str(_device_of(setup, accelerator)))
    sharding = sharding_of(accelerator, setup.base.device)
    if not _exists(device):
        raise InputError(
            f"batch_size=auto needs the memory of the device, and this machine has no {device}; "
            "give a number to plan for another machine"
        )
    training, names = MetaTraining(setup, device), auto_phases(setup.schedule)
    num_shares = row_share(sharding, accelerator).world_size
    room_bytes = (1 - FREE_SHARE) * usable_bytes(device)
    if device.type == "cpu":
        room_bytes -= machine.process_bytes(device)
    if sharding:
        # shapes are those of a base that is not sharded
        elsewhere = 1 - 1 / sharding.mesh.size()
        room_bytes += elsewhere * training.weights_memory().base_weights_bytes
    batch_sizes = {}
    for phase in schedule_phases(setup.schedule):
        if phase.name in names:
            rows = phase.settings.accumulation_steps
            length = row_tokens(phase.settings, setup.data, training.base.max_length)
            while 2 * rows * length <= MAX_TOKENS and 2 * rows * num_shares <= num_rows[phase.name]:
                if training.measure_step(phase, 2 * rows).memory.total_bytes > room_bytes:
                    break
                rows *= 2
            batch_sizes[phase.name] = rows * num_shares
    return batch_sizes


def usable_bytes(device: torch.device) -> int:
    """Return the bytes that a process can use on its device, including those it uses now.

    The process with the least memory decides for all.
    """
    size = machine.available_bytes(device)
    if device.type == "cpu":
        num_local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        size = size // num_local_processes + machine.process_bytes(device)
    else:
        # unused memory in torch's allocator already counts as available
        size += torch.cuda.memory_allocated(device)
    return int(-_maximum(-float(size)))


def _maximum(value: float) -> float:
    """Return the maximum over all processes."""
    return max(gather_object([value]))

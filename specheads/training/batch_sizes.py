"""Numbers in place of `auto` in a schedule, and the memory of a device."""

import os
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from specheads.base.loading import load_tokenizer
from specheads.config.commands import Train
from specheads.config.validation import read_settings
from specheads.core import machine
from specheads.core.errors import InputError
from specheads.core.ranges import AUTO
from specheads.data.packing import PackedText
from specheads.data.sources import is_on_hub
from specheads.data.tokenise import tokenise_corpus
from specheads.runs.directory import RunDirectory
from specheads.training.memory import MetaTraining
from specheads.training.processes import row_share, sharding_of
from specheads.training.schedule import row_tokens, schedule_phases

ROWS_PER_SAMPLE = 0.25
"""Assumed rows of a generated text: it may be dropped, or share a row."""
FREE_SHARE = 0.2
"""Share of the memory that `batch_size=auto` leaves free, for fragmentation and longer text."""
MAX_TOKENS = 2**16
"""Most tokens of one process's share of a step with `batch_size=auto`."""
SMALLER_STEP = "lower sequence_length, scored_share or head.draft_tokens"
"""Settings that make the step of a row smaller."""


def resolve_batch_sizes(
    settings: Train, accelerator: Accelerator, announce: Callable[[str], object]
) -> None:
    """Replace every `auto` by a number.

    A batch size is that of the run that resumes, or of the largest batch that fits in memory and
    does not need more rows than the text has.
    """
    phases = settings.schedule.phases
    names = [name for name, phase in phases.items() if phase.batch_size == AUTO]
    shared = [name for name, phase in phases.items() if phase.accumulation_steps == AUTO]
    if both := [name for name in names if name in shared]:
        raise InputError(
            f"batch_size or accumulation_steps can be auto, and phase {both[0]!r} has both; set "
            "one of them to a number"
        )
    config = RunDirectory(Path(settings.run_dir)).config
    saved = read_settings(config) if names and config.is_file() else {}
    saved_phases = saved.get("schedule", {}).get("phases", {})
    sizes = {name: saved_phases.get(name, {}).get("batch_size") for name in names}
    if not all(isinstance(size, int) for size in sizes.values()):
        num_rows = {name: _count_rows(settings, name) for name in names}
        sizes = largest_batch_sizes(settings, accelerator, num_rows)
    for name, size in sizes.items():
        phases[name].batch_size = size
        if accelerator.is_main_process:
            announce(f"phase {name!r}: batch_size=auto is {size}")
    for name in shared:
        steps, fits = fewest_accumulation_steps(settings, accelerator, name)
        note = "" if fits else f"; the smallest part does not fit in memory: {SMALLER_STEP}"
        if accelerator.is_main_process:
            announce(f"phase {name!r}: accumulation_steps=auto is {steps}{note}")


def _count_rows(settings: Train, name: str) -> int:
    """Return the rows of a phase's text: of its corpus, or about those that will be generated.

    A plan downloads no data set, and a base may lack its tokenizer; then nothing limits the rows.
    """
    phase = settings.schedule.phases[name]
    if phase.distill is not None:
        return int(phase.distill.num_samples * ROWS_PER_SAMPLE)
    tokenizer = load_tokenizer(settings.base.model, revision=settings.base.revision)
    is_remote = any(is_on_hub(data.source, data.path) for data in settings.data.active_sources)
    if tokenizer is None or (settings.dry_run and is_remote):
        return MAX_TOKENS
    documents = tokenise_corpus(settings.data, "train", tokenizer, settings.seed)
    length, packing = phase.sequence_length, phase.packing
    return PackedText(
        documents, sequence_length=length, batch_size=1, packing=packing, seed=settings.seed
    ).rows_per_epoch


def largest_batch_sizes(
    settings: Train, accelerator: Accelerator, num_rows: dict[str, int]
) -> dict[str, int]:
    """Return the batch size, over all processes, of each phase of `num_rows`.

    `num_rows` are the rows of the text of each phase, which limit a batch.
    """
    device = planned_device(settings, accelerator)
    if not device_exists(device):
        raise InputError(
            f"batch_size=auto needs the memory of the device, and this machine has no {device}; "
            "give a number to plan for another machine"
        )
    training, room_bytes, num_shares = _plan_step(settings, accelerator, device)
    batch_sizes = {}
    for phase in schedule_phases(settings.schedule):
        if phase.name in num_rows:
            rows = phase.settings.accumulation_steps
            length = row_tokens(phase.settings, settings.data, training.base.max_length)
            while 2 * rows * length <= MAX_TOKENS and 2 * rows * num_shares <= num_rows[phase.name]:
                if training.measure_step(phase, 2 * rows).memory.total_bytes > room_bytes:
                    break
                rows *= 2
            batch_sizes[phase.name] = rows * num_shares
    return batch_sizes


def fewest_accumulation_steps(
    settings: Train, accelerator: Accelerator, name: str
) -> tuple[int, bool]:
    """Return the fewest micro-batches, doubled from one, in which a phase's step fits in memory.

    Also return whether it fits: if it does not, the number is the largest one. The number is one if
    this machine has no such device: the plan then shows what the step needs.
    """
    phase = next(phase for phase in schedule_phases(settings.schedule) if phase.name == name)
    phase.settings.accumulation_steps = 1
    device = planned_device(settings, accelerator)
    if not device_exists(device):
        return 1, True
    training, room_bytes, num_shares = _plan_step(settings, accelerator, device)
    rows = -(-phase.settings.batch_size // num_shares)
    while training.measure_step(phase, rows).memory.total_bytes > room_bytes:
        if 2 * phase.settings.accumulation_steps * num_shares > phase.settings.batch_size:
            return phase.settings.accumulation_steps, False
        phase.settings.accumulation_steps *= 2
    return phase.settings.accumulation_steps, True


def _plan_step(
    settings: Train, accelerator: Accelerator, device: torch.device
) -> tuple[MetaTraining, float, int]:
    """Return a training by its shapes, the bytes that `auto` may fill, and the shares of a step."""
    sharding = sharding_of(accelerator, settings.base.device)
    training = MetaTraining(settings, device)
    room_bytes = (1 - FREE_SHARE) * usable_bytes(device)
    if device.type == "cpu":
        # equal on all processes: each would choose another number
        room_bytes -= maximum(float(machine.process_bytes(device)))
    if sharding:
        # shapes are those of a base that is not sharded
        elsewhere = 1 - 1 / sharding.mesh.size()
        room_bytes += elsewhere * training.fixed_memory().base_weights_bytes
    return training, room_bytes, row_share(sharding, accelerator).world_size


def planned_device(settings: Train, accelerator: Accelerator) -> torch.device:
    """Return the device of a base, which this machine need not have."""
    name = settings.base.device
    name = str(accelerator.device) if name == "auto" else name
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise InputError(
            f"base.device must name a torch device, got {name!r:.80}; use cpu, cuda, or auto"
        ) from error


def device_exists(device: torch.device) -> bool:
    """Return whether this machine has a device."""
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError):
        return False
    return True


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
    return int(-maximum(-float(size)))


def maximum(value: float) -> float:
    """Return the maximum over all processes."""
    return max(gather_object([value]))

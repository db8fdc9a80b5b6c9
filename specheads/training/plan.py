"""Estimate memory by part, tokens, FLOPs, disk and hours of a training, from shapes or real steps.

See docs/scale.md.
"""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from huggingface_hub import try_to_load_from_cache
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from specheads.base.gguf import located
from specheads.base.ignored_settings import attention_of, auto_class
from specheads.base.loading import device_of, load_config
from specheads.base.model import FrozenBase
from specheads.config.data import DataSettings
from specheads.config.training import DistillSettings, FeatureSettings, Phase, Schedule
from specheads.core import machine
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.core.features import Features
from specheads.core.ranges import AUTO
from specheads.data.packing import TokenBatch
from specheads.decoding.generate import generate
from specheads.heads.load import (
    build_for_base,
    build_head,
    choose_layers,
    head_sizes,
    load_head,
    resume_head,
)
from specheads.runs.checkpoint import KEPT
from specheads.training.distill.engines import REFILL
from specheads.training.features import (
    FeatureSource,
    features_of,
    server_layers,
    server_token_bytes,
)
from specheads.training.objective import Objective, label_counts
from specheads.training.optimizers import roles
from specheads.training.processes import load_base, readers, sharding_of
from specheads.training.schedule import (
    ScheduledPhase,
    adapter_settings,
    longest_row,
    refuse_misfit,
    refuse_unread,
    row_tokens,
    schedule_phases,
    text_tokens,
)
from specheads.training.step import Step, StepRunner, Teacher, flop_counter
from specheads.training.trainer import AHEAD

LEARNED_BYTES = 4
"""Bytes of a trained number, its gradient, and each moment: all are float32."""
DOCUMENTS = 3
"""Assumed documents per row of best-fit packing."""
MARGIN = 0.2
"""Share of the memory that `batch_size=auto` leaves free, for fragmentation and longer text."""
MAX_TOKENS = 2**16
"""Most tokens of one process's part of a step with `batch_size=auto`."""
GPUS = (1, 2, 4, 8)
"""Numbers of GPUs of a server in a plan."""
TIMED_STEPS, TRIAL_TOKENS = 3, 32
"""Steps, and new tokens per text, in a trial that is timed."""
TEXT = ": text"
"""End of the name of a stage that generates a phase's text."""
Parts = dict[str, int]
"""Bytes of each part."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A training to plan."""

    base: dict[str, Any]
    """Arguments of `FrozenBase.load`."""
    head: dict[str, Any]
    """`kind` of the head and its settings."""
    init: str
    """Folder or Hub id of a head to start from; empty starts from random weights."""
    schedule: Schedule
    data: DataSettings
    features: FeatureSettings
    seed: int

    def batch(self, phase: Phase, rows: int, base: FrozenBase, head: Head) -> TokenBatch:
        """Return a random batch of a phase, with tokens from the draft vocabulary."""
        shape = rows, row_tokens(phase, self.data, base.max_length)
        tokens = head.to_tokens(torch.randint(head.drafted_size, shape, device=base.device))
        loss_mask = torch.ones_like(tokens, dtype=torch.bool)
        if phase.distill is not None and phase.answers_only:
            loss_mask[:, : phase.distill.prompt_tokens] = False
        document_ids = None
        if phase.packing == "best_fit" and phase.distill is None:
            ends = torch.rand(rows, 1, DOCUMENTS - 1, device=base.device) * shape[1]
            places = torch.arange(shape[1], device=base.device)[:, None]
            document_ids = (places >= ends).sum(-1)
        return TokenBatch(tokens, loss_mask, document_ids)

    def teacher(self, base: FrozenBase, head: Head) -> Teacher:
        """Return the teacher of a step; random states replace those of a server."""
        source = None
        if not base.has_layers:
            source = RandomStates(base, head.aux_layers, server_layers(head, base.num_layers))
        return Teacher(base, head, adapter_settings(self.schedule), self.seed, source)


def plan(setup: Setup, accelerator: Accelerator) -> dict[str, Any]:
    """Return the plan of a run as plain values; only the base's config.json is downloaded.

    Memory (bytes of one process) and FLOPs are computed from shapes. If this machine has the device
    and the base, and the run fits, a few real steps give hours and the measured peak.
    """
    device = _device_of(setup.base, accelerator)
    on_cpu = device.type == "cpu"
    libraries = {"Python and libraries": machine.held_bytes(device)} if on_cpu else {}
    shapes, phases = Shapes(setup, device), schedule_phases(setup.schedule)
    sharding = sharding_of(accelerator, setup.base["device"])
    shares = readers(sharding, accelerator)["world_size"]
    refuse_unread(setup.schedule.phases, shapes.head)
    rows = {one.name: -(-one.settings.batch_size // shares) for one in phases}
    memory: dict[str, Parts] = {}
    for phase in phases:
        context, depth = shapes.base.max_length, shapes.head.depth
        refuse_misfit(phase.name, phase.settings, context, depth, shares)
        distill, has_layers = phase.settings.distill, shapes.base.has_layers
        if distill and distill.engine == "local" and has_layers:
            memory[f"{phase.name}{TEXT}"] = libraries | shapes.text(distill)
        memory[phase.name] = libraries | shapes.step(phase, rows[phase.name])
    totals = {name: sum(parts.values()) for name, parts in memory.items()}
    peak = max(totals.values())
    room = room_of(device) if _is_here(device) else None
    server = {} if shapes.base.has_layers else _server(shapes, accelerator.num_processes)
    fits, hours = None if room is None else peak <= room, {}
    if room is None:
        note = f"there are no hours: this machine has no {device}"
    elif not fits:
        largest = max(totals, key=totals.__getitem__)
        if largest.endswith(TEXT):
            remedy = f"lower schedule.phases.{largest.removesuffix(TEXT)}.distill.batch_size"
        else:
            remedy = (
                "raise accumulation_steps (the same training), lower batch_size, sequence_length, "
                "scored_share or head.draft_tokens"
            )
        note = f"the run does not fit; {remedy}, or set base.dtype=bfloat16"
    elif not _has_weights(setup):
        note = "there are no hours: the weights of the base are not on this machine"
    else:
        hours, real = _measure(setup, accelerator, phases, rows)
        note = "hours and the peak are measured in a few steps; hours of text are without drafts"
        if server:
            note = "hours are measured, for a server that never lets the trainer wait"
        else:
            peak = real
    return {
        "device": str(device),
        "processes": accelerator.num_processes,
        "fits": fits,
        "room_bytes": room,
        "peak_bytes": peak,
        "memory_bytes": memory,
        "phases": {one.name: _work(shapes, one) for one in phases},
        "hours": hours,
        **({"server": server} if server else {}),
        "disk_bytes": _disk(shapes),
        "note": note,
    }


def _device_of(base: dict[str, Any], accelerator: Accelerator) -> torch.device:
    """Return the device of a base, which this machine need not have."""
    name = str(accelerator.device) if base["device"] == "auto" else base["device"]
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise InputError(
            f"base.device must name a torch device, got {name!r:.80}; use cpu, cuda, or auto"
        ) from error


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
    names = ("model.safetensors", "model.safetensors.index.json")
    revision = setup.base["revision"]
    found = (try_to_load_from_cache(source, name, revision=revision) for name in names)
    return any(isinstance(one, str) for one in found)


def _measure(
    setup: Setup, accelerator: Accelerator, phases: list[ScheduledPhase], rows: dict[str, int]
) -> tuple[dict[str, float], int]:
    """Return the hours of each stage and the peak bytes, from real steps on random tokens."""
    base = load_base(setup.base, accelerator)
    if setup.init:
        head = resume_head(setup.init, base, setup.head["kind"])
    else:
        head = build_for_base(setup.head, base)
    teacher, hours = setup.teacher(base, head), {}
    try:
        stepper = StepRunner(teacher, setup.schedule, accelerator, setup.seed)
        machine.restart_peak(base.device)
        for phase in phases:
            distill = phase.settings.distill
            if distill and distill.engine == "local" and base.has_layers:
                with teacher.as_loaded():
                    seconds = _text_seconds(distill, base) / accelerator.num_processes
                hours[f"{phase.name}{TEXT}"] = seconds / 3600
            teacher.begin(phase)

            def step(phase: ScheduledPhase = phase) -> None:
                batch = setup.batch(phase.settings, rows[phase.name], base, head)
                stepper.step(batch, phase, phase.first)
                machine.synchronise(base.device)

            hours[phase.name] = phase.settings.steps * _seconds(step, TIMED_STEPS) / 3600
        return hours, machine.peak_bytes(base.device)
    finally:
        teacher.leave()


def _text_seconds(distill: DistillSettings, base: FrozenBase) -> float:
    """Return the seconds to generate a phase's text, from a short batch without drafts."""
    number = min(distill.batch_size, distill.num_samples)
    new_tokens = min(TRIAL_TOKENS, distill.new_tokens)
    prompts = [[at % base.vocab_size for at in range(distill.prompt_tokens)]] * number
    seconds = _seconds(partial(generate, base, None, prompts, max_new_tokens=new_tokens), 1)
    return distill.num_samples / number * seconds * distill.new_tokens / new_tokens


def _seconds(action: Callable[[], object], times: int) -> float:
    """Return the median time of an action after a first one; the slowest process counts."""
    seconds = []
    for _ in range(1 + times):
        began = time.perf_counter()
        action()
        seconds.append(most(time.perf_counter() - began))
    return median(seconds[1:])


def _work(shapes: "Shapes", phase: ScheduledPhase) -> dict[str, int]:
    """Return the work of a phase over all processes."""
    settings, data = phase.settings, shapes.setup.data
    sequences = settings.steps * settings.batch_size
    tokens = sequences * row_tokens(settings, data, shapes.base.max_length)
    return {
        "steps": settings.steps,
        "batch_size": settings.batch_size,
        "tokens": tokens,
        "flops": int(sequences * shapes.row_flops[phase.name]),
        # what a cache stores, or a server sends
        "feature_bytes": tokens * shapes.token_bytes,
    }


def _server(shapes: "Shapes", num_processes: int) -> dict[str, Any]:
    """Return what a server of all these trainers needs, by the GPUs that share its weights."""
    setup, layers = shapes.setup, shapes.layers
    asked, requests = setup.features, setup.features.concurrency * num_processes
    base = shaped_base(setup.base | {"ends_only": False}, server_dtype(setup.base["dtype"]))
    longest = longest_row(setup.schedule, setup.data, base.max_length)
    config: Any = base.config
    heads = config.num_attention_heads
    shared = getattr(config, "num_key_value_heads", None) or heads
    states = len(layers) * base.width * base.dtype.itemsize
    gpus = {}
    for number in GPUS:
        if heads % number == 0:
            # each GPU has all numbers of a state, and its part of the keys and values
            slot = base.slot_bytes // min(number, shared) + states
            gpus[number] = {
                "weights": _stored_bytes(base.model) // number,
                "cache per token": slot,
                "cache of all open requests": slot * requests * longest,
            }
    files = requests * max(len(asked.url), 1) * longest * shapes.token_bytes
    return {
        "layers": layers,
        "feature_bytes_per_token": shapes.token_bytes,
        "folder_bytes": min(files, int(num_processes * asked.max_gib * 2**30)),
        "bytes_per_gpu_by_gpus": gpus,
    }


def _disk(shapes: "Shapes") -> Parts:
    """Return the most bytes that a run writes, without a feature cache."""
    phases, head = shapes.setup.schedule.phases.values(), shapes.saved_bytes
    texts = [one.distill for one in phases if one.distill]
    tokens = sum(one.num_samples * text_tokens(one) for one in texts)
    return {
        f"checkpoints ({KEPT}, and one in progress)": (KEPT + 1) * (head + shapes.moments),
        "heads (after each phase, the best, and the last)": (len(phases) + 2) * head,
        # an int32 and its loss mask
        "generated text": tokens * 5,
    }


def automatic(schedule: Schedule) -> list[str]:
    """Return the names of the phases with `batch_size=auto`."""
    return [name for name, one in schedule.phases.items() if one.batch_size == AUTO]


def largest_batches(setup: Setup, accelerator: Accelerator) -> dict[str, int]:
    """Return the batch size, over all processes, of each phase with `auto`."""
    device = device_of(str(_device_of(setup.base, accelerator)))
    sharding = sharding_of(accelerator, setup.base["device"])
    shapes, names = Shapes(setup, device), automatic(setup.schedule)
    room, shares = (1 - MARGIN) * room_of(device), readers(sharding, accelerator)["world_size"]
    if device.type == "cpu":
        room -= machine.held_bytes(device)
    if sharding:
        # shapes are those of a whole base
        room += (1 - 1 / sharding.mesh.size()) * shapes.weights()["base weights"]
    found = {}
    for phase in schedule_phases(setup.schedule):
        if phase.name in names:
            rows = phase.settings.accumulation_steps
            length = row_tokens(phase.settings, setup.data, shapes.base.max_length)
            while 2 * rows * length <= MAX_TOKENS:
                if sum(shapes.step(phase, 2 * rows).values()) > room:
                    break
                rows *= 2
            found[phase.name] = rows * shares
    return found


def room_of(device: torch.device) -> int:
    """Return the bytes that a process can use on its device, including those it uses now.

    The process with the least memory decides for all.
    """
    room = machine.available_bytes(device)
    if device.type == "cpu":
        sharing = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        room = room // sharing + machine.held_bytes(device)
    else:
        # unused memory in torch's allocator already counts as available
        room += torch.cuda.memory_allocated(device)
    return int(-most(-float(room)))


def most(value: float) -> float:
    """Return the maximum over all processes."""
    return max(gather_object([value]))


def server_dtype(dtype: str) -> torch.dtype:
    """Return the precision of a server: `auto` is that of GPUs."""
    return getattr(torch, dtype.replace("auto", "bfloat16"))


def shaped_base(base: dict[str, Any], dtype: torch.dtype) -> FrozenBase:
    """Return a base on the meta device, where tensors have shapes and no content."""
    config = load_config(located(base["model"]), revision=base["revision"])
    text_config = config.get_text_config()
    num_layers = text_config.num_hidden_layers
    if base["ends_only"]:
        text_config.num_hidden_layers = 0
    with torch.device("meta"):
        model: PreTrainedModel = auto_class(config).from_config(
            config,
            dtype=dtype,
            attn_implementation=attention_of(config, "sdpa"),
            trust_remote_code=False,
        )
    model.config.get_text_config().num_hidden_layers = num_layers
    # no checks of the attention: there are no values to compare
    made = FrozenBase(model.eval().requires_grad_(False), owned=False)
    made.has_layers = not base["ends_only"]
    return made


def shaped_head(setup: Setup, base: FrozenBase) -> Head:
    """Return the head of a training on the meta device."""
    init = load_head(setup.init) if setup.init else None
    with torch.device("meta"):
        head = build_head(setup.head, **head_sizes(base)) if init is None else init.to("meta")
    choose_layers(head, base.num_layers)
    return head


class Shapes:
    """A training on the meta device, where tensors have shapes and no content.

    The head computes in the base's dtype, as in mixed precision.
    """

    def __init__(self, setup: Setup, device: torch.device) -> None:
        self.setup = setup
        auto = "float32" if device.type == "cpu" else "bfloat16"
        dtype = getattr(torch, setup.base["dtype"].replace("auto", auto))
        self.base = shaped_base(setup.base, dtype)
        self.head = shaped_head(setup, self.base)
        self.head.to(dtype)
        self.teacher = setup.teacher(self.base, self.head)
        self.objective = Objective(self.head.train())
        learned = roles(self.head, setup.schedule, self.teacher.parameters)
        self.learned = [one for role in learned.values() for one in role]
        # AdamW has two moments of a number, and Muon one
        numbers = 2 * _numbers(self.learned) - _numbers(learned["hidden"])
        self.moments = LEARNED_BYTES * numbers
        """Bytes that the optimizers keep."""
        self.saved_bytes = LEARNED_BYTES * _numbers(self.head.state_dict().values())
        """Bytes of the head."""
        self.row_flops: dict[str, float] = {}
        """FLOPs of a sequence in a step of each phase."""
        self.on_cpu = device.type == "cpu"
        self.layers = server_layers(self.head, self.base.num_layers)
        """Layers that a server gives."""
        width, sent = self.base.width, server_dtype(setup.base["dtype"])
        self.token_bytes = (
            (1 + len(self.head.aux_layers)) * width * dtype.itemsize
            if self.base.has_layers
            else server_token_bytes(self.layers, width, sent)
        )
        """Bytes of a token's features in a cache, or in a server's file."""

    def weights(self) -> Parts:
        """Return the memory that does not depend on the batch."""
        size = self.base.dtype.itemsize
        # mixed precision keeps a second copy during a step
        cast = size * _numbers(self.learned) if size < LEARNED_BYTES else 0
        return {
            "base weights": _stored_bytes(self.base.model),
            "head weights": self.saved_bytes + cast,
            "optimizer state": self.moments,
        }

    def step(self, phase: ScheduledPhase, rows: int) -> Parts:
        """Return the peak of a process in a step with `rows` rows, before the optimizer."""
        self.teacher.begin(phase)
        settings, parts = phase.settings, phase.settings.accumulation_steps
        rows = -(-rows // parts)
        batch = self.setup.batch(settings, rows, self.base, self.head)
        loss_mask = batch.loss_mask
        counted = int(loss_mask.numel() * settings.scored_share)
        # with several parts the second one runs next to the gradients of the first
        runs = min(parts, 2)
        with FusedKernels(), PeakMemory(counted) as memory, flop_counter() as counter:
            for _ in range(runs):
                counts = label_counts(self.head, batch, loss_mask, settings)
                step = Step(phase, phase.first, 0, batch, loss_mask, counts)
                self.teacher.losses(step, self.objective)[0].backward()
        self.row_flops[phase.name] = counter.get_total_flops() / (runs * rows)
        gradients = _numbers(one for one in self.learned if one.grad is not None)
        for one in self.learned:
            one.grad = None
        # real gradients are float32
        more = gradients * (LEARNED_BYTES - self.base.dtype.itemsize)
        found = self.weights() | {"gradients, activations and logits": memory.peak + max(more, 0)}
        if not self.base.has_layers and self.on_cpu:
            ahead = AHEAD * parts * batch.tokens.numel()
            found["hidden states fetched ahead"] = ahead * self.token_bytes
        return found

    def text(self, distill: DistillSettings) -> Parts:
        """Return the peak of text generation with the local engine."""
        prompts = torch.empty(distill.batch_size, distill.prompt_tokens, dtype=torch.long)
        with self.teacher.as_loaded(), FusedKernels(), PeakMemory() as memory:
            self.base.read(prompts.to("meta"), self.head.aux_layers)
        # new texts have their own rows until they are copied into the batch
        rows = distill.batch_size + distill.batch_size // REFILL
        slots = rows * (text_tokens(distill) + 2 * self.head.depth)
        return self.weights() | {
            "keys and values": slots * self.base.slot_bytes,
            "activations and logits": memory.peak,
        }


class RandomStates(FeatureSource):
    """Replacement for a server in a plan."""

    def __init__(
        self, base: FrozenBase, aux_layers: tuple[int, ...], layers: Sequence[int]
    ) -> None:
        self.base, self.aux_layers, self.layers = base, aux_layers, layers

    @torch.no_grad()
    def features(self, batch: TokenBatch) -> Features:
        """Return random features of a batch."""
        shape = (*batch.tokens.shape, len(self.layers), self.base.width)
        states = torch.rand(shape, dtype=self.base.dtype, device=self.base.device)
        return features_of(states, self.layers, self.aux_layers, self.base, batch)


def _stored_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of a model's weights; tied weights share a storage."""
    storages = {_key(one): one.untyped_storage() for one in model.parameters()}
    return sum(one.nbytes() for one in storages.values())


def _numbers(tensors: Iterable[Tensor]) -> int:
    return sum(one.numel() for one in tensors)


class PeakMemory(TorchDispatchMode):
    """Tracks the storages that are created and alive inside the context.

    On the meta device tensors have no content: a mask selects `rows` elements, and values are one.
    """

    def __init__(self, rows: int = 0) -> None:
        super().__init__()
        self.rows = rows
        self.peak = 0
        """Highest sum of the bytes."""
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and record new storages in its result."""
        del types
        given = _stored((args, kwargs))
        is_meta = bool(given) and given[0].is_meta
        if is_meta and func is torch.ops.aten.nonzero.default:
            rows = min(self.rows, given[0].numel())
            out = torch.empty((rows, given[0].ndim), dtype=torch.long, device="meta")
        elif is_meta and func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if given[0].is_floating_point() else 1
        else:
            out = func(*args, **(kwargs or {}))
        # views and in-place results share a storage with the arguments
        known = {_key(one) for one in given} | self._alive.keys()
        for one in _stored(out):
            if _key(one) not in known:
                self._add(one)
        return out

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._alive = {key: one for key, one in self._alive.items() if not one[0].expired()}
        self._alive[_key(tensor)] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))


def _stored(values: Any) -> list[Tensor]:
    """Return the tensors among some values that have a torch storage."""
    tensors = [one for one in tree_leaves(values) if isinstance(one, Tensor)]
    return [one for one in tensors if torch._C._has_storage(one)]


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class FusedKernels(TorchFunctionMode):
    """Makes attention and experts on the meta device allocate as their kernels do.

    Otherwise attention would use the math kernel, which stores the whole attention matrix. The
    grouped product of experts has no shapes there except in bfloat16.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a torch function."""
        del types
        if func is F.scaled_dot_product_attention and args[0].is_meta:
            func = _fused
        if getattr(func, "__name__", "") == "_grouped_mm" and args[0].is_meta:
            # all rows by one expert's matrix have the shapes of the grouped product
            return args[0] @ args[1][0]
        return func(*args, **(kwargs or {}))


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *_: Any,
    enable_gqa: bool = False,
    **__: Any,
) -> Tensor:
    if enable_gqa:
        group = query.shape[1] // key.shape[1]
        key, value = (one.repeat_interleave(group, dim=1) for one in (key, value))
    bias = None
    if attn_mask is not None:
        # kernels add it as a bias
        bias = attn_mask.to(query.dtype).expand(*query.shape[:-1], key.shape[-2])
    learns = torch.is_grad_enabled() and query.requires_grad
    return torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, bias, learns)[
        0
    ]

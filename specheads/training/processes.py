"""Processes of a run: accelerate's configuration, sharding, collective calls, and equal bits."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import (
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
    gather_object,
)
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from specheads.base.ends import ServedBase
from specheads.base.model import FrozenBase
from specheads.base.sharding import Sharding
from specheads.config.shared import BaseSettings
from specheads.core.errors import InputError
from specheads.core.machine import computes_bfloat16

T = TypeVar("T")
SHARDS, PARALLEL = "ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG"
"""Variables by which the launcher requests a sharded model."""
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
TIMEOUT = timedelta(hours=2)
"""Longest wait of a process for the others: one may hash a corpus, load an engine of text, write a
checkpoint to a slow disk, or wait for a lost server. NCCL's own limit is ten minutes."""


def accelerator_of_environment(dtype: str = "auto") -> Accelerator:
    """Return the accelerator of this run, as the launcher configured it.

    Sharding applies to the base: see `load_base`. Each process has the whole head. The launcher's
    mixed precision applies unless it is "no", which is also its default: then the head trains in
    bfloat16 if the machine supports it and the base's `dtype` is not float32 or float64.
    """
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    is_unsupported = _is_set("ACCELERATE_USE_DEEPSPEED") or _is_set("ACCELERATE_USE_MEGATRON_LM")
    # in fp16 the gradients of a mean over many rows underflow before a scaler sees them
    if is_unsupported or precision not in ("no", "bf16"):
        raise InputError(
            "training needs mixed_precision=bf16 or no, without DeepSpeed and Megatron, but "
            f"accelerate is configured for one of these or mixed_precision={precision}; start from "
            "one of configs/accelerate"
        )
    fix_workspace()
    _join_on_gpus()
    with _hidden_sharding():
        return Accelerator(
            # by default accelerate connects processes on GPUs only
            cpu=not torch.accelerator.is_available(),
            mixed_precision=precision if precision != "no" else _mixed_precision(dtype),
            # buffers of a head come from the base and are equal on all processes
            kwargs_handlers=[
                DistributedDataParallelKwargs(broadcast_buffers=False),
                InitProcessGroupKwargs(timeout=TIMEOUT),
            ],
        )


def _join_on_gpus() -> None:
    """Connect the processes that a launcher started on GPUs; accelerate connects those on CPUs.

    accelerate chooses the GPU of a process after it has connected it, and does not tell NCCL.
    """
    rank = os.environ.get("LOCAL_RANK")
    is_on_gpu = torch.cuda.is_available() and not _is_set("ACCELERATE_USE_CPU")
    if rank is None or not is_on_gpu or distributed.is_initialized():
        return
    if int(rank) >= (num_gpus := torch.cuda.device_count()):
        raise InputError(
            f"each process needs a GPU of its own, and process {rank} of this machine has none of "
            f"{num_gpus}; start {num_gpus} processes (--num_processes, --nproc_per_node)"
        )
    device = torch.device("cuda", int(rank))
    torch.cuda.set_device(device)
    distributed.init_process_group("nccl", device_id=device, timeout=TIMEOUT)


def leave_process_group() -> None:
    """Leave the group of a CPU run, because gloo's threads may abort a process that only exits."""
    if distributed.is_initialized() and distributed.get_backend() == "gloo":
        distributed.destroy_process_group()


def load_base(settings: BaseSettings, accelerator: Accelerator) -> FrozenBase:
    """Load a base onto this process's device, or this process's shard of it."""
    choices = asdict(settings)
    if settings.device == "auto":
        choices["device"] = sharding_of(accelerator, "auto") or str(accelerator.device)
    with _hidden_sharding():
        return FrozenBase.load(**choices)


def load_text_base(settings: BaseSettings, accelerator: Accelerator) -> FrozenBase:
    """Load a base whose text another program generates: on the CPU, in the device's precision."""
    on_gpu = settings.device.startswith("cuda") or (
        settings.device == "auto" and accelerator.device.type == "cuda"
    )
    dtype = "bfloat16" if on_gpu and settings.dtype == "auto" else settings.dtype
    return load_base(replace(settings, device="cpu", dtype=dtype), accelerator)


def load_served_base(settings: BaseSettings, accelerator: Accelerator) -> ServedBase:
    """Load the ends of a base, whose layers are at a server, onto this process's device."""
    with _hidden_sharding():
        return ServedBase.load(
            settings.model,
            revision=settings.revision,
            dtype=settings.dtype,
            device=str(accelerator.device) if settings.device == "auto" else settings.device,
        )


@dataclass(frozen=True, slots=True)
class RowShare:
    """Share of the rows of a step that a process reads: number `rank` of `world_size`."""

    rank: int
    world_size: int


def row_share(sharding: Sharding | None, accelerator: Accelerator) -> RowShare:
    """Return this process's share of the rows; the shares are nearly equal."""
    num_readers = sharding.readers if sharding else 1
    return RowShare(
        accelerator.process_index // num_readers, accelerator.num_processes // num_readers
    )


def sharding_of(accelerator: Accelerator, device: str) -> Sharding | None:
    """Return the sharding of a base; None if each process has all of it."""
    if device != "auto":
        return None
    try:
        parallel: Any = ParallelismConfig()
        plugin: Any = FullyShardedDataParallelPlugin() if _is_set(SHARDS) else None
    except (ImportError, ValueError) as error:
        raise InputError(
            f"accelerate's configuration must be valid, but accelerate refused it: {error}; "
            "start from one of configs/accelerate"
        ) from error
    num_processes = accelerator.num_processes
    tensor_size, shard_size = parallel.tp_size, parallel.dp_shard_size
    if num_processes == 1 or (plugin is None and tensor_size == 1):
        return None
    group = tensor_size if tensor_size > 1 else shard_size if shard_size > 1 else num_processes
    is_unsupported = plugin and (plugin.fsdp_version != 2 or tensor_size > 1)
    is_unsupported = is_unsupported or parallel.cp_size > 1 or parallel.sp_size > 1
    if is_unsupported or num_processes % group:
        raise InputError(
            "a base supports either FSDP2 (fsdp_version=2) or tensor parallelism (tp_size) over "
            f"equal groups of processes, got groups of {group} of {num_processes} processes, "
            "another sharding, or both; use configs/accelerate/fsdp2.yaml or tensor_parallel.yaml"
        )
    shape, device_type = (num_processes // group, group), accelerator.device.type
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=("replica", "shard"))["shard"]
    # groups that a mesh creates have torch's own limit
    distributed.distributed_c10d._set_pg_timeout(TIMEOUT, mesh.get_group())
    if plugin is None:
        return Sharding(mesh, accelerator.device, tensor_parallel=True)
    return Sharding(
        mesh, accelerator.device, reshard=plugin.reshard_after_forward, offload=plugin.cpu_offload
    )


def _is_set(name: str) -> bool:
    return os.environ.get(name, "").lower() == "true"


@contextmanager
def _hidden_sharding() -> Iterator[None]:
    """Hide the sharding variables, by which accelerate would shard the head.

    transformers would not load the weights either.
    """
    hidden = {name: os.environ.pop(name) for name in (SHARDS, PARALLEL) if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def _mixed_precision(dtype: str) -> str:
    if dtype in ("float32", "float64"):
        return "no"
    if torch.cuda.is_available():
        return "bf16" if torch.cuda.is_bf16_supported() else "no"
    # a base with half the bits gives such features, on a CPU that only emulates them too
    return "bf16" if dtype != "auto" or computes_bfloat16() else "no"


def fix_workspace() -> None:
    """Set the size of cuBLAS's workspace unless it is set; torch reads it at its first product.

    Without it a resumed run may differ in its last bits.
    """
    if not torch.cuda.is_initialized():
        os.environ.setdefault(WORKSPACE, ":4096:8")


@contextmanager
def deterministic_backward(device: torch.device) -> Iterator[None]:
    """Use torch's deterministic algorithms for a backward pass on a GPU; restore settings after it.

    A resumed run needs the same bits as an uninterrupted one. One kernel of a training step adds in
    an order that differs from run to run: the backward pass of torch's fused attention. Forward
    passes are repeatable without the setting, which would refuse the kernel that counts the tokens
    of each expert in some bases. torch also fills uninitialised memory by default; that is switched
    off. Without the size of cuBLAS's workspace torch would refuse its products.
    """
    if device.type != "cuda" or WORKSPACE not in os.environ:
        yield
        return
    deterministic: Any = torch.utils.deterministic
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = deterministic.fill_uninitialized_memory
    # attention ignores the setting if warn_only is true
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        deterministic.fill_uninitialized_memory = fills


@contextmanager
def explain_lost_process() -> Iterator[None]:
    """Turn the error after another process ended into one line.

    gloo reports a lost process at once. With NCCL the launcher ends the others; without a launcher
    they wait for `TIMEOUT`.
    """
    try:
        yield
    # loading a sharded base reports a lost process with another message
    except (RuntimeError, InputError) as error:
        if "by peer" not in str(error):
            raise
        raise InputError(
            "a run needs all its processes, but another one ended (see its own output for the "
            "reason); run the same command again to resume"
        ) from error


def on_all_processes(function: Callable[[], T]) -> list[T]:
    """Call a function on every process; return all results or raise the first InputError."""
    results: list[T] = []
    refusal: tuple[str, str] | None = None
    try:
        results = [function()]
    except InputError as error:
        refusal = str(error), error.details
    gathered = gather_object([(results, refusal)])
    for _, refusal in gathered:
        if refusal:
            raise InputError(*refusal)
    return [result for results, _ in gathered for result in results]

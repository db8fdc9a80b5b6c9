"""What several processes of one run do together, and how accelerate's configuration asks for it."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DynamoBackend,
    FullyShardedDataParallelPlugin,
    gather_object,
)
from torch.distributed.device_mesh import init_device_mesh

from specheads.base.model import FrozenBase
from specheads.base.sharding import Sharding
from specheads.config import Base
from specheads.core.errors import InputError
from specheads.core.machine import computes_bfloat16
from specheads.training.repeatable import fix_workspace

T = TypeVar("T")

SHARDS, PARALLEL = "ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG"
"""Variables by which the launcher says that a configuration shares out a model."""


def accelerator_of_environment(dtype: str = "auto") -> Accelerator:
    """Return what joins the processes of a run, as the launcher was configured.

    A sharded model is the base: see `load_base`. The head is whole in each process. What the
    launcher says of mixed precision counts unless it is "no", which it says unasked too: then a
    head computes in bfloat16 where the machine does, and no `dtype` of the base says otherwise.

    Raises:
        ValueError: The configuration names an engine or a precision that is not supported.
    """
    if _is_set("ACCELERATE_USE_DEEPSPEED") or _is_set("ACCELERATE_USE_MEGATRON_LM"):
        raise InputError(
            "a base is sharded by FSDP2 or by tensor parallelism, and accelerate is configured "
            "for DeepSpeed or Megatron; use configs/accelerate/fsdp2.yaml, which does what ZeRO-3 "
            "does"
        )
    asked = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if asked not in ("no", "bf16"):
        # of fp16 the gradients of a mean over many rows are zeros before any scaler sees them
        raise InputError(
            "a head learns in bfloat16 or float32, and accelerate is configured for "
            f"mixed_precision={asked}; set it to bf16, or to no"
        )
    fix_workspace()
    with _whole():
        return Accelerator(
            # unasked, accelerate joins processes on GPUs only: two on CPUs would each train alone
            cpu=not torch.accelerator.is_available(),
            mixed_precision=asked if asked != "no" else _precision(dtype),
            # what a head borrows from the base is a buffer, the same everywhere already
            kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],
        )


def load_base(settings: Base, accelerator: Accelerator) -> FrozenBase:
    """Load a base, by itself onto this process's own device, or a part of it as accelerate says.

    Raises:
        ValueError: As `FrozenBase.load`, or the processes cannot share it as they are configured.
    """
    choices = asdict(settings)
    if settings.device == "auto":
        choices["device"] = sharding_of(settings, accelerator) or str(accelerator.device)
    with _whole():
        base = FrozenBase.load(**choices)
    compiler: Any = accelerator.state.dynamo_plugin
    # a layer that is gathered while it computes is no part of a graph
    if compiler.backend != DynamoBackend.NO and base.sharding is None:
        base.compile_reads(**compiler.to_kwargs())
    return base


def readers(sharding: Sharding | None, accelerator: Accelerator) -> dict[str, int]:
    """Return which rows a process reads: `rank` of `world_size` nearly equal shares of them."""
    size = sharding.readers if sharding else 1
    return {
        "rank": accelerator.process_index // size,
        "world_size": accelerator.num_processes // size,
    }


def sharding_of(settings: Base, accelerator: Accelerator) -> Sharding | None:
    """Return how processes share out a base; None where each has its own, as where it is placed.

    Raises:
        ValueError: As `load_base`, of processes.
    """
    sharding = _sharding(accelerator) if settings.device == "auto" else None
    if sharding and settings.quantization != "none":
        raise InputError(
            "a sharded base has plain weights, got base.quantization="
            f"{settings.quantization}; leave it out, or use configs/accelerate/ddp_8gpu.yaml"
        )
    return sharding


def _sharding(accelerator: Accelerator) -> Sharding | None:
    """Return how accelerate's configuration has the base shared out; None: not at all."""
    try:
        parallel: Any = ParallelismConfig()
        plugin: Any = FullyShardedDataParallelPlugin() if _is_set(SHARDS) else None
    except (ImportError, ValueError) as error:
        raise InputError(
            f"accelerate's configuration must be one that it takes itself, and it says: {error}; "
            "begin with one of configs/accelerate"
        ) from error
    processes = accelerator.num_processes
    tensor, shard = parallel.tp_size, parallel.dp_shard_size
    if processes == 1 or (plugin is None and tensor == 1):
        return None
    if plugin and plugin.fsdp_version != 2:
        raise InputError(
            f"a base is sharded by FSDP2, and accelerate is configured for fsdp_version="
            f"{plugin.fsdp_version}; set it to 2, as configs/accelerate/fsdp2.yaml does"
        )
    if (plugin and tensor > 1) or parallel.cp_size > 1 or parallel.sp_size > 1:
        raise InputError(
            "a base is shared out by parameters (FSDP2) or by products (tp_size), and accelerate "
            "is configured for both, or for parts of sequences; choose one of "
            "configs/accelerate/fsdp2.yaml and tensor_parallel.yaml"
        )
    size = tensor if tensor > 1 else shard if shard > 1 else processes
    if processes % size:
        raise InputError(
            f"a base is shared out among equal groups of processes, and {processes} processes "
            f"make no groups of {size}; set num_processes to a multiple of it"
        )
    shape, kind = (processes // size, size), accelerator.device.type
    mesh = init_device_mesh(kind, shape, mesh_dim_names=("replica", "part"))["part"]
    if plugin is None:
        return Sharding(mesh, accelerator.device, tensor_parallel=True)
    return Sharding(
        mesh, accelerator.device, reshard=plugin.reshard_after_forward, offload=plugin.cpu_offload
    )


def _is_set(name: str) -> bool:
    return os.environ.get(name, "").lower() == "true"


@contextmanager
def _whole() -> Iterator[None]:
    """Hide a sharding: accelerate would shard the head, and transformers load nothing for it."""
    said = {name: os.environ.pop(name) for name in (SHARDS, PARALLEL) if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(said)


def _precision(dtype: str) -> str:
    if dtype in ("float32", "float64"):
        return "no"
    if torch.cuda.is_available():
        return "bf16" if torch.cuda.is_bf16_supported() else "no"
    return "bf16" if computes_bfloat16() else "no"


@contextmanager
def naming_lost() -> Iterator[None]:
    """Say in a line that another process of the run ended, where it is missed.

    Over gloo that is seen at once. With NCCL the launcher sees it and ends the others; without one
    they would wait for NCCL's own timeout, ten minutes.
    """
    try:
        yield
    # a base that is tried with the others' parts tells what it misses in words of its own
    except (RuntimeError, InputError) as error:
        if "by peer" not in str(error):
            raise
        raise InputError(
            "a run needs all its processes, and another one of them ended (it or its machine may "
            "say why); start them again, and the same command goes on"
        ) from error


def together(act: Callable[[], T]) -> list[T]:
    """Act on every process and return what each of them got; where one is refused, all are."""
    got: list[T] = []
    refused: tuple[str, str] | None = None
    try:
        got = [act()]
    except InputError as error:
        refused = str(error), error.details
    told = gather_object([(got, refused)])
    for _, refused in told:
        if refused:
            raise InputError(*refused)
    return [one for got, _ in told for one in got]

"""What vLLM servers need that give the hidden states of a training. See docs/scale.md."""

from dataclasses import dataclass
from typing import Any

from specheads.training.memory import MetaTraining, meta_base, server_dtype, weights_bytes
from specheads.training.schedule import longest_row

NUMBERS_OF_GPUS = (1, 2, 4, 8)
"""Numbers of GPUs of a server in a plan."""


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


def plan_server(training: MetaTraining, num_processes: int) -> ServerPlan:
    """Return what a server needs for `num_processes` trainers."""
    setup, features = training.setup, training.setup.features
    base = meta_base(setup.base, server_dtype(setup.base.dtype))
    num_requests = features.concurrency * num_processes
    row_tokens = longest_row(setup.schedule, setup.data, base.max_length)
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
    num_files = num_requests * max(len(features.url), 1)
    files_bytes = num_files * row_tokens * training.feature_bytes_per_token
    return ServerPlan(
        layers=training.server_layers,
        feature_bytes_per_token=training.feature_bytes_per_token,
        folder_bytes=min(files_bytes, int(num_processes * features.max_gib * 2**30)),
        memory_by_gpus=memory_by_gpus,
    )

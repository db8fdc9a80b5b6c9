"""A base whose layers are sharded over several processes.

See docs/scale.md.
"""

from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import PreTrainedModel

from specheads.core.errors import InputError

STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
"""Supported styles in transformers' `base_model_tp_plan`."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """How the layers of a base are sharded; every process has a copy of everything else.

    With FSDP2 each process reads its own rows, with tensor parallelism all read the same ones.
    """

    mesh: DeviceMesh
    """Processes that share one base."""
    device: torch.device
    """Device of this process."""
    tensor_parallel: bool = False
    """Whether to use tensor parallelism, by the model's `base_model_tp_plan`."""
    reshard: bool = True
    """Whether a gathered layer is freed as soon as it has computed."""
    offload: OffloadPolicy = field(default_factory=OffloadPolicy)
    """Where a process stores its shards between uses."""

    @property
    def readers(self) -> int:
        """Number of processes that read the same rows."""
        return self.mesh.size() if self.tensor_parallel else 1

    def apply(self, model: PreTrainedModel) -> None:
        """Shard a model that each process has loaded on its CPU; refuse one that has no plan."""
        if self.tensor_parallel:
            self._share_products(model)
        else:
            self._share_parameters(model)
        for value in chain(model.parameters(), model.buffers()):
            if not isinstance(value, DTensor):
                value.data = value.data.to(self.device)

    def _share_parameters(self, model: PreTrainedModel) -> None:
        names = set(model._no_split_modules or ())
        layers = [layer for layer in model.base_model.modules() if type(layer).__name__ in names]
        if not layers:
            raise InputError(
                "FSDP needs a base whose layers transformers names (_no_split_modules), and "
                f"{model.config.model_type!r} names none; use configs/accelerate/ddp_8gpu.yaml"
            )
        inner = {id(value) for layer in layers for value in layer.parameters()}
        outer = {value for value in model.parameters() if id(value) not in inner}
        policy: Any = {"mesh": self.mesh, "offload_policy": self.offload}
        for layer in layers:
            fully_shard(layer, reshard_after_forward=self.reshard, **policy)
        # sharding the root prefetches the next layer while one computes
        root, kind = model.base_model, type(model.base_model)
        fully_shard(root, ignored_params=outer, **policy)
        # transformers looks up by this class's name which hidden states it can return
        root.__class__ = kind

    def _share_products(self, model: PreTrainedModel) -> None:
        config: Any = model.config.get_text_config()
        plan, size = config.base_model_tp_plan or {}, self.mesh.size()
        if strange := sorted({*plan.values()} - {*STYLES}) or ["none"] * (not plan):
            raise InputError(
                "tensor parallelism needs a base with a plan of colwise and rowwise layers, and "
                f"that of {config.model_type!r} has {', '.join(strange)}; use "
                "configs/accelerate/fsdp2.yaml"
            )
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        if heads % size:
            raise InputError(
                f"tensor parallelism needs as many key and value heads in each process, got "
                f"{heads} for {size} processes; set a tp_size that divides {heads}"
            )
        styles: Any = {name: STYLES[style]() for name, style in plan.items()}
        # each process has read the same file, so no broadcast is needed
        parallelize_module(model.base_model, self.mesh, styles, src_data_rank=None)


def whole(value: Tensor) -> Tensor:
    """Gather a sharded tensor; all its processes must call this together."""
    if not isinstance(value, DTensor):
        return value
    # offloaded shards move to the device of the gather
    shard: Any = value.to(value.device_mesh.device_type)
    return shard.full_tensor()

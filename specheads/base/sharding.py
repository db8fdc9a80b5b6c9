"""A base whose layers lie in parts in several processes, which compute it together.

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
"""What a `base_model_tp_plan` of transformers may say of a layer's matrices here."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """How the layers of a base are shared out; all else of it, its tables too, is in each process.

    Either by parameters (FSDP2): a layer is gathered while it computes, and its processes read rows
    of their own. Or by products (tensor parallelism): no matrix is ever whole, and its processes
    read the same rows.
    """

    mesh: DeviceMesh
    """Processes that hold one base together."""
    device: torch.device
    """This process's own."""
    tensor_parallel: bool = False
    """Whether products are shared out, as the model's `base_model_tp_plan` says."""
    reshard: bool = True
    """Whether a layer that was gathered is given up again as soon as it has computed."""
    offload: OffloadPolicy = field(default_factory=OffloadPolicy)
    """Where a process keeps its parts while they do not compute."""

    @property
    def readers(self) -> int:
        """Processes that read the same rows."""
        return self.mesh.size() if self.tensor_parallel else 1

    def apply(self, model: PreTrainedModel) -> None:
        """Share out a model that lies whole on the CPU of each process.

        Of a file that holds what is loaded, the processes of a machine see the same pages: no more
        than a part of it is ever copied.

        Raises:
            ValueError: The model's layers are not known, or it has no plan that is known here.
        """
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
        rest = {value for value in model.parameters() if id(value) not in inner}
        how: Any = {"mesh": self.mesh, "offload_policy": self.offload}
        for layer in layers:
            fully_shard(layer, reshard_after_forward=self.reshard, **how)
        # the layers' common root, which has the next one gathered while one computes
        root, kind = model.base_model, type(model.base_model)
        fully_shard(root, ignored_params=rest, **how)
        # transformers knows by the name of this class which hidden states it can return
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
                f"tensor parallelism shares out heads evenly, and {size} processes share "
                f"{heads} of keys and values; set a tp_size that divides {heads}"
            )
        styles: Any = {name: STYLES[style]() for name, style in plan.items()}
        # each process has read the same file: nothing needs to be sent
        parallelize_module(model.base_model, self.mesh, styles, src_data_rank=None)


def whole(value: Tensor) -> Tensor:
    """Return a tensor as it was before it was shared out: all its processes ask at once."""
    if not isinstance(value, DTensor):
        return value
    # what is kept on the CPU goes to where it is gathered
    there: Any = value.to(value.device_mesh.device_type)
    return there.full_tensor()

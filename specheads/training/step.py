"""One optimizer step of a head, on one or several processes."""

import math
import warnings
from contextlib import nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.profiler import record_function
from torch.utils.flop_counter import FlopCounterMode

from specheads.core.kernels import without_cudnn_attention
from specheads.core.machine import to_device
from specheads.core.texts import derive_seed
from specheads.data.packing import TokenBatch
from specheads.heads.layers.common import BorrowingHead
from specheads.training.objective import Objective, drawn_labels, label_counts, own_labels
from specheads.training.optimizers import optimizers
from specheads.training.processes import readers, repeatable
from specheads.training.schedule import PlacedPhase
from specheads.training.settings import Schedule
from specheads.training.teacher import Step, Teacher

CLIP_NORM = 1.0
"""Largest norm of the gradients of a step."""


class Stepper:
    """Takes optimizer steps for a head with a teacher."""

    def __init__(
        self, teacher: Teacher, schedule: Schedule, accelerator: Accelerator, seed: int
    ) -> None:
        self.teacher, self.head, self.accelerator = teacher, teacher.head, accelerator
        self.seed = seed
        self.shares = readers(teacher.base.sharding, accelerator)["world_size"]
        self.optimizers = [
            accelerator.prepare_optimizer(optimizer)
            for optimizer in optimizers(self.head, schedule, teacher.parameters)
        ]
        with warnings.catch_warnings():
            # accelerate uses an argument name that newer torch deprecates
            warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
            # the head stays on its base's device, which may be the CPU of a machine with a GPU
            self.objective = accelerator.prepare_model(
                Objective(self.head.train()), device_placement=False
            )

    def step(self, batch: TokenBatch, phase: PlacedPhase, number: int) -> dict[str, Tensor]:
        """Take the optimizer step with this number; return this process's share of its metrics."""
        values: dict[str, Tensor] = {}
        device = self.teacher.base.device
        steps = self._parts(batch, phase, number)
        if isinstance(self.head, BorrowingHead) and self.head.scales_streams:
            self.head.scale_streams(self.total(sum(map(self._stream_sums, steps), torch.zeros(()))))
        for step in steps:
            # for dropout in heads
            torch.manual_seed(derive_seed(step.seed, step.batch.first_sample))
            # gradients are all-reduced once, in the last part
            last = step is steps[-1]
            sharing = nullcontext() if last else self.accelerator.no_sync(self.objective)
            with sharing, without_cudnn_attention(device):
                loss, found = self.teacher.losses(step, self.objective)
                # accelerate averages over processes, but these losses are parts of one sum
                with record_function("backward"), repeatable(device):
                    self.accelerator.backward(loss * self.shares)
            for name, value in found.items():
                values[name] = values[name] + value if name in values else value
        with record_function("optimizer"):
            self._update(phase.rates(number))
        return values

    def _stream_sums(self, step: Step) -> Tensor:
        """Return the sums that measure the scale of the streams, over the positions of labels."""
        assert isinstance(self.head, BorrowingHead)
        batch = step.batch
        # a server leaves out the positions after the last label
        positions = F.pad(own_labels(batch.loss_mask, batch.document_ids), (0, 1), value=False)
        return self.head.stream_sums(self.teacher.source.features(batch), positions)

    def flops(self, batch: TokenBatch, phase: PlacedPhase, number: int) -> int:
        """Return the floating-point operations of a step on this process, without taking it."""
        # DDP's wrapper would synchronise gradients
        objective = self.accelerator.unwrap_model(self.objective)
        device = self.teacher.base.device
        undrawn = torch.random.fork_rng([device] if device.type == "cuda" else [])
        with flop_counter() as counter, undrawn, without_cudnn_attention(device):
            for step in self._parts(batch, phase, number):
                self.teacher.losses(step, objective)[0].backward()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        return counter.get_total_flops()

    def _parts(self, batch: TokenBatch, phase: PlacedPhase, number: int) -> list[Step]:
        """Return this process's parts of a step's batch."""
        head, settings, device = self.head, phase.settings, self.teacher.base.device
        seed = derive_seed(self.seed, number)
        parts = [
            (part.to(device), to_device(drawn_labels(part, head, settings, seed), device))
            for part in batch.parts(settings.accumulation_steps)
        ]
        counts = [
            label_counts(head, part.tokens, part.document_ids, loss_mask, settings)
            for part, loss_mask in parts
        ]
        counts = self.total(torch.stack(counts).sum(0))
        return [Step(phase, number, seed, part, loss_mask, counts) for part, loss_mask in parts]

    def _update(self, rates: dict[str, float]) -> None:
        """Clip the gradients and apply the optimizers."""
        learned = self.teacher.parameters
        # accelerate averages the head's gradients itself
        if gradients := [value.grad for value in learned if value.grad is not None]:
            mean = self.total(parameters_to_vector(gradients)) / self.shares
            vector_to_parameters(mean, gradients)
        self.accelerator.clip_grad_norm_([*self.head.parameters(), *learned], CLIP_NORM)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rates[group["role"]]
            optimizer.step()
            optimizer.zero_grad()

    def total(self, values: Tensor) -> Tensor:
        """Return the sum over processes; those that read the same rows count once."""
        total = self.accelerator.reduce(values, reduction="sum")
        assert isinstance(total, Tensor)
        copies = self.accelerator.num_processes // self.shares
        return total / copies if total.is_floating_point() else total // copies


def flop_counter() -> FlopCounterMode:
    """Return torch's counter of floating-point operations, two per multiplication.

    It counts products and fused attention, also the products with packed weights on a CPU.
    """

    def linear(rows: torch.Size, *_: Any, out_shape: torch.Size, **__: Any) -> int:
        return 2 * rows[-1] * math.prod(out_shape)

    def attention(query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any) -> int:
        # two products
        return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])

    def attention_backward(_: torch.Size, *shapes: Any, **__: Any) -> int:
        # five products: the scores again, and the gradients of scores, queries, keys and values
        query, key, value = shapes[:3]
        return 2 * math.prod(query[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1])

    packed = (
        getattr(torch.ops.mkl, "_mkl_linear", None),
        getattr(torch.ops.mkldnn, "_linear_pointwise", None),
    )
    # torch 2.11 refuses to count queries with more heads than their keys
    fused = [f"_scaled_dot_product_{name}_attention" for name in ("flash", "efficient", "cudnn")]
    formulas = {one: linear for one in packed if one}
    formulas |= {getattr(torch.ops.aten, name): attention for name in fused}
    formulas |= {getattr(torch.ops.aten, f"{name}_backward"): attention_backward for name in fused}
    return FlopCounterMode(display=False, custom_mapping=formulas)

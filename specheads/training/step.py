"""One optimizer step of a head on the targets of its base."""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.profiler import record_function

from specheads.base.ends import BaseEnds
from specheads.base.model import FrozenBase
from specheads.config.training import JointSettings, Schedule
from specheads.core.drafter import Features, Head
from specheads.core.errors import InputError
from specheads.core.kernels import without_cudnn_attention
from specheads.core.machine import dtype_name, to_device
from specheads.data.packing import TokenBatch
from specheads.decoding.noise import derive_seed
from specheads.training.depth_loss import DepthLoss
from specheads.training.features import FeatureSource, LocalBase
from specheads.training.joint import JointTraining
from specheads.training.objective import (
    DraftLabels,
    LabelCounts,
    Objective,
    draft_labels,
    draw_labels,
    loss_metrics,
    next_token_labels,
    sum_counts,
)
from specheads.training.processes import deterministic_backward, row_share
from specheads.training.schedule import ScheduledPhase, optimizers

CLIP_NORM = 1.0
"""Largest norm of the gradients of a step."""
NO_FAULT = 2**62
"""Replaces the step of a fault that did not happen."""
HeadLoss = Callable[..., DepthLoss]
"""`Objective.forward`, possibly wrapped in DDP."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Part of a step that one process computes at once."""

    phase: ScheduledPhase
    step: int
    """Step of the run."""
    seed: int
    """Derived from the run's seed and `step`."""
    batch: TokenBatch
    """On the base's device."""
    labels: DraftLabels
    counts: LabelCounts
    """Over all processes and micro-batches."""


class DivergedError(InputError):
    """A loss, a gradient or a weight is not finite; the remedy is one that a resume accepts.

    `step` is the first one. With `by_base` the base's hidden states are the cause.
    """

    def __init__(
        self,
        step: int,
        phase: ScheduledPhase,
        dtype: torch.dtype,
        *,
        by_base: bool,
        metric: str = "loss and gradient",
    ) -> None:
        self.step, self.by_base = step, by_base
        rule = f"every {metric} must be finite, and step {step + 1} has one that is not"
        if by_base:
            rule += f": hidden states of the base exceed {dtype_name(dtype)}"
        if by_base and dtype in (torch.float32, torch.float64):
            rule += ", so its weights are damaged; choose another base.model= and name="
            super().__init__(rule)
            return
        remedy = "run the command again with base.dtype=float32"
        if not by_base:
            prefix = f"schedule.phases.{phase.name}"
            rates = {f"{prefix}.learning_rate": phase.settings.learning_rate}
            if phase.muon_learning_rate:
                rates["schedule.muon_learning_rate"] = phase.muon_learning_rate
            if phase.settings.joint:
                rates[f"{prefix}.joint.learning_rate"] = phase.settings.joint.learning_rate
            lower = " ".join(f"{setting}={rate / 10:g}" for setting, rate in rates.items())
            remedy = f"lower learning_rate: run the command again, for example with {lower}"
        super().__init__(f"{rule}; {remedy}, which resumes from the last good checkpoint")


class Teacher:
    """A base whose logits are the targets of a head; its features come from `source`.

    With `joint` phases can train the base too, by an adapter that is initialised from `seed`.
    """

    def __init__(
        self,
        base: BaseEnds,
        head: Head,
        source: FeatureSource | None = None,
        joint: JointSettings | None = None,
        seed: int = 0,
    ) -> None:
        self.base, self.head = base, head
        self.joint: JointTraining | None = None
        if joint:
            assert isinstance(base, FrozenBase)
            self.joint = JointTraining(base, joint, seed)
        if source is None:
            assert isinstance(base, FrozenBase)
            source = LocalBase(base, head.aux_layers)
        self.source = source
        self.bind()

    def bind(self) -> None:
        """Bind the head, and the targets, to the base's current embedding and projection."""
        projection = self.base.projection
        self.project = projection.rows(self.head.draft_ids)
        """Turns hidden states of the base into its logits of the draft vocabulary."""
        self.head.bind(self.base.embedding, projection.scaled_weight, projection.scaled_bias)

    def begin(self, phase: ScheduledPhase | None = None) -> None:
        """Begin or continue a phase; only a joint one trains the adapter. None is a validation."""
        if self.joint:
            self.joint.adapter.learn(phase is not None and phase.settings.joint is not None)
        self.bind()

    def base_as_loaded(self) -> AbstractContextManager[None]:
        """Disable the adapter inside the context."""
        return self.joint.adapter.off() if self.joint else nullcontext()

    def close(self) -> None:
        """Restore the base as it was before training."""
        if self.joint:
            self.joint.adapter.remove()


class StepLoss(NamedTuple):
    """The loss of a micro-batch."""

    total: Float[Tensor, ""]
    """Carries the gradients."""
    metrics: dict[str, Tensor]
    is_base_finite: Bool[Tensor, ""]
    """Whether all hidden states of a frozen base are finite."""


def compute_loss(micro_batch: MicroBatch, teacher: Teacher, head_loss: HeadLoss) -> StepLoss:
    """Return the loss of a micro-batch and the metrics to log.

    In a joint phase the loss is the base's own loss plus the weighted loss of the head.
    """
    settings, batch = micro_batch.phase.settings, micro_batch.batch
    labels, counts = micro_batch.labels, micro_batch.counts
    base_loss: Tensor | None = None
    if settings.joint is None:
        with record_function("base"):
            features = teacher.source.features(batch)
    else:
        assert teacher.joint
        features, base_loss = teacher.joint.read(
            batch, labels.loss_mask, settings.joint, teacher.head.aux_layers, micro_batch.seed
        )
        base_loss = base_loss / counts.base.clamp(min=1)
        teacher.bind()
    progress = micro_batch.phase.progress(micro_batch.step)
    loss = head_loss(features, batch, labels, teacher.project, settings, counts, progress)
    metrics = loss_metrics(loss)
    if base_loss is None:
        return StepLoss(loss.total, metrics, features.is_finite())
    weight = micro_batch.phase.head_weight(micro_batch.step)
    total = base_loss + weight * loss.total
    metrics |= {"loss": total.detach(), "loss/base": base_loss.detach()}
    return StepLoss(total, metrics, torch.ones_like(total, dtype=torch.bool))


class StepRunner:
    """Takes optimizer steps for a head with a teacher, and for its base in joint phases."""

    def __init__(
        self, teacher: Teacher, schedule: Schedule, accelerator: Accelerator, seed: int
    ) -> None:
        self.teacher, self.head, self.accelerator = teacher, teacher.head, accelerator
        self.seed = seed
        self.shares = row_share(teacher.base.sharding, accelerator).world_size
        self.fault_steps = torch.full((2,), NO_FAULT, device=teacher.base.device)
        """First step with any fault, and first one with a fault of the base, noted without waiting
        for the device."""
        self.base_parameters = teacher.joint.adapter.parameters if teacher.joint else []
        plain_optimizers = optimizers(self.head, schedule, self.base_parameters)
        self.optimizers = list(map(accelerator.prepare_optimizer, plain_optimizers))
        with warnings.catch_warnings():
            # accelerate uses an argument name that newer torch deprecates
            warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
            # the head stays on its base's device, which may be the CPU of a machine with a GPU
            self.objective = accelerator.prepare_model(
                Objective(self.head.train()), device_placement=False
            )

    def step(self, batch: TokenBatch, phase: ScheduledPhase, number: int) -> dict[str, Tensor]:
        """Take the optimizer step with this number; return this process's share of its metrics."""
        sums: dict[str, Tensor] = {}
        device, finite_flags = self.teacher.base.device, list[Tensor]()
        micro_batches = self._micro_batches(batch, phase, number)
        if number == 0:
            batches = [micro_batch.batch for micro_batch in micro_batches]
            self.head.calibrate(map(self._features_before_labels, batches), self.total)
        for micro_batch in micro_batches:
            # for dropout in heads
            torch.manual_seed(derive_seed(micro_batch.seed, micro_batch.batch.first_sample))
            # gradients are all-reduced once, in the last one
            is_last = micro_batch is micro_batches[-1]
            sharing = nullcontext() if is_last else self.accelerator.no_sync(self.objective)
            with sharing, without_cudnn_attention(device):
                loss = compute_loss(micro_batch, self.teacher, self.objective)
                # accelerate averages over processes, but these losses are parts of one sum
                with record_function("backward"), deterministic_backward(device):
                    self.accelerator.backward(loss.total * self.shares)
            finite_flags.append(loss.is_base_finite)
            for name, value in loss.metrics.items():
                sums[name] = sums[name] + value if name in sums else value
        with record_function("optimizer"):
            gradient_norm = self._update(phase.rates(number))
        is_fault = ~(sums["loss"].isfinite() & gradient_norm.isfinite())
        faults = torch.stack([is_fault, is_fault & ~torch.stack(finite_flags).all()])
        self.fault_steps = torch.where(faults, self.fault_steps.clamp(max=number), self.fault_steps)
        return sums

    def first_fault(self) -> tuple[int, bool] | None:
        """Return the first step of any process whose loss or gradients were not finite.

        Also return whether the base's hidden states were the cause. This synchronises.
        """
        gathered: Any = self.accelerator.gather(self.fault_steps)
        step, step_by_base = gathered.view(-1, 2).amin(0).tolist()
        return None if step == NO_FAULT else (step, step == step_by_base)

    def _features_before_labels(self, batch: TokenBatch) -> Features:
        """Return the features of the positions whose next token is a label, as one row."""
        # a server leaves out the positions after the last label
        labels = next_token_labels(batch.loss_mask, batch.document_ids)
        features = self.teacher.source.features(batch)
        return features.select_positions(F.pad(labels, (0, 1), value=False))

    def _micro_batches(
        self, batch: TokenBatch, phase: ScheduledPhase, number: int
    ) -> list[MicroBatch]:
        """Return this process's parts of a step's batch."""
        head, settings, device = self.head, phase.settings, self.teacher.base.device
        seed = derive_seed(self.seed, number)
        batches, labels = [], []
        for rows in batch.split(settings.accumulation_steps):
            loss_mask = to_device(draw_labels(rows, head, settings, seed), device)
            batches.append(rows.to(device))
            labels.append(draft_labels(head, batches[-1], loss_mask))
        pairs = list(zip(batches, labels, strict=True))
        own_counts = [label.count(rows) for rows, label in pairs]
        counts = sum_counts(own_counts, self.total, head.depth, device)
        return [MicroBatch(phase, number, seed, rows, label, counts) for rows, label in pairs]

    def _update(self, rates: dict[str, float]) -> Float[Tensor, ""]:
        """Clip the gradients and apply the optimizers; return the norm of the gradients."""
        parameters = self.base_parameters
        # accelerate averages the head's gradients itself
        if gradients := [value.grad for value in parameters if value.grad is not None]:
            mean = self.total(parameters_to_vector(gradients)) / self.shares
            vector_to_parameters(mean, gradients)
        parameters = [*self.head.parameters(), *parameters]
        norm = self.accelerator.clip_grad_norm_(parameters, CLIP_NORM)
        assert isinstance(norm, Tensor)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rates[group["role"]]
            optimizer.step()
            optimizer.zero_grad()
        return norm

    def total(self, values: Tensor) -> Tensor:
        """Return the sum over processes; those that read the same rows count once."""
        total = self.accelerator.reduce(values, reduction="sum")
        assert isinstance(total, Tensor)
        copies = self.accelerator.num_processes // self.shares
        return total / copies if total.is_floating_point() else total // copies

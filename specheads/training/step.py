"""One optimizer step of a head, and the base as its teacher: frozen, or trained jointly (Medusa-2).

See docs/train.md. Source of joint training: Cai et al. 2024, arXiv:2401.10774, section 2.2.2.
"""

import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from specheads.base.lora import Adapter
from specheads.base.model import FrozenBase
from specheads.config.training import JointSettings, Schedule
from specheads.core.drafter import Features, Head
from specheads.core.kernels import without_cudnn_attention
from specheads.core.machine import to_device
from specheads.core.seeds import derive_seed
from specheads.data.packing import TokenBatch
from specheads.decoding.noise import bits
from specheads.training.depth_loss import DepthLoss
from specheads.training.features import FeatureSource, LocalBase
from specheads.training.objective import (
    Objective,
    drawn_labels,
    figures,
    label_counts,
    own_chains,
    own_labels,
)
from specheads.training.optimizers import optimizers
from specheads.training.own_drafts import OwnDrafts
from specheads.training.processes import deterministic_backward, row_share
from specheads.training.schedule import ScheduledPhase

CLIP_NORM = 1.0
"""Largest norm of the gradients of a step."""
CHUNK_ROWS = 512
"""Labels whose logits the base's own loss has in memory at once."""
HeadLoss = Callable[..., DepthLoss]
"""`Objective.forward`, possibly wrapped in DDP."""


@dataclass(frozen=True, slots=True)
class Step:
    """Part of a step that one process computes at once."""

    phase: ScheduledPhase
    number: int
    """Step of the run."""
    seed: int
    """Derived from the run's seed and `number`."""
    batch: TokenBatch
    """On the base's device."""
    loss_mask: Bool[Tensor, "batch time"]
    """Labels that count in the losses."""
    counts: Int[Tensor, " count"]
    """Number of labels of each mean, over all processes and parts: see `objective.label_counts`."""


class Teacher:
    """A base whose logits are the targets of a head; its features come from `source`.

    With `joint` the base has an adapter, initialised from `seed`. Joint phases train it together
    with the head; in other phases it is frozen.
    """

    def __init__(
        self,
        base: FrozenBase,
        head: Head,
        joint: JointSettings | None = None,
        seed: int = 0,
        source: FeatureSource | None = None,
    ) -> None:
        self.base, self.head = base, head
        self.source = source or LocalBase(base, head.aux_layers)
        self.adapter: Adapter | None = None
        self.parameters: list[nn.Parameter] = []
        """Trained parameters of the base."""
        if joint:
            self._original_logits_of = base.projection
            self.adapter = Adapter(
                base.model,
                rank=joint.rank,
                alpha=joint.alpha,
                dropout=joint.dropout,
                target_modules=joint.target_modules,
                seed=seed,
            )
            self.parameters = self.adapter.parameters

    def begin(self, phase: ScheduledPhase | None = None) -> None:
        """Train the adapter in a joint phase, else freeze it, and bind the head to the base."""
        if self.adapter:
            self.adapter.learn(phase is not None and phase.settings.joint is not None)
        self._bind()

    def _bind(self) -> None:
        """Bind the head to the base's current embedding and projection."""
        projection = self.base.projection
        self.logits_of = projection.rows(self.head.draft_ids)
        self.head.bind(self.base.embedding, projection.scaled_weight, projection.scaled_bias)

    def losses(self, step: Step, head_loss: HeadLoss) -> tuple[Tensor, dict[str, Tensor]]:
        """Read the batch; return the loss and the metrics to log.

        In a joint phase the loss is the base's own loss plus the weighted loss of the head.
        """
        settings = step.phase.settings
        own: Tensor | None = None
        if settings.joint is None:
            with record_function("base"):
                features = self.source.features(step.batch)
        else:
            features, own = self.learn(step.batch, step.loss_mask, settings.joint, step.seed)
            own = own / step.counts[-1].clamp(min=1)
            self._bind()
        given, drafts = (features, step.batch, step.loss_mask), None
        if settings.own_drafts:
            chosen = to_device(own_chains(step.batch, settings, step.seed), step.loss_mask.device)
            drafts = OwnDrafts(self.base, chosen & step.loss_mask)
        loss = head_loss(*given, self.logits_of, settings, step.counts, drafts)
        found = figures(loss)
        if own is None:
            return loss.total, found
        total = own + step.phase.head_weight(step.number) * loss.total
        return total, found | {"loss": total.detach(), "loss/base": own.detach()}

    def learn(
        self,
        batch: TokenBatch,
        loss_mask: Bool[Tensor, "batch time"],
        joint: JointSettings,
        seed: int = 0,
    ) -> tuple[Features, Float[Tensor, ""]]:
        """Return features with gradients, and the base's own loss in nats, summed over labels.

        The loss is the cross-entropy of the text, or the KL divergence to the base without the
        adapter. It covers the labels of `loss_mask` except the first token of a text. Dropout
        depends on the seed, the sample number and the position only.
        """
        assert self.adapter
        tokens, document_ids = batch.tokens, batch.document_ids
        samples = torch.arange(batch.samples.start, batch.samples.stop, device=tokens.device)
        keys = bits(seed, samples[:, None], torch.arange(tokens.shape[1], device=tokens.device))
        rows, places = own_labels(loss_mask, document_ids).nonzero(as_tuple=True)
        aims = tokens[rows, places + 1]
        if joint.target == "base":
            # before the forward with gradients, which toggling the adapter would disturb
            with self.as_loaded():
                aims = self.base.read(tokens, document_ids=document_ids).hidden[rows, places]
        self.adapter.draw_by(keys)
        features = self.base.read(tokens, self.head.aux_layers, document_ids, gradients=True)
        columns = features.hidden[rows, places], aims, keys[rows, places]
        # the backward pass recomputes a chunk's logits, so only one chunk's are in memory
        sums = [
            checkpoint(self._row_loss, *chunk, use_reentrant=False)
            for chunk in zip(*(column.split(CHUNK_ROWS) for column in columns), strict=True)
        ]
        return features, torch.stack(sums).sum()

    def _row_loss(self, hidden: Tensor, aims: Tensor, keys: Tensor) -> Tensor:
        """Return the summed loss towards labels, or towards the original base's hidden states."""
        assert self.adapter
        self.adapter.draw_by(keys)
        logits = self.base.logits_of(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if aims.ndim == 1:
            return F.cross_entropy(logits, aims, reduction="sum")
        log_probs = self._original_logits_of(aims).to(logits.dtype).log_softmax(-1)
        return F.kl_div(logits.log_softmax(-1), log_probs, reduction="sum", log_target=True)

    def leave(self) -> None:
        """Restore the base as it was before training."""
        if self.adapter:
            self.adapter.remove()

    def as_loaded(self) -> AbstractContextManager[None]:
        """Disable the adapter inside the context."""
        return self.adapter.off() if self.adapter else nullcontext()


class StepRunner:
    """Takes optimizer steps for a head with a teacher."""

    def __init__(
        self, teacher: Teacher, schedule: Schedule, accelerator: Accelerator, seed: int
    ) -> None:
        self.teacher, self.head, self.accelerator = teacher, teacher.head, accelerator
        self.seed = seed
        self.shares = row_share(teacher.base.sharding, accelerator).world_size
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

    def step(self, batch: TokenBatch, phase: ScheduledPhase, number: int) -> dict[str, Tensor]:
        """Take the optimizer step with this number; return this process's share of its metrics."""
        values: dict[str, Tensor] = {}
        device = self.teacher.base.device
        steps = self._parts(batch, phase, number)
        if number == 0:
            self.head.calibrate(map(self._features_before_labels, steps), self.total)
        for step in steps:
            # for dropout in heads
            torch.manual_seed(derive_seed(step.seed, step.batch.first_sample))
            # gradients are all-reduced once, in the last part
            last = step is steps[-1]
            sharing = nullcontext() if last else self.accelerator.no_sync(self.objective)
            with sharing, without_cudnn_attention(device):
                loss, found = self.teacher.losses(step, self.objective)
                # accelerate averages over processes, but these losses are parts of one sum
                with record_function("backward"), deterministic_backward(device):
                    self.accelerator.backward(loss * self.shares)
            for name, value in found.items():
                values[name] = values[name] + value if name in values else value
        with record_function("optimizer"):
            self._update(phase.rates(number))
        return values

    def _features_before_labels(self, step: Step) -> Features:
        """Return the features of the positions whose next token is a label, as one row."""
        batch = step.batch
        # a server leaves out the positions after the last label
        positions = F.pad(own_labels(batch.loss_mask, batch.document_ids), (0, 1), value=False)
        return self.teacher.source.features(batch).select_positions(positions)

    def flops(self, batch: TokenBatch, phase: ScheduledPhase, number: int) -> int:
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

    def _parts(self, batch: TokenBatch, phase: ScheduledPhase, number: int) -> list[Step]:
        """Return this process's parts of a step's batch."""
        head, settings, device = self.head, phase.settings, self.teacher.base.device
        seed = derive_seed(self.seed, number)
        parts = [
            (part.to(device), to_device(drawn_labels(part, head, settings, seed), device))
            for part in batch.split(settings.accumulation_steps)
        ]
        counts = [label_counts(head, part, loss_mask, settings) for part, loss_mask in parts]
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

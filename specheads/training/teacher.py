"""The base as a teacher: frozen, or trained jointly with the head (Medusa-2).

See docs/train.md. Source: Cai et al. 2024, arXiv:2401.10774, section 2.2.2.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint

from specheads.base.lora import Adapter
from specheads.base.model import FrozenBase
from specheads.core.drafter import Features, Head
from specheads.core.machine import to_device
from specheads.data.packing import TokenBatch
from specheads.decoding.noise import bits
from specheads.training.depth_loss import DepthLoss
from specheads.training.features import FeatureSource, LocalBase
from specheads.training.objective import figures, own_chains, own_labels
from specheads.training.own_drafts import OwnDrafts
from specheads.training.schedule import PlacedPhase
from specheads.training.settings import Joint

CHUNK_ROWS = 512
"""Labels whose logits the base's own loss has in memory at once."""
HeadLoss = Callable[..., DepthLoss]
"""`Objective.forward`, possibly wrapped in DDP."""


@dataclass(frozen=True, slots=True)
class Step:
    """Part of a step that one process computes at once."""

    phase: PlacedPhase
    number: int
    """Step of the run."""
    seed: int
    """Derived from the run's seed and `number`."""
    batch: TokenBatch
    """On the base's device."""
    loss_mask: Bool[Tensor, "batch time"]
    """Labels that count in the losses."""
    counts: Int[Tensor, " level"]
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
        joint: Joint | None = None,
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

    def begin(self, phase: PlacedPhase | None = None) -> None:
        """Train the adapter in a joint phase, else freeze it, and bind the head to the base."""
        if self.adapter:
            self.adapter.learn(phase is not None and phase.settings.joint is not None)
        self._bind()

    def _bind(self) -> None:
        """Bind the head to the base's current embedding and projection."""
        projection = self.base.projection
        self.logits_of = projection.rows(self.head.draft_ids)
        self.head.bind(self.base.embedding, projection.scaled_weight)

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
        given, drafts = (features, step.batch.tokens, step.loss_mask), None
        if settings.own_drafts:
            chosen = to_device(own_chains(step.batch, settings, step.seed), step.loss_mask.device)
            drafts = OwnDrafts(self.base, step.batch, chosen & step.loss_mask)
        loss = head_loss(*given, self.logits_of, settings, step.counts, drafts)
        found = figures(loss)
        if own is None:
            return loss.total, found
        total = own + step.phase.head_weight(step.number) * loss.total
        return total, found | {"loss": total.detach(), "loss/base": own.detach()}

    def learn(
        self, batch: TokenBatch, loss_mask: Bool[Tensor, "batch time"], joint: Joint, seed: int = 0
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

"""The base as a teacher: frozen, or trained jointly with the head (Medusa-2).

See docs/train.md. Source: Cai et al. 2024, arXiv:2401.10774, section 2.2.2.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint

from specheads.base.lora import Adapter
from specheads.base.model import FrozenBase
from specheads.core.drafter import Features, Head
from specheads.core.files import atomic_folder
from specheads.data.packing import TokenBatch
from specheads.decoding.noise import bits
from specheads.training.depth_loss import DepthLoss
from specheads.training.feature_cache import FeatureCache
from specheads.training.objective import figures, own_labels
from specheads.training.schedule import PlacedPhase, Step
from specheads.training.settings import Joint

HeadLoss = Callable[..., DepthLoss]
"""`Objective.forward`, possibly wrapped in DDP."""


class FrozenTeacher:
    """A base that does not change: its logits are the targets of the head."""

    def __init__(self, base: FrozenBase, head: Head, cache: FeatureCache | None = None) -> None:
        self.base, self.head, self.cache = base, head, cache
        self.parameters: list[nn.Parameter] = []
        """Trained parameters of the teacher."""
        self.adapter: Adapter | None = None

    def begin(self, phase: PlacedPhase | None = None) -> None:
        """Bind the head to the base's current embedding and projection."""
        del phase
        projection = self.base.projection
        self.logits_of = projection.rows(self.head.draft_ids)
        self.head.bind(self.base.embedding, projection.scaled_weight)

    def losses(self, step: Step, head_loss: HeadLoss) -> tuple[Tensor, dict[str, Tensor]]:
        """Read the batch; return the loss and the metrics to log."""
        with record_function("base"):
            features = self.read(step.batch)
        loss = self.loss_of_head(step, head_loss, features)
        return loss.total, figures(loss)

    def loss_of_head(self, step: Step, head_loss: HeadLoss, features: Features) -> DepthLoss:
        """Return the loss of the head on features of the base."""
        tokens, settings = step.batch.tokens, step.phase.settings
        return head_loss(features, tokens, step.loss_mask, self.logits_of, settings, step.counts)

    def read(self, batch: TokenBatch) -> Features:
        """Return the base's features of a batch, without gradients."""
        if self.cache is not None:
            return self.cache.read(batch)
        return self.base.read(batch.tokens, self.head.aux_layers, batch.document_ids)

    def as_loaded(self) -> AbstractContextManager[None]:
        """Disable the adapter inside the context."""
        return nullcontext()

    def at_rest(self) -> "AbstractContextManager[FrozenTeacher]":
        """Yield a frozen teacher with the current weights."""
        return nullcontext(self)

    def weights(self) -> dict[str, Tensor]:
        """Return the adapter weights, for a checkpoint."""
        return {}

    def load(self, weights: dict[str, Tensor]) -> None:
        """Load the result of `weights`."""

    def save(self, folder: Path, phase: PlacedPhase) -> None:
        """Save the adapter at the end of a joint phase."""

    def leave(self) -> None:
        """Restore the base as it was before training."""


class JointTeacher:
    """A base with an adapter that is trained together with the head in joint phases.

    In other phases it is a frozen teacher that includes the adapter. `seed` initialises the
    adapter.
    """

    def __init__(self, base: FrozenBase, head: Head, joint: Joint, seed: int) -> None:
        self.frozen, self.cache = FrozenTeacher(base, head), None
        self.base, self.head = base, head
        # the projection without the adapter
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

    def begin(self, phase: PlacedPhase) -> None:
        """Train or freeze the adapter, as the phase requires."""
        self.adapter.learn(phase.settings.joint is not None)
        self.frozen.begin()

    def losses(self, step: Step, head_loss: HeadLoss) -> tuple[Tensor, dict[str, Tensor]]:
        """Read the batch; return the base's own loss plus the weighted loss of the head."""
        joint = step.phase.settings.joint
        if joint is None:
            return self.frozen.losses(step, head_loss)
        features, own = self.learn(step.batch, step.loss_mask, joint, step.seed)
        own = own / step.counts[-1].clamp(min=1)
        self.frozen.begin()
        loss = self.frozen.loss_of_head(step, head_loss, features)
        total = own + step.phase.head_weight(step.number) * loss.total
        values = {"loss": total, "loss/base": own}
        return total, figures(loss) | {name: value.detach() for name, value in values.items()}

    def as_loaded(self) -> AbstractContextManager[None]:
        """Disable the adapter inside the context."""
        return self.adapter.off()

    @contextmanager
    def at_rest(self) -> Iterator[FrozenTeacher]:
        """Yield a frozen teacher with the current adapter."""
        learning = self.adapter.learning
        self.adapter.learn(False)
        try:
            self.frozen.begin()
            yield self.frozen
        finally:
            self.adapter.learn(learning)

    def weights(self) -> dict[str, Tensor]:
        """Return the adapter weights, for a checkpoint."""
        return self.adapter.weights()

    def load(self, weights: dict[str, Tensor]) -> None:
        """Load the result of `weights`."""
        self.adapter.load(weights)

    def leave(self) -> None:
        """Remove the adapter from the base."""
        self.adapter.remove()

    def save(self, folder: Path, phase: PlacedPhase) -> None:
        """Save the adapter at the end of a joint phase."""
        if phase.settings.joint:
            with atomic_folder(folder) as place:
                self.adapter.save(place)

    def learn(
        self, batch: TokenBatch, loss_mask: Bool[Tensor, "batch time"], joint: Joint, seed: int = 0
    ) -> tuple[Features, Float[Tensor, ""]]:
        """Return features with gradients, and the base's own loss in nats, summed over labels.

        The loss is the cross-entropy of the text, or the KL divergence to the base without the
        adapter. It covers the labels of `loss_mask` except the first token of a text. Dropout
        depends on the seed, the sample number and the position only.
        """
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
        states = features.hidden[rows, places]
        return features, chunked_loss(self._row_loss, states, aims, keys[rows, places])

    def _row_loss(self, hidden: Tensor, aims: Tensor, keys: Tensor) -> Tensor:
        """Return the summed loss towards labels, or towards the original base's hidden states."""
        self.adapter.draw_by(keys)
        logits = self.base.logits_of(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if aims.ndim == 1:
            return F.cross_entropy(logits, aims, reduction="sum")
        log_probs = self._original_logits_of(aims).to(logits.dtype).log_softmax(-1)
        return F.kl_div(logits.log_softmax(-1), log_probs, reduction="sum", log_target=True)


Teacher = FrozenTeacher | JointTeacher


def teacher_of(
    base: FrozenBase, head: Head, joint: Joint | None, seed: int, cache: FeatureCache | None = None
) -> Teacher:
    """Return a `JointTeacher` if any phase is joint, else a `FrozenTeacher`.

    Only a frozen base can use a feature cache.
    """
    return JointTeacher(base, head, joint, seed) if joint else FrozenTeacher(base, head, cache)


def chunked_loss(
    row_loss: Callable[..., Tensor], *columns: Shaped[Tensor, "row ..."], chunk_rows: int = 512
) -> Float[Tensor, ""]:
    """Return the sum of `row_loss` over chunks of rows.

    The backward pass recomputes a chunk's logits, so at most one chunk's logits are in memory.
    Unlike `losses.depth_loss` it keeps no gradient of the projection, which is frozen.
    """
    chunks = zip(*(column.split(chunk_rows) for column in columns), strict=True)
    sums = [checkpoint(row_loss, *chunk, use_reentrant=False) for chunk in chunks]
    return torch.stack(sums).sum()

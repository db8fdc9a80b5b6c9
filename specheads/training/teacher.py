"""What a head learns from: a base that is frozen, or one that learns beside it (Medusa-2).

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
from specheads.config import Joint
from specheads.core.drafter import Features, Head
from specheads.core.files import atomic_folder
from specheads.data.packing import TokenBatch
from specheads.decoding.acceptance.noise import bits
from specheads.training.feature_cache import FeatureCache
from specheads.training.losses.depth_loss import DepthLoss
from specheads.training.objective import figures, own_labels
from specheads.training.schedule import PlacedPhase, Step

HeadLoss = Callable[..., DepthLoss]
"""`Objective.forward`, maybe within what shares out its gradients."""


class FrozenTeacher:
    """A base that stays as it is: it reads the text, and its logits are what a head learns."""

    def __init__(self, base: FrozenBase, head: Head, cache: FeatureCache | None = None) -> None:
        self.base, self.head, self.cache = base, head, cache
        self.parameters: list[nn.Parameter] = []
        """What the teacher itself learns."""
        self.adapter: Adapter | None = None

    def begin(self, phase: PlacedPhase | None = None) -> None:
        """Take up the base as it is now: what the head learns, and what it borrows."""
        del phase
        projection = self.base.projection
        self.logits_of = projection.rows(self.head.draft_ids)
        self.head.bind(self.base.embedding, projection.scaled_weight)

    def losses(self, step: Step, head_loss: HeadLoss) -> tuple[Tensor, dict[str, Tensor]]:
        """Read the text; return the loss to descend, and what to log."""
        with record_function("base"):
            features = self.read(step.batch)
        loss = self.loss_of_head(step, head_loss, features)
        return loss.total, figures(loss)

    def loss_of_head(self, step: Step, head_loss: HeadLoss, features: Features) -> DepthLoss:
        """Return the loss of the head on what the base computed."""
        tokens, settings = step.batch.tokens, step.phase.settings
        return head_loss(features, tokens, step.scored, self.logits_of, settings, step.counts)

    def read(self, batch: TokenBatch) -> Features:
        """Return what the base says of a batch, as it is now and without gradients."""
        if self.cache is not None:
            return self.cache.read(batch)
        return self.base.read(batch.tokens, self.head.aux_layers, batch.document_ids)

    def as_loaded(self) -> AbstractContextManager[None]:
        """Have the base compute, for as long as this lasts, as if it had learned nothing."""
        return nullcontext()

    def at_rest(self) -> "AbstractContextManager[FrozenTeacher]":
        """Give the base as it is now, which learns nothing for as long as this lasts."""
        return nullcontext(self)

    def weights(self) -> dict[str, Tensor]:
        """Return what the teacher has learned, for a checkpoint."""
        return {}

    def load(self, weights: dict[str, Tensor]) -> None:
        """Take up what `weights` returned."""

    def save(self, folder: Path, phase: PlacedPhase) -> None:
        """Keep what the teacher has learned by the end of a phase."""

    def leave(self) -> None:
        """Leave the base as it was before training."""


class JointTeacher:
    """A base with an adapter that learns in joint phases, beside the head.

    In other phases it is a frozen teacher: the base with what the adapter has learned so far.
    `seed` draws the adapter's first factors.
    """

    def __init__(self, base: FrozenBase, head: Head, joint: Joint, seed: int) -> None:
        self.frozen, self.cache = FrozenTeacher(base, head), None
        self.base, self.head = base, head
        # taken before the adapter is in: what the frozen weights say
        self._original_logits_of = base.projection
        self.adapter = Adapter(base.model, joint, seed)
        self.parameters = self.adapter.parameters
        self.as_loaded, self.leave = self.adapter.off, self.adapter.remove
        self.weights, self.load = self.adapter.weights, self.adapter.load

    def begin(self, phase: PlacedPhase) -> None:
        """Take up a phase, in which the adapter learns or only computes."""
        self.adapter.learn(phase.settings.joint is not None)
        self.frozen.begin()

    def losses(self, step: Step, head_loss: HeadLoss) -> tuple[Tensor, dict[str, Tensor]]:
        """Read the text; return the base's own loss plus the weighted one of the head."""
        joint = step.phase.settings.joint
        if joint is None:
            return self.frozen.losses(step, head_loss)
        features, own = self.learn(step.batch, step.scored, joint, step.seed)
        own = own / step.counts[-1].clamp(min=1)
        self.frozen.begin()
        loss = self.frozen.loss_of_head(step, head_loss, features)
        total = own + step.phase.head_weight(step.number) * loss.total
        values = {"loss": total, "loss/base": own}
        return total, figures(loss) | {name: value.detach() for name, value in values.items()}

    @contextmanager
    def at_rest(self) -> Iterator[FrozenTeacher]:
        """Give the base as it is now, adapter and all, which learns nothing meanwhile."""
        learning = self.adapter.learning
        self.adapter.learn(False)
        try:
            self.frozen.begin()
            yield self.frozen
        finally:
            self.adapter.learn(learning)

    def save(self, folder: Path, phase: PlacedPhase) -> None:
        """Keep the adapter as it is at the end of a joint phase."""
        if phase.settings.joint:
            with atomic_folder(folder) as place:
                self.adapter.save(place)

    def learn(
        self, batch: TokenBatch, scored: Bool[Tensor, "batch time"], joint: Joint, seed: int = 0
    ) -> tuple[Features, Float[Tensor, ""]]:
        """Return features with gradients, and the base's own loss in nats, summed over labels.

        The loss is the text's surprise, or the KL divergence to the base without its adapter. It
        covers the scored labels, of which a text's first token is never one. Dropout follows from
        the seed and the numbers of samples and positions.
        """
        tokens, document_ids = batch.tokens, batch.document_ids
        samples = torch.arange(batch.samples.start, batch.samples.stop, device=tokens.device)
        keys = bits(seed, samples[:, None], torch.arange(tokens.shape[1], device=tokens.device))
        rows, places = own_labels(scored, document_ids).nonzero(as_tuple=True)
        aims = tokens[rows, places + 1]
        if joint.target == "base":
            # before the forward with gradients: switching off and on touches what they flow to
            with self.as_loaded():
                aims = self.base.read(tokens, document_ids=document_ids).hidden[rows, places]
        self.adapter.draw_by(keys)
        features = self.base.read(tokens, self.head.aux_layers, document_ids, gradients=True)
        states = features.hidden[rows, places]
        return features, chunked_loss(self._row_loss, states, aims, keys[rows, places])

    def _row_loss(self, hidden: Tensor, aims: Tensor, keys: Tensor) -> Tensor:
        """Return the summed loss of states that aim at labels, or at the original's states."""
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
    """Return the teacher that a schedule asks for: one that learns if any phase is joint.

    Only what a frozen base says can come from a cache.
    """
    return JointTeacher(base, head, joint, seed) if joint else FrozenTeacher(base, head, cache)


def chunked_loss(
    row_loss: Callable[..., Tensor], *columns: Shaped[Tensor, "row ..."], chunk_rows: int = 512
) -> Float[Tensor, ""]:
    """Return the sum over rows of a loss that sums over the rows of the columns it is given.

    A chunk's logits are made anew for its gradients, so that no more than one chunk's are ever
    held. Unlike `losses.depth_loss` this keeps no gradient of a whole projection matrix: the
    base's own is frozen.
    """
    chunks = zip(*(column.split(chunk_rows) for column in columns), strict=True)
    sums = [checkpoint(row_loss, *chunk, use_reentrant=False) for chunk in chunks]
    return torch.stack(sums).sum()

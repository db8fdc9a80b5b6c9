"""Joint training of the base with a head: an adapter, and the base's own loss (Medusa-2).

See docs/train.md. Source: Cai et al. 2024, arXiv:2401.10774, section 2.2.2.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from specheads.base.lora import Adapter
from specheads.base.model import FrozenBase
from specheads.config.training import JointSettings
from specheads.core.errors import InputError
from specheads.core.features import Features
from specheads.data.packing import TokenBatch
from specheads.decoding.noise import bits
from specheads.training.objective import next_token_labels

CHUNK_ROWS = 512
"""Labels whose logits the base's own loss has in memory at once."""


class JointTraining:
    """An adapter of the base, initialised from `seed`, that joint phases train with the head."""

    def __init__(self, base: FrozenBase, settings: JointSettings, seed: int = 0) -> None:
        if base.has_states:
            raise InputError(
                "joint training needs a base with keys and values only, and layers of "
                f"{base.config.model_type!r} keep states; train the head alone"
            )
        self.base, self._original_projection = base, base.projection
        self.adapter = Adapter(
            base.model,
            rank=settings.rank,
            alpha=settings.alpha,
            dropout=settings.dropout,
            target_modules=settings.target_modules,
            seed=seed,
        )

    def read(
        self,
        batch: TokenBatch,
        loss_mask: Bool[Tensor, "batch time"],
        settings: JointSettings,
        aux_layers: tuple[int, ...] = (),
        seed: int = 0,
    ) -> tuple[Features, Float[Tensor, ""]]:
        """Return features with gradients, and the base's own loss in nats, summed over labels.

        The loss is the cross-entropy of the text, or the KL divergence to the base without the
        adapter. It covers the labels of `loss_mask` except the first token of a text. Dropout
        depends on the seed, the sample number and the position only.
        """
        tokens, document_ids = batch.tokens, batch.document_ids
        samples = torch.arange(batch.samples.start, batch.samples.stop, device=tokens.device)
        times = torch.arange(tokens.shape[1], device=tokens.device)
        dropout_keys = bits(seed, samples[:, None], times)
        rows, positions = next_token_labels(loss_mask, document_ids).nonzero(as_tuple=True)
        targets = tokens[rows, positions + 1]
        if settings.target == "base":
            # before the forward with gradients, which toggling the adapter would disturb
            with self.adapter.off():
                targets = self.base.read(tokens, document_ids=document_ids).hidden[rows, positions]
        self.adapter.draw_by(dropout_keys)
        features = self.base.read(tokens, aux_layers, document_ids, gradients=True)
        columns = features.hidden[rows, positions], targets, dropout_keys[rows, positions]
        # the backward pass recomputes a chunk's logits, so only one chunk's are in memory
        sums = [
            checkpoint(self._chunk_loss, *chunk, use_reentrant=False)
            for chunk in zip(*(column.split(CHUNK_ROWS) for column in columns), strict=True)
        ]
        return features, torch.stack(sums).sum()

    def _chunk_loss(self, hidden: Tensor, targets: Tensor, dropout_keys: Tensor) -> Tensor:
        """Return the summed loss towards labels, or towards the original base's hidden states."""
        self.adapter.draw_by(dropout_keys)
        logits = self.base.logits_of(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if targets.ndim == 1:
            return F.cross_entropy(logits, targets, reduction="sum")
        log_probs = self._original_projection(targets).to(logits.dtype).log_softmax(-1)
        return F.kl_div(logits.log_softmax(-1), log_probs, reduction="sum", log_target=True)

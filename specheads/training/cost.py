"""FLOPs of a training step, and the FLOP/s of this machine."""

import statistics
import time
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from specheads.base.model import FrozenBase
from specheads.core.drafter import Features, Head
from specheads.core.features import document_lengths, document_places
from specheads.core.machine import synchronise
from specheads.data.packing import TokenBatch
from specheads.training.losses import LABELS_ONLY
from specheads.training.settings import Phase

SIDES = {"cuda": 8192, "cpu": 1024}
"""Size of the square matrices that measure the machine FLOP/s, large enough for the full rate.
All products together take less than a second."""

PRODUCTS = 12
"""Number of timed products; the median counts."""


@dataclass(frozen=True, slots=True)
class StepFlops:
    """Floating-point operations of one optimizer step, two per multiplication.

    Only matrix products count: no norms, softmaxes and optimizers.
    """

    base: float
    """One forward over every token without logits, with attention within documents."""
    head: float
    """Forward and backward of the head's own layers."""
    loss: float
    """Vocabulary projections: the base's forward, and each depth's forward and backward."""

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return self.base + self.head + self.loss


def step_flops(base: FrozenBase, head: Head, batch: TokenBatch, phase: Phase) -> StepFlops:
    """Return the FLOPs of a step with a frozen base on a batch, where all labels count.

    Mixture-of-experts layers count as if each token used every expert.
    """
    document_ids = batch.document_ids
    if document_ids is None:
        document_ids = torch.zeros_like(batch.tokens)
    pairs = sum(n * (n + 1) / 2 for n in document_lengths(document_places(document_ids)))
    matrices = sum(map(_multiplied, base.model.base_model.modules()))
    config = base.config
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    attention = 4 * pairs * heads * width * config.num_hidden_layers
    most = head.num_anchors or batch.tokens.shape[1]
    rows = phase.scored_share * int(batch.loss_mask.sum(1).clamp(max=most).sum())
    drafted = 2 * rows * head.drafted_size
    teacher = 0 if phase.loss in LABELS_ONLY else drafted * base.width
    depths = sum(3 * drafted * head.projection(level)[0].shape[1] for level in range(head.depth))
    return StepFlops(
        base=float(2 * batch.tokens.numel() * matrices + attention),
        head=3.0 * _states_flops(head, base, batch, document_ids),
        loss=float(teacher + depths),
    )


def _multiplied(layer: nn.Module) -> int:
    """Return the number of elements of a layer's own matrices, except embeddings."""
    if isinstance(layer, nn.Embedding):
        return 0
    if isinstance(layer, nn.Linear):
        # the shape of a quantised weight differs from that of the product
        return layer.in_features * layer.out_features
    return sum(one.numel() for one in layer.parameters(recurse=False) if one.ndim > 1)


def _states_flops(
    head: Head, base: FrozenBase, batch: TokenBatch, document_ids: torch.Tensor
) -> int:
    """Run a head's own layers and return the FLOPs of their forward."""
    width = base.width
    aux = len(head.aux_layers) * width
    shape, device = batch.tokens.shape, base.device
    dtype = next(head.parameters()).dtype
    features = Features(
        torch.zeros(*shape, width, device=device, dtype=dtype),
        torch.zeros(*shape, aux, device=device, dtype=dtype) if aux else None,
        batch.tokens.to(device),
        document_ids.to(device),
    )
    anchors = None
    if head.num_anchors:
        anchors = torch.arange(shape[1], device=device).expand(shape) < head.num_anchors
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        for _ in head.states(features, batch.tokens.to(device), anchors):
            pass
    return counter.get_total_flops()


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the FLOP/s of this machine in large matrix products."""
    side = SIDES.get(device.type, SIDES["cuda"])
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    times = []
    for _ in range(PRODUCTS):
        synchronise(device)
        began = time.perf_counter()
        torch.mm(left, right)
        synchronise(device)
        times.append(time.perf_counter() - began)
    return 2 * side**3 / statistics.median(times)

"""The losses: one function each, with its gradient in closed form.

p is the base's distribution and q the draft's. Each function reads a block of rows of log q and
overwrites it with the gradient with respect to the draft's logits. A block needs one buffer and no
autograd graph. The list of all losses is `LOSSES` in config/training.py.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specheads.config import training

RULED_OUT = -1e4
"""Replaces minus infinity in log p, for a finite loss at p = 0. Finite logits in
use are far from it."""
TRUST = 3.0
"""Rate at which `lk_hybrid` moves from KL to total variation as acceptance grows (eta)."""


@dataclass(frozen=True, slots=True)
class BaseRows:
    """Targets of a block of rows."""

    labels: Int[Tensor, " row"]
    """The token of the text."""
    best: Int[Tensor, " row"]
    """The base's argmax; the label if the base's distribution is unknown."""
    values: Float[Tensor, "row vocab"] | None = None
    """p or log p, as the loss requires."""
    entropy: Float[Tensor, " row"] | None = None
    """Entropy of p in nats, if the loss requires it."""


LogProbs = Float[Tensor, "row vocab"]
Losses = Float[Tensor, " row"]
RowLoss = Callable[[LogProbs, BaseRows], Losses]
"""(log q, targets) -> loss per row; afterwards log q holds the gradient."""


def exponentials(logarithms: Tensor) -> Tensor:
    """Exponentiate in place.

    On a CPU subnormal results become zero: MKL takes twenty times as long for them.
    """
    if logarithms.device.type != "cpu":
        return logarithms.exp_()
    least = torch.finfo(logarithms.dtype).tiny
    logarithms.clamp_(min=math.ceil(math.log(least))).exp_()
    return torch.threshold_(logarithms, 2 * least, 0.0)


def _values(base: BaseRows) -> Tensor:
    assert base.values is not None
    return base.values


def _surprise(log_draft: Tensor, tokens: Tensor) -> Tensor:
    place = tokens[:, None]
    loss = -log_draft.gather(-1, place)
    exponentials(log_draft).scatter_add_(-1, place, torch.full_like(loss, -1.0))
    return loss[:, 0]


def cross_entropy(log_draft: LogProbs, base: BaseRows) -> Losses:
    """Return the cross-entropy of the text's token, in nats."""
    return _surprise(log_draft, base.labels)


def argmax_cross_entropy(log_draft: LogProbs, base: BaseRows) -> Losses:
    """Return the cross-entropy of the base's argmax, in nats."""
    return _surprise(log_draft, base.best)


def soft_cross_entropy(log_draft: LogProbs, base: BaseRows) -> Losses:
    """Return the cross-entropy to the base's distribution: KL(p || q) plus the entropy of p.

    Source: Ankner et al. 2024, arXiv:2402.05109, the teacher loss of Hydra++.
    """
    base_probs = _values(base)
    loss = -(base_probs * log_draft).sum(-1)
    exponentials(log_draft).sub_(base_probs)
    return loss


def kl(log_draft: LogProbs, base: BaseRows) -> Losses:
    """Return KL(p || q) in nats."""
    assert base.entropy is not None
    return soft_cross_entropy(log_draft, base) - base.entropy


def reverse_kl(log_draft: LogProbs, base: BaseRows) -> Losses:
    """Return KL(q || p) in nats, which penalises draft mass where p is small."""
    gap = log_draft - _values(base)
    draft_probs = exponentials(log_draft)
    loss = (draft_probs * gap).sum(-1)
    draft_probs.mul_(gap.sub_(loss[:, None]))
    return loss


def _missed(draft_probs: Tensor, base_probs: Tensor) -> tuple[Tensor, Tensor]:
    """Return 1 - acceptance of each row and its gradient.

    Acceptance depends on q only where q < p; the gradient includes that of the softmax.
    """
    short = draft_probs < base_probs
    missed = 1.0 - torch.minimum(draft_probs, base_probs).sum(-1)
    slope = draft_probs * short
    pulled = slope.sum(-1, keepdim=True)
    return missed, torch.addcmul(-slope, draft_probs, pulled)


def total_variation(log_draft: LogProbs, base: BaseRows) -> Losses:
    """Return the total variation distance: one minus the acceptance rate of rejection sampling.

    Its gradient vanishes where q is zero on the tokens that p prefers.
    """
    missed, slope = _missed(exponentials(log_draft), _values(base))
    log_draft.copy_(slope)
    return missed


def cross_entropy_l1(log_draft: LogProbs, base: BaseRows) -> Losses:
    """Return 0.1 times the cross-entropy of the text's token plus 0.9 times the L1 distance.

    The L1 distance of p and q is twice their total variation distance.

    Source: deepseek-ai/DeepSpec, the loss of DSpark in config/dspark.
    """
    place = base.labels[:, None]
    surprise = -log_draft.gather(-1, place)
    missed, slope = _missed(exponentials(log_draft), _values(base))
    log_draft.scatter_add_(-1, place, torch.full_like(surprise, -1.0))
    log_draft.mul_(0.1).add_(slope, alpha=1.8)
    return 0.1 * surprise[:, 0] + 1.8 * missed


def lk(log_draft: LogProbs, base: BaseRows) -> Losses:
    """Return minus the logarithm of the acceptance rate, in nats.

    Its gradient is that of total variation divided by the acceptance. It is computed in logarithms,
    because the acceptance may underflow.

    Source: Samarin et al. 2026, arXiv:2602.23881.
    """
    base_log_probs = _values(base)
    log_accepted = torch.minimum(log_draft, base_log_probs).logsumexp(-1, keepdim=True)
    short = log_draft < base_log_probs
    share = (log_draft - log_accepted).masked_fill_(~short, -torch.inf)
    share = exponentials(share).mul_(short)
    exponentials(log_draft).mul_(share.sum(-1, keepdim=True)).sub_(share)
    return -log_accepted[:, 0]


def lk_hybrid(log_draft: LogProbs, base: BaseRows) -> Losses:
    """Return lambda KL(p || q) + (1 - lambda) TV(p, q) with lambda = exp(-3 acceptance).

    KL dominates while acceptance is low and the gradient of total variation vanishes; total
    variation dominates later. Lambda is per row and carries no gradient.

    Source: Samarin et al. 2026, arXiv:2602.23881, the hybrid objective with eta = 3.
    """
    assert base.entropy is not None
    base_probs = _values(base)
    divergence = -(base_probs * log_draft).sum(-1) - base.entropy
    missed, slope = _missed(exponentials(log_draft), base_probs)
    trust = torch.exp(-TRUST * (1.0 - missed))
    log_draft.sub_(base_probs).mul_(trust[:, None]).addcmul_(slope, (1.0 - trust)[:, None])
    return trust * divergence + (1.0 - trust) * missed


LABELS_ONLY = ("cross_entropy",)
"""Losses that need labels only, not the base's distribution."""
LOG_PROBS = ("reverse_kl", "lk")
"""Losses that need log p; all others but `argmax_cross_entropy` need p."""
ENTROPY = ("kl", "lk_hybrid")
"""Losses that also need the entropy of p."""
LOSSES: dict[str, RowLoss] = {name: globals()[name] for name in training.LOSSES}
"""All losses by name, as in `schedule.phases.NAME.loss`."""


def best_of(rows: Float[Tensor, "row vocab"]) -> Int[Tensor, " row"]:
    """Return the argmax of each row, the first one of equals.

    On a CPU numpy takes a tenth of torch's time.
    """
    if rows.device.type == "cpu" and rows.dtype in (torch.float32, torch.float64):
        return torch.from_numpy(rows.detach().numpy().argmax(-1))
    return rows.argmax(-1)


def read_base(
    kind: str, labels: Int[Tensor, " row"], base_logits: Float[Tensor, "row vocab"]
) -> BaseRows:
    """Return the targets of a loss from the base's logits, which are not changed."""
    best = best_of(base_logits)
    if kind == "argmax_cross_entropy":
        return BaseRows(labels, best)
    if kind not in (*LOG_PROBS, *ENTROPY):
        return BaseRows(labels, best, base_logits.softmax(-1))
    log_probs = base_logits.log_softmax(-1).clamp_(min=RULED_OUT)
    if kind in LOG_PROBS:
        return BaseRows(labels, best, log_probs)
    probs = exponentials(log_probs.clone())
    return BaseRows(labels, best, probs, -(probs * log_probs).sum(-1))

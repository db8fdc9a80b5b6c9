"""The losses: one function each, with its gradient in closed form.

p is the base's distribution and q the draft's. Each function reads a block of rows of log q and
overwrites it with the gradient with respect to the draft's logits. A block needs one buffer and no
autograd graph. The names of all losses are `LOSSES` in config/training.py. See docs/losses.md.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Flag
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specheads.config.training import Phase

RULED_OUT = -1e4
"""Replaces minus infinity in log p, for a finite loss at p = 0. Finite logits in
use are far from it."""


class Needs(Flag):
    """What a loss reads of the base's distribution; every loss may read the labels."""

    LABELS = 0
    PROBS = 1
    LOG_PROBS = 2
    ENTROPY = 4


@dataclass(frozen=True, slots=True)
class BaseRows:
    """Targets of a block of rows: the labels, and what the loss needs of the base's distribution.

    Without a need of its distribution, `argmax` is the label.
    """

    labels: Int[Tensor, " row"]
    """The token of the text."""
    argmax: Int[Tensor, " row"]
    """The base's most likely token."""
    probs: Float[Tensor, "row vocab"] | None = None
    log_probs: Float[Tensor, "row vocab"] | None = None
    entropy: Float[Tensor, " row"] | None = None
    """Entropy of p in nats."""


LogProbs = Float[Tensor, "row vocab"]
RowLosses = Float[Tensor, " row"]


@dataclass(frozen=True, slots=True)
class RowLoss:
    """A loss of rows: its function and what the function needs."""

    compute: Callable[[LogProbs, BaseRows], RowLosses]
    """(log q, targets) -> loss per row; afterwards log q holds the gradient."""
    needs: Needs

    def read_base(
        self, labels: Int[Tensor, " row"], base_logits: Float[Tensor, "row vocab"]
    ) -> BaseRows:
        """Return the targets from the base's logits, which are not changed."""
        targets = BaseRows(labels, argmax_of_rows(base_logits))
        if not self.needs & (Needs.LOG_PROBS | Needs.ENTROPY):
            return replace(targets, probs=base_logits.softmax(-1))
        log_probs = base_logits.log_softmax(-1).clamp_(min=RULED_OUT)
        targets = replace(targets, log_probs=log_probs)
        if not self.needs & (Needs.PROBS | Needs.ENTROPY):
            return targets
        probs = exponentials(log_probs.clone())
        return replace(targets, probs=probs, entropy=-(probs * log_probs).sum(-1))


LOSSES: dict[str, RowLoss] = {}
"""All losses by name, as in `schedule.phases.NAME.loss`."""


def row_loss(needs: Needs) -> Callable[[Callable[..., RowLosses]], Callable[..., RowLosses]]:
    """Declare that a function is a loss of its name, with these needs."""

    def register(function: Callable[..., RowLosses]) -> Callable[..., RowLosses]:
        LOSSES[function.__name__] = RowLoss(function, needs)
        return function

    return register


def loss_of_phase(phase: Phase) -> RowLoss:
    """Return the loss of a phase.

    The keyword-only parameters of its function are settings of the phase with the same names.
    """
    loss = LOSSES[phase.loss]
    parameters = inspect.signature(loss.compute).parameters.values()
    settings = {
        parameter.name: getattr(phase, parameter.name)
        for parameter in parameters
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    return replace(loss, compute=partial(loss.compute, **settings)) if settings else loss


def exponentials(logarithms: Tensor) -> Tensor:
    """Exponentiate in place.

    On a CPU subnormal results become zero: MKL takes twenty times as long for them.
    """
    if logarithms.device.type != "cpu":
        return logarithms.exp_()
    smallest = torch.finfo(logarithms.dtype).tiny
    logarithms.clamp_(min=math.ceil(math.log(smallest))).exp_()
    return torch.threshold_(logarithms, 2 * smallest, 0.0)


def argmax_of_rows(rows: Float[Tensor, "row vocab"]) -> Int[Tensor, " row"]:
    """Return the argmax of each row, the first one of equals.

    On a CPU numpy takes a tenth of torch's time.
    """
    if rows.device.type == "cpu" and rows.dtype in (torch.float32, torch.float64):
        return torch.from_numpy(rows.detach().numpy().argmax(-1))
    return rows.argmax(-1)


@row_loss(Needs.LABELS)
def cross_entropy(log_draft: LogProbs, base: BaseRows) -> RowLosses:
    """Return the cross-entropy of the text's token, in nats."""
    labels = base.labels[:, None]
    loss = -log_draft.gather(-1, labels)
    exponentials(log_draft).scatter_add_(-1, labels, torch.full_like(loss, -1.0))
    return loss[:, 0]


@row_loss(Needs.PROBS)
def soft_cross_entropy(log_draft: LogProbs, base: BaseRows) -> RowLosses:
    """Return the cross-entropy to the base's distribution: KL(p || q) plus the entropy of p.

    Source: Ankner et al. 2024, arXiv:2402.05109, the teacher loss of Hydra++.
    """
    assert base.probs is not None
    loss = -(base.probs * log_draft).sum(-1)
    exponentials(log_draft).sub_(base.probs)
    return loss


def _rejection(draft_probs: LogProbs, base_probs: LogProbs) -> tuple[RowLosses, LogProbs]:
    """Return 1 - acceptance of each row and its gradient.

    Acceptance depends on q only where q < p; the gradient includes that of the softmax.
    """
    below = draft_probs < base_probs
    rejection = 1.0 - torch.minimum(draft_probs, base_probs).sum(-1)
    slope = draft_probs * below
    mass = slope.sum(-1, keepdim=True)
    return rejection, torch.addcmul(-slope, draft_probs, mass)


@row_loss(Needs.PROBS)
def total_variation(log_draft: LogProbs, base: BaseRows) -> RowLosses:
    """Return the total variation distance: one minus the acceptance rate of rejection sampling.

    Its gradient vanishes where q is zero on the tokens that p prefers.
    """
    assert base.probs is not None
    rejection, slope = _rejection(exponentials(log_draft), base.probs)
    log_draft.copy_(slope)
    return rejection


@row_loss(Needs.PROBS)
def cross_entropy_l1(log_draft: LogProbs, base: BaseRows) -> RowLosses:
    """Return 0.1 times the cross-entropy of the text's token plus 0.9 times the L1 distance.

    The L1 distance of p and q is twice their total variation distance.

    Source: deepseek-ai/DeepSpec, the loss of DSpark in config/dspark.
    """
    assert base.probs is not None
    labels = base.labels[:, None]
    surprise = -log_draft.gather(-1, labels)
    rejection, slope = _rejection(exponentials(log_draft), base.probs)
    log_draft.scatter_add_(-1, labels, torch.full_like(surprise, -1.0))
    log_draft.mul_(0.1).add_(slope, alpha=1.8)
    return 0.1 * surprise[:, 0] + 1.8 * rejection


@row_loss(Needs.LOG_PROBS)
def lk(log_draft: LogProbs, base: BaseRows) -> RowLosses:
    """Return minus the logarithm of the acceptance rate, in nats.

    Its gradient is that of total variation divided by the acceptance. It is computed in logarithms,
    because the acceptance may underflow.

    Source: Samarin et al. 2026, arXiv:2602.23881.
    """
    assert base.log_probs is not None
    log_acceptance = torch.minimum(log_draft, base.log_probs).logsumexp(-1, keepdim=True)
    below = log_draft < base.log_probs
    share = (log_draft - log_acceptance).masked_fill_(~below, -torch.inf)
    share = exponentials(share).mul_(below)
    exponentials(log_draft).mul_(share.sum(-1, keepdim=True)).sub_(share)
    return -log_acceptance[:, 0]


@row_loss(Needs.PROBS | Needs.ENTROPY)
def lk_hybrid(log_draft: LogProbs, base: BaseRows, *, lk_eta: float) -> RowLosses:
    """Return lambda KL(p || q) + (1 - lambda) TV(p, q) with lambda = exp(-eta acceptance).

    KL dominates while acceptance is low and the gradient of total variation vanishes; total
    variation dominates later. Lambda is per row and carries no gradient.

    Source: Samarin et al. 2026, arXiv:2602.23881, the hybrid objective.
    """
    assert base.probs is not None
    assert base.entropy is not None
    divergence = -(base.probs * log_draft).sum(-1) - base.entropy
    rejection, slope = _rejection(exponentials(log_draft), base.probs)
    kl_weight = torch.exp(-lk_eta * (1.0 - rejection))
    log_draft.sub_(base.probs).mul_(kl_weight[:, None])
    log_draft.addcmul_(slope, (1.0 - kl_weight)[:, None])
    return kl_weight * divergence + (1.0 - kl_weight) * rejection

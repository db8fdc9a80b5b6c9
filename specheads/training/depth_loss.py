"""Loss of all depths, fused with the vocabulary projection.

It projects one chunk of rows at a time and computes its loss and gradients, so logits of
shape (depth, row, vocab) or (row, vocab) are never in memory. The base's distribution is projected
from its hidden states in the same chunk, once for all depths that share it. See docs/losses.md.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from specheads.training.losses import LABELS_ONLY, LOSSES, BaseRows, best_of, read_base

SMOOTHING = 0.5
"""Smoothing of the acceptances towards one in D-PACE, so that rejected drafts still learn.

Source: Wu et al. 2026, arXiv:2605.18810.
"""
CHUNK_LOGITS = {"cpu": 2**24, "cuda": 2**28}
"""Logits of a chunk: small compared with the weights, and enough for a fast matrix product.

On a GPU each chunk reads and writes the weight's whole float32 gradient. With a vocabulary of 128k,
2**26 logits are 512 rows, whose products take as long as that traffic; 2048 rows take four times
as long.
"""
CONFIDENCE_LOGITS = {"cpu": 2**24, "cuda": 2**26}
"""Logits in memory at once for the confidence loss, of the draft and of the base each."""
BLOCK_LOGITS = {"cpu": 2**19, "cuda": 2**26}
"""Logits processed at once in float32: the size of a core's cache, or 256 MiB on a GPU."""
TILE = 128
"""Rows of a chunk or block on a GPU are a multiple of this, the tile of matrix products."""
WEIGHT_ROWS = 2**10
"""Rows of a weight whose gradient a CPU computes at once: the size of a core's cache."""
ABSENT = -2
"""Label of a level at which a chain has ended."""
Projection = tuple[Tensor, Tensor | None]
"""Weight (vocab, width) and bias."""


@dataclass(frozen=True, slots=True)
class Targets:
    """Targets of one depth or of several, one row per label."""

    labels: Int[Tensor, " row"]
    """The token of the text. -1 excludes the row and rejects its draft, `ABSENT` only excludes."""
    base_hidden: Float[Tensor, "row width"]
    """The base's final hidden state one position before the label."""
    project: Callable[[Tensor], Tensor]
    """Projects `base_hidden` to the base's logits. Losses in `LABELS_ONLY` do not call it; the
    agreement then compares with the labels."""
    count: Int[Tensor, ""] | None = None
    """Denominator of the mean; None counts these labels."""

    def mean_over(self) -> Int[Tensor, ""]:
        """Return the denominator of the mean."""
        return (self.labels >= 0).sum() if self.count is None else self.count


class DepthLoss(NamedTuple):
    """The total loss, and the metrics of each depth."""

    total: Float[Tensor, ""]
    """Weighted sum over depths of the mean over rows; carries the gradients."""
    by_depth: Float[Tensor, " depth"]
    """Mean loss of each depth, unweighted."""
    agreement: Float[Tensor, " depth"]
    """Share of rows where the draft's argmax equals the base's argmax."""


def depth_loss(
    states: Sequence[Float[Tensor, "row width"]],
    projections: Sequence[Projection],
    targets: Targets | Sequence[Targets],
    *,
    kind: str = "soft_cross_entropy",
    decay: float = 1.0,
    depth_weights: Sequence[float] = (),
    weighting: str = "geometric",
    chunk_rows: int | None = None,
) -> DepthLoss:
    """Return the loss of all depths without materialising all logits.

    Row r of the states of each depth belongs to label r. Tied depths repeat a projection. `kind` is
    one of `LOSSES`. `decay` is the weight of each depth relative to the previous one;
    `depth_weights` replaces it. `weighting` is geometric, or one of `CHAIN_WEIGHTS` that also
    multiplies each row; row r of every depth must then come from the same position, which needs
    targets per depth. `chunk_rows` rows have their logits in memory at once; None selects them for
    the device.
    """
    depth, weight = len(states), projections[0][0]
    each = [targets] * depth if isinstance(targets, Targets) else list(targets)
    sums = partial(
        _Sums,
        kind=kind,
        targets=each,
        weights=depth_shares(depth, decay, depth_weights),
        counts=torch.stack([one.mean_over() for one in each]),
        weighting=weighting,
        chunk_rows=chunk_rows or rows_of(weight),
        block_rows=rows_of(weight, BLOCK_LOGITS),
    )
    flat = [tensor for pair in projections for tensor in pair]
    return DepthLoss(*_FusedDepthLoss.apply(sums, torch.is_grad_enabled(), *states, *flat))


def rows_of(weight: Float[Tensor, "vocab width"], logits: Mapping[str, int] = CHUNK_LOGITS) -> int:
    """Return the number of rows whose logits are processed at once."""
    kind = "cpu" if weight.device.type == "cpu" else "cuda"
    rows = max(1, logits[kind] // len(weight))
    return rows if kind == "cpu" or rows < TILE else rows - rows % TILE


def depth_shares(depth: int, decay: float, depth_weights: Sequence[float]) -> list[float]:
    """Return the weight of each depth's loss."""
    return list(depth_weights) or [decay**level for level in range(depth)]


Chain = Float[Tensor, "depth row"]
"""A value of each level of chains that start at the same positions."""


def length_weights(acceptances: Chain) -> Chain:
    """Return the expected number of accepted drafts of each level and those that depend on it.

    The weight of depth j is the sum over m >= j of the product over i <= m of the acceptances. It
    is the derivative of the expected number of accepted drafts with respect to the logarithm of
    acceptance j.
    """
    return acceptances.cumprod(0).flip(0).cumsum(0).flip(0)


def first_error_weights(acceptances: Chain) -> Chain:
    """Return the probability that all drafts before each level are accepted."""
    return torch.cat([torch.ones_like(acceptances[:1]), acceptances[:-1]]).cumprod(0)


CHAIN_WEIGHTS: dict[str, Callable[[Chain], Chain]] = {
    "dpace": length_weights,
    "first_error": first_error_weights,
    "accepted_length": length_weights,
}
"""Weights of the levels of a chain from the acceptances of its drafts, without gradient."""


def confidence_loss(
    predicted: Sequence[Float[Tensor, " row"]],
    states: Sequence[Float[Tensor, "row width"]],
    projections: Sequence[Projection],
    targets: Sequence[Targets],
) -> Float[Tensor, " depth"]:
    """Return the binary cross-entropy per depth between the predicted and the true acceptance rate.

    The true rate carries no gradient. Rows without a label are excluded.

    Source: deepseek-ai/DeepSpec, deepspec/modeling/dspark/loss.py.
    """
    losses = []
    for logits, state, projection, target in zip(
        predicted, states, projections, targets, strict=True
    ):
        rates = acceptance_rates(state, projection, target)
        found = F.binary_cross_entropy_with_logits(logits.to(rates.dtype), rates, reduction="none")
        found = found.where(target.labels >= 0, 0.0)
        losses.append(found.sum() / target.mean_over().clamp(min=1))
    return torch.stack(losses)


@torch.no_grad()
def acceptance_rates(
    states: Float[Tensor, "row width"], projection: Projection, targets: Targets
) -> Float[Tensor, " row"]:
    """Return the sum over tokens of the minimum of draft and base probability."""
    weight, bias = (None if one is None else one.to(states.dtype) for one in projection)
    assert weight is not None
    precision = torch.promote_types(states.dtype, torch.float32)
    chunk = rows_of(weight, CONFIDENCE_LOGITS)
    rates = [
        torch.minimum(
            F.linear(some, weight, bias).to(precision).softmax(-1),
            targets.project(base).to(precision).softmax(-1),
        ).sum(-1)
        for some, base in zip(states.split(chunk), targets.base_hidden.split(chunk), strict=True)
    ]
    return torch.cat(rates).clamp_(max=1.0)


class _FusedDepthLoss(torch.autograd.Function):
    """Computes gradients in the forward pass, chunk by chunk."""

    @staticmethod
    @torch.autocast("cuda", enabled=False)
    @torch.autocast("cpu", enabled=False)
    def forward(ctx: Any, make: Callable[..., "_Sums"], learns: bool, *tensors: Any) -> Any:
        """Return the total, the losses by depth and the agreement; store the gradients."""
        sums = make(tensors, [learns and needed for needed in ctx.needs_input_grad[2:]])
        sums.add_all()
        ctx.gradients = sums.gradients
        ctx.mark_non_differentiable(sums.by_depth, sums.agreement)
        return sums.total, sums.by_depth, sums.agreement

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """Return the stored gradients, scaled by the gradient of the loss; once."""
        if ctx.gradients is None:
            raise RuntimeError("a loss supports one backward, got a second; compute it again")
        # scale in place: a copy of every projection's gradient would dominate the memory
        given, ctx.gradients = ctx.gradients, None
        return None, None, *(None if one is None else one.mul_(grad_outputs[0]) for one in given)


class _Sums:
    """Sums losses, agreement, and the gradients of the tensors that require one.

    `tensors` are the states of all depths, and then the weight and bias of each depth. Products run
    in the states' dtype, which autocast selected; losses in at least float32.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor | None],
        wanted: Sequence[bool],
        *,
        kind: str,
        targets: list[Targets],
        weights: list[float],
        counts: Int[Tensor, " depth"],
        weighting: str,
        chunk_rows: int,
        block_rows: int,
    ) -> None:
        self.kind, self.targets, self.weights, self.weighting = kind, targets, weights, weighting
        self.chunk_rows, self.block_rows = chunk_rows, block_rows
        self.states = [state for state in tensors[: len(targets)] if state is not None]
        dtype = self.states[0].dtype
        self.precision = torch.promote_types(dtype, torch.float32)
        # a tensor shared by several depths has one gradient and one cast copy, at its first place
        first: dict[int, int] = {}
        self.place = [first.setdefault(id(one), number) for number, one in enumerate(tensors)]
        self.gradients = [
            torch.zeros_like(one) if one is not None and want and first[id(one)] == number else None
            for number, (one, want) in enumerate(zip(tensors, wanted, strict=True))
        ]
        self.cast = {
            place: None if (one := tensors[place]) is None else one.to(dtype)
            for place in sorted(set(self.place))
        }
        self.total = self.states[0].new_zeros((), dtype=self.precision)
        self.by_depth = self.total.repeat(len(targets))
        self.agreement = torch.zeros_like(self.by_depth)
        self.shares = list(1.0 / counts.clamp(min=1).to(self.precision))
        # every level of a chain that ends at its first error has the denominator of the first one
        ends = weighting in ("first_error", "accepted_length")
        self.row_shares = self.shares[:1] * len(self.shares) if ends else self.shares
        self.pending: list[tuple[int, Tensor, Tensor, Tensor, Tensor]] = []
        self.room: list[Tensor] = []
        """Buffers of earlier chunks, for reuse: on a CPU new pages take a third of a product."""

    def add_all(self) -> None:
        """Add all rows, chunk by chunk."""
        depth, base_rows = len(self.targets), list[BaseRows]()
        # the weight of a chain's row depends on the slopes of all depths at once
        is_chain = self.weighting in CHAIN_WEIGHTS
        chunk_rows = max(1, self.chunk_rows // depth if is_chain else self.chunk_rows)
        for start in range(0, len(self.targets[0].labels), chunk_rows):
            rows = slice(start, start + chunk_rows)
            for level, target in enumerate(self.targets):
                if level == 0 or target is not self.targets[level - 1]:
                    base_rows.clear()  # free the memory before the next allocation
                    base_rows = self._base_rows(target, rows)
                self._add(level, rows, base_rows)
                if not is_chain or level == depth - 1:
                    self._flush(rows)

    def _base_rows(self, targets: Targets, rows: slice) -> list[BaseRows]:
        """Return the targets of each block of a chunk."""
        labels = targets.labels[rows].clamp(min=0).split(self.block_rows)
        if self.kind in LABELS_ONLY:
            return [BaseRows(block, block) for block in labels]
        logits = targets.project(targets.base_hidden[rows]).split(self.block_rows)
        return [
            read_base(self.kind, block, some.to(self.precision))
            for block, some in zip(labels, logits, strict=True)
        ]

    def _places(self, level: int) -> list[int]:
        """Return the indices of a depth's weight and bias."""
        first = len(self.states) + 2 * level
        return self.place[first : first + 2]

    def _logits(self, level: int, rows: slice) -> Tensor:
        """Return a depth's logits of some rows, in an earlier buffer if it is large enough."""
        state, (weight, bias) = self.states[level][rows], map(self.cast.get, self._places(level))
        assert weight is not None
        room = self.room.pop() if self.room else None
        if room is None or room.shape[1] != len(weight) or len(room) < len(state):
            return F.linear(state, weight, bias)
        logits = torch.mm(state, weight.T, out=room[: len(state)])
        return logits if bias is None else logits.add_(bias)

    def _add(self, level: int, rows: slice, base_rows: list[BaseRows]) -> None:
        """Compute one depth's slopes of a chunk, and store them until they are weighted.

        Blocks are computed in at least float32 and stored in the precision of the products.
        """
        slopes = self._logits(level, rows)
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        for block, base in zip(slopes.split(self.block_rows), base_rows, strict=True):
            log_draft = block.log_softmax(-1, dtype=self.precision)
            agreed = best_of(log_draft) == base.best
            expected = base.best if self.kind == "argmax_cross_entropy" else base.labels
            confidence = log_draft.gather(-1, expected[:, None])[:, 0].exp()
            found.append((LOSSES[self.kind](log_draft, base), confidence, agreed))
            block.copy_(log_draft)
        losses, accepted, agreed = (torch.cat(column) for column in zip(*found, strict=True))
        labels = self.targets[level].labels[rows]
        drafted = labels >= 0
        losses = losses.where(drafted, 0.0)
        self.by_depth[level] += losses.sum() * self.shares[level]
        self.agreement[level] += (agreed & drafted).sum() * self.shares[level]
        # the acceptance of a draft is its confidence in D-PACE, else sum min(p, q) if a loss has it
        if self.weighting != "dpace" and self.kind == "lk":
            accepted = torch.exp(-losses)
        elif self.weighting != "dpace" and self.kind == "total_variation":
            accepted = 1.0 - losses
        accepted = accepted * drafted
        if self.weighting == "dpace":
            accepted = (SMOOTHING + (1 - SMOOTHING) * accepted).where(labels != ABSENT, 0.0)
        self.pending.append((level, slopes, losses, accepted, drafted))

    def _flush(self, rows: slice) -> None:
        """Weight the stored slopes and add their gradients."""
        accepted = torch.stack([one for _, _, _, one, _ in self.pending])
        weights = CHAIN_WEIGHTS.get(self.weighting, torch.ones_like)(accepted)
        reached = accepted.cumprod(0)
        for place, (level, slopes, losses, _, drafted) in enumerate(self.pending):
            share = self.weights[level] * self.row_shares[level]
            scale = weights[place] * drafted * share
            if self.weighting == "accepted_length":
                # the value whose gradient the weights make of those of -log acceptance
                self.total -= reached[place].sum() * share
            else:
                self.total += (losses * scale).sum()
            self._add_gradients(level, rows, slopes, scale)
            self.room.append(slopes)
        self.pending.clear()

    def _add_gradients(self, level: int, rows: slice, slopes: Tensor, scale: Tensor) -> None:
        """Add the gradients from the slopes of some rows' logits, each row times its scale."""
        state = self.states[level][rows]
        scale = scale.to(state.dtype)
        weight, bias = self._places(level)
        # scale rows of the states' width, which are shorter than the vocabulary
        if (sums := self.gradients[self.place[level]]) is not None:
            projection = self.cast[weight]
            assert projection is not None
            sums[rows] += (slopes @ projection).mul_(scale[:, None])
        if (sums := self.gradients[weight]) is not None:
            _add_product(sums, slopes, state * scale[:, None])
        if (sums := self.gradients[bias]) is not None:
            sums += scale @ slopes


def _add_product(sums: Tensor, slopes: Tensor, states: Tensor) -> None:
    """Add `slopes.T @ states` to sums, which may have another dtype.

    With equal dtypes this is in place. Otherwise a CPU adds in blocks: a whole product of
    vocabulary size, and its cast, would need new pages each time, which takes longer than the
    product itself.
    """
    if sums.dtype == states.dtype:
        # `addmm_` does the same, but torch does not count its FLOPs
        torch.addmm(sums, slopes.T, states, out=sums)
        return
    size = WEIGHT_ROWS if sums.device.type == "cpu" else len(sums)
    for start in range(0, len(sums), size):
        sums[start : start + size] += slopes[:, start : start + size].T @ states

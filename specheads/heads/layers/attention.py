"""Attention for heads that have some: committed positions, and a path of one's own beside them.

Every query sees slots that all share, as far as it may, and then the path that led to it. In
training the slots are a text and a path is what was drafted from one position of it; in drafting
the slots are what was committed and a path is a branch of the tree. So both are one formula.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from specheads.core.errors import InputError
from specheads.heads.layers.common import RMSNorm
from specheads.heads.layers.path_attention import DocumentBounds, path_attention
from specheads.heads.layers.rotary import Rotary


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of an attention.

    Raises:
        ValueError: The heads do not divide, or cannot be rotated.
    """

    num_heads: int
    """Number of attention heads."""
    num_shared: int
    """Number of heads of keys and values, each for several attention heads."""
    head_dim: int
    """Number of channels of a head."""
    rotary: Rotary
    """What positions do to queries and keys."""
    norm_epsilon: float | None = None
    """Epsilon of norms over each head's queries and keys, as Qwen3 has them. None: no norms."""
    bias: bool = False
    """Whether queries, keys and values have biases, as Qwen2's."""

    @classmethod
    def of(
        cls,
        width: int,
        num_heads: int,
        num_shared: int,
        head_dim: int = 0,
        *,
        theta: float,
        scaling: Mapping[str, Any] | None = None,
        norm_epsilon: float | None = None,
        bias: bool = False,
    ) -> "AttentionShape":
        """Return the shape that settings name; where they say zero, one that fits the width."""
        num_heads = num_heads or max(1, width // 64)
        size, rotary = head_dim or width // num_heads, Rotary.of(theta, scaling)
        return cls(num_heads, num_shared or num_heads, size, rotary, norm_epsilon, bias)

    def __post_init__(self) -> None:
        if self.num_heads % self.num_shared or self.head_dim % 2:
            raise InputError(
                "attention needs key and value heads that divide its heads, and an even number "
                f"of channels a head, got {self.num_shared}, {self.num_heads} and {self.head_dim}"
            )


class Attention(nn.Module):
    """Rotary attention with grouped keys and values, and names as Llama has them.

    Args:
        input_width: Width of what it reads.
        width: Width of what it returns.
        shape: Number and width of its heads.
    """

    def __init__(self, input_width: int, width: int, shape: AttentionShape) -> None:
        super().__init__()
        num_heads, num_shared, head_dim = shape.num_heads, shape.num_shared, shape.head_dim
        self.num_shared, self.head_dim, self.rotary = num_shared, head_dim, shape.rotary
        self.q_proj = nn.Linear(input_width, num_heads * head_dim, bias=shape.bias)
        self.k_proj = nn.Linear(input_width, num_shared * head_dim, bias=shape.bias)
        self.v_proj = nn.Linear(input_width, num_shared * head_dim, bias=shape.bias)
        self.o_proj = nn.Linear(num_heads * head_dim, width, bias=False)
        epsilon = shape.norm_epsilon
        self.q_norm, self.k_norm = (
            nn.Identity() if epsilon is None else RMSNorm(head_dim, epsilon) for _ in range(2)
        )

    def keys_values(self, inputs: Tensor, positions: Int[Tensor, "batch time"]) -> Tensor:
        """Return what may be attended to: (batch, shared head, 2, time, head_dim)."""
        keys = self.rotary.turn(self.k_norm(self._split(self.k_proj(inputs))), positions)
        return torch.stack([keys, self._split(self.v_proj(inputs))], dim=2)

    def forward(
        self,
        inputs: Tensor,
        positions: Int[Tensor, "batch time"],
        past: Tensor,
        visible: Tensor | None,
        path: Tensor | None = None,
        documents: Sequence[int] | DocumentBounds = (),
    ) -> Tensor:
        """Attend to the visible slots and to the path, itself included, as if they were one.

        Args:
            inputs: (batch, time, input_width).
            positions: Positions of the inputs; only differences matter.
            past: (batch, shared head, 2, slot, head_dim), from `keys_values`.
            visible: (batch, time, slot); batch and time may be one. Not read with `documents`.
            path: (batch, shared head, 2, time, level, head_dim): each position's own, if any.
            documents: The documents of packed rows, where slots are positions and each position
                sees those of its document up to itself. Lengths have each document computed alone,
                bounds all of them by flash attention. Empty computes every pair of positions.
        """
        queries = self.rotary.turn(self.q_norm(self._split(self.q_proj(inputs))), positions)
        if path is None:
            assert visible is not None
            mixed = _attend(queries, past, visible[:, None])
        elif isinstance(documents, DocumentBounds):
            mixed = path_attention(queries, past, path, documents)
        elif documents:
            mixed = _mix_documents(queries, past, path, documents)
        else:
            assert visible is not None
            mixed = _sparing(_mix, queries, past, visible, path)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def _split(self, values: Tensor) -> Tensor:
        return values.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def _attend(queries: Tensor, past: Tensor, mask: Tensor) -> Tensor:
    """Return torch's attention over the slots that a mask leaves visible."""
    shared = queries.shape[1] != past.shape[1]
    if shared and past.device.type != "cpu":
        # no fused kernel on CUDA takes a mask and fewer key heads; the plain one holds every weight
        past, shared = past.repeat_interleave(queries.shape[1] // past.shape[1], dim=1), False
    keys, values = past.unbind(2)
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=shared)


def _sparing(mix: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Mix, and make the weights again in the backward pass: those of all levels would not fit."""
    if not torch.is_grad_enabled():
        return mix(*inputs)
    mixed = checkpoint(mix, *inputs, use_reentrant=False)
    assert isinstance(mixed, Tensor)
    return mixed


def _mix_documents(queries: Tensor, past: Tensor, path: Tensor, lengths: Sequence[int]) -> Tensor:
    """Mix as `_mix` does, each document by itself: few weights at once, and none for nothing."""
    # taken apart along one axis, whose gradient is put together again once
    columns = [
        values.movedim(axis, 1).flatten(0, 1).split(lengths)
        for values, axis in ((queries, 2), (past, 3), (path, 3))
    ]
    pieces = [_sparing(_mix_document, *piece) for piece in zip(*columns, strict=True)]
    return torch.cat(pieces).unflatten(0, (len(queries), -1)).transpose(1, 2)


def _mix_document(queries: Tensor, past: Tensor, path: Tensor) -> Tensor:
    """Mix one document, time first: (time, head, head_dim)."""
    queries, past, path = queries[None].movedim(1, 2), past[None].movedim(1, 3), path[None]
    visible = torch.ones(1, *queries.shape[2:3] * 2, dtype=torch.bool).tril()
    return _mix(queries, past, visible, path.movedim(1, 3))[0].transpose(0, 1)


def _mix(queries: Tensor, past: Tensor, visible: Tensor, path: Tensor) -> Tensor:
    (keys, values), (own_keys, own_values) = past.unbind(2), path.unbind(2)
    grouped = queries.unflatten(1, (keys.shape[1], -1)) / math.sqrt(queries.shape[-1])
    scores = torch.einsum("bhgtd,bhsd->bhgts", grouped, keys)
    scores = scores.masked_fill(~visible[:, None, None], -math.inf)
    own = torch.einsum("bhgtd,bhtld->bhgtl", grouped, own_keys)
    weights = torch.cat([scores, own], dim=-1).softmax(-1).to(values.dtype)
    shared, alone = weights.split([keys.shape[2], own_keys.shape[3]], dim=-1)
    mixed = torch.einsum("bhgts,bhsd->bhgtd", shared, values)
    return (mixed + torch.einsum("bhgtl,bhtld->bhgtd", alone, own_values)).flatten(1, 2)


class GatedMlp(nn.Module):
    """down(SiLU(gate x) * up x), with names as Llama has them.

    Args:
        width: Width of the stream.
        inner: Width between. Zero takes 8/3 of the stream's, rounded up to a multiple of 16.
    """

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        inner = inner or math.ceil(width / 6) * 16
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, values: Tensor) -> Tensor:
        """Return what is to be added to the residual stream."""
        return self.down_proj(F.silu(self.gate_proj(values)) * self.up_proj(values))


@dataclass(slots=True)
class Slots:
    """Keys and values of committed positions; what lies beyond a row's length is never seen."""

    held: Tensor
    """(batch, shared head, 2, capacity, head_dim): products read one layer's where they lie."""
    lengths: Int[Tensor, " batch"]
    """Committed positions of each row."""
    extent: int = 0
    """Slots that any row may use, known without asking the device."""
    places: Int[Tensor, "batch slot"] | None = None
    """Where each position lies in the only row of `held`; None is a row of its own, in order."""

    @classmethod
    def empty(cls, attention: Attention, batch: int, capacity: int, layers: int = 1) -> "Slots":
        """Return rows without positions, in the precision and place of their attention.

        Several layers of one shape lie beside one another, along the axis of shared heads.
        """
        weight = attention.k_proj.weight
        shape = (batch, layers * attention.num_shared, 2, capacity, attention.head_dim)
        return cls(weight.new_zeros(shape), torch.zeros(batch, dtype=torch.long).to(weight.device))

    def append(self, fresh: Tensor, count: Int[Tensor, " batch"]) -> None:
        """Write the new positions behind each row's old ones; `count` of them stay."""
        self.write(fresh, self.advance(fresh.shape[3], count))

    def advance(self, time: int, count: Int[Tensor, " batch"]) -> Int[Tensor, "row time"]:
        """Return the next `time` positions of each row, of which `count` are its own from now."""
        positions = self.following(time)
        if self.places is None:
            self.extent = min(self.extent + time, self.held.shape[3])
        self.lengths = self.lengths + count
        return positions

    def write(self, fresh: Tensor, positions: Int[Tensor, "row time"], layer: int = 0) -> None:
        """Keep keys and values of these positions: those of one layer, or of all that there are."""
        rows, slots = torch.arange(len(fresh), device=positions.device)[:, None], positions
        if self.places is not None:
            rows, slots = 0 * rows, self.places.gather(1, positions)
        else:
            # a row near its end may stand beside one that has more to read, and be padded to it
            slots = slots.clamp(max=self.held.shape[3] - 1)
        heads = fresh.shape[1]
        held = self.held[:, layer * heads : (layer + 1) * heads]
        held[rows, :, :, slots] = fresh.permute(0, 3, 1, 2, 4)

    def following(self, time: int) -> Int[Tensor, "row time"]:
        """Return the next `time` positions of each row."""
        return self.lengths[:, None] + torch.arange(time, device=self.lengths.device)

    def past(self, upto: Int[Tensor, "row time"] | None = None) -> tuple[Tensor, Tensor]:
        """Return the slots in use, and which of them are seen: (batch, time, slot).

        They are those up to a position each; None is the newest of each row.
        """
        upto = self.lengths[:, None] - 1 if upto is None else upto
        visible = torch.arange(self.extent, device=upto.device) <= upto[..., None]
        if self.places is not None:
            return self.held[0][:, :, self.places].permute(2, 0, 1, 3, 4), visible
        return self.held[:, :, :, : self.extent], visible

    def scatter(self, places: Tensor, lengths: Tensor) -> "Slots":
        """Return rows that lie anywhere in the only row of this: see `Memory.scatter`."""
        return Slots(self.held, lengths, places.shape[1], places)

    def keep(self, rows: Int[Tensor, " kept"]) -> "Slots":
        """Return these rows alone, and ask the device how many slots they use."""
        lengths = self.lengths[rows]
        return Slots(self.held[rows], lengths, int(lengths.max()))

    def join(self, other: "Slots") -> "Slots":
        """Return the rows of both, which have the same capacity."""
        lengths = torch.cat([self.lengths, other.lengths])
        return Slots(torch.cat([self.held, other.held]), lengths, max(self.extent, other.extent))

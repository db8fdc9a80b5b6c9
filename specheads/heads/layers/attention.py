"""Attention of heads over committed positions and over the path of each query.

Each query sees the slots that its mask allows, which are common to all queries, and its own path.
In training the slots are a text and a path is the draft from one position. In drafting the slots
are the committed positions and a path is a branch of the tree. Both use the same formula.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from specheads.core.errors import InputError
from specheads.core.features import PackedDocuments
from specheads.core.ranges import NonNegativeInt, PositiveInt, WidthOrZero, is_allowed
from specheads.heads.layers.common import RMSNorm
from specheads.heads.layers.path_attention import path_attention
from specheads.heads.layers.rotary import rope, rotate


@dataclass(kw_only=True, slots=True)
class AttentionConfig:
    """Sizes of a head's layers, and its draft vocabulary."""

    attention_heads: WidthOrZero = 0
    """Number of attention heads. Zero is one per 64 channels of the base."""
    key_value_heads: WidthOrZero = 0
    """Number of key and value heads. Zero is the number of attention heads."""
    head_dim: WidthOrZero = 0
    """Number of channels per attention head. Zero is the base's width divided by the heads."""
    inner_dim: WidthOrZero = 0
    """Width of its MLPs. Zero is 8/3 of the base's width, rounded up to a multiple of 16."""
    draft_tokens: NonNegativeInt = 0
    """Size of the draft vocabulary: the most frequent tokens of the training text. Zero is all."""


class Attention(nn.Module):
    """Rotary attention with grouped keys and values, and parameter names of Llama.

    `config` has the settings of `AttentionConfig`, `rope_theta` and, for some kinds,
    `rope_scaling`, `attention_bias` (as in Qwen2), `qk_norm` (as in Qwen3) and `attention_sink` (as
    in gpt-oss). An `input_width` of zero is the width of the output. With `only_reads`, keys and
    values are those of another module of the same sizes.
    """

    def __init__(
        self, config: Any, width: int, input_width: int = 0, *, only_reads: bool = False
    ) -> None:
        super().__init__()
        num_heads = config.attention_heads or max(1, width // 64)
        shared = self.num_key_value_heads = config.key_value_heads or num_heads
        size = self.head_dim = getattr(config, "head_dim", 0) or width // num_heads
        if num_heads % shared or size % 2:
            raise InputError(
                "attention needs key_value_heads that divide attention_heads and an even head_dim, "
                f"got {shared}, {num_heads} and {size}; set them under head="
            )
        self.rope = rope(config.rope_theta, getattr(config, "rope_scaling", {}))
        bias = getattr(config, "attention_bias", False)
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(input_width or width, heads * size, bias=bias)
            for heads in (num_heads, shared, shared)
        )
        if only_reads:
            del self.k_proj, self.v_proj
        self.o_proj = nn.Linear(num_heads * size, width, bias=False)
        normed = getattr(config, "qk_norm", False)
        self.q_norm, self.k_norm = (
            RMSNorm(size, config.epsilon) if normed else nn.Identity() for _ in range(2)
        )
        sink = bool(getattr(config, "attention_sink", False))
        self.attention_sink_bias = nn.Parameter(torch.zeros(num_heads)) if sink else None
        # as the kernels see it
        self.kernel_dim = size + SINK_CHANNELS * sink

    def keys_values(self, inputs: Tensor, positions: Int[Tensor, "batch time"]) -> Tensor:
        """Return keys and values: (batch, key head, 2, time, head_dim)."""
        keys = rotate(self.rope, self.k_norm(self._split(self.k_proj(inputs))), positions)
        return torch.stack([keys, self._split(self.v_proj(inputs))], dim=2)

    def forward(
        self,
        inputs: Tensor,
        positions: Int[Tensor, "batch time"],
        past: Tensor,
        visible: Tensor | None,
        path: Tensor | None = None,
        documents: PackedDocuments | None = None,
        window: int | None = None,
    ) -> Tensor:
        """Compute attention over the visible slots and the path, under one softmax.

        Args:
            inputs: (batch, time, input_width).
            positions: Positions of the inputs; only differences matter.
            past: (batch, key head, 2, slot, head_dim), from `keys_values`.
            visible: (batch, time, slot); batch and time may be one. Ignored with `documents`.
            path: (batch, key head, 2, time, level, head_dim): the path of each position, itself
                included, if any.
            documents: Documents of packed rows, if slots are positions and attention is causal
                within documents. None computes every pair of positions.
            window: With `documents`, the number of positions that each position sees; None is all.
        """
        queries = rotate(self.rope, self.q_norm(self._split(self.q_proj(inputs))), positions)
        if self.attention_sink_bias is not None:
            queries = _with_sink(queries, self.attention_sink_bias)
            past = _widened(past, sink=path is None)
            if path is not None:
                path = _widened(path)
            elif visible is not None:
                visible = F.pad(visible, (0, 1), value=True)
        if path is None:
            assert visible is not None
            mixed = _attend(queries, past, visible[:, None])
        elif documents is None:
            assert visible is not None
            mixed = _sparing(_mix, queries, past, visible, path)
        elif queries.device.type == "cpu":
            mixed = _mix_documents(queries, past, path, documents.lengths, window)
        else:
            mixed = path_attention(queries, past, path, documents, window)
        return self.o_proj(mixed[..., : self.head_dim].transpose(1, 2).flatten(2))

    def _split(self, values: Tensor) -> Tensor:
        return values.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


SINK_CHANNELS = 8
"""Channels that a sink adds to queries, keys and values: fused kernels take multiples of 8."""


def _with_sink(queries: Tensor, sink: Tensor) -> Tensor:
    """Add channels to queries, whose product with the key of `_widened` is the sink's logit."""
    size = queries.shape[-1]
    wide = size + SINK_CHANNELS
    # scores are divided by the root of the width
    logits = (sink * math.sqrt(wide))[:, None, None].expand(*queries.shape[:-1], 1)
    parts = [queries * math.sqrt(wide / size), F.pad(logits, (0, SINK_CHANNELS - 1))]
    return torch.cat([part.to(queries.dtype) for part in parts], dim=-1)


def _widened(kv: Tensor, *, sink: bool = True) -> Tensor:
    """Add channels to keys and values, and a last slot for the sink, whose value is zero."""
    size, kv = kv.shape[-1], F.pad(kv, (0, SINK_CHANNELS, 0, int(sink)))
    if sink:
        kv.select(2, 0)[..., -1, size] = 1
    return kv


def _attend(queries: Tensor, past: Tensor, mask: Tensor) -> Tensor:
    """Return torch's attention over the visible slots."""
    shared = queries.shape[1] != past.shape[1]
    if shared and past.device.type != "cpu":
        # no fused kernel on CUDA supports a mask with fewer key heads, and the plain one is large
        past, shared = past.repeat_interleave(queries.shape[1] // past.shape[1], dim=1), False
    keys, values = past.unbind(2)
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=shared)


def _sparing(mix: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """Run `mix`, and recompute its weights in the backward pass to save memory."""
    if not torch.is_grad_enabled():
        return mix(*inputs)
    mixed = checkpoint(mix, *inputs, use_reentrant=False)
    assert isinstance(mixed, Tensor)
    return mixed


def _mix_documents(
    queries: Tensor, past: Tensor, path: Tensor, lengths: Sequence[int], window: int | None
) -> Tensor:
    """Run `_mix` for each document separately, without the scores between documents."""
    # one split along one axis needs only one concatenation in the backward pass
    columns = [
        values.movedim(axis, 1).flatten(0, 1).split(lengths)
        for values, axis in ((queries, 2), (past, 3), (path, 3))
    ]
    pieces = [_sparing(_mix_document, *piece, window) for piece in zip(*columns, strict=True)]
    return torch.cat(pieces).unflatten(0, (len(queries), -1)).transpose(1, 2)


def _mix_document(queries: Tensor, past: Tensor, path: Tensor, window: int | None) -> Tensor:
    """Run `_mix` for one document with the time axis first: (time, head, head_dim)."""
    queries, past, path = queries[None].movedim(1, 2), past[None].movedim(1, 3), path[None]
    visible = torch.ones(1, *queries.shape[2:3] * 2, dtype=torch.bool).tril()
    return _mix(queries, past, near(visible, window), path.movedim(1, 3))[0].transpose(0, 1)


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


def near(
    visible: Bool[Tensor, "row time time"], window: int | None
) -> Bool[Tensor, "row time time"]:
    """Return a mask without the pairs of positions that are `window` or more apart."""
    if window is None:
        return visible
    return visible & torch.ones_like(visible[0]).triu(1 - window)


def draft_window(settings: Mapping[str, Any], num_layers: int) -> tuple[int | None, dict[str, Any]]:
    """Return the window of all layers, and the only supported values of settings of windows.

    A head has one window or none: layers of both kinds are not supported.
    """
    window, kinds = settings.get("sliding_window"), settings.get("layer_types")
    on = settings.get("use_sliding_window") is not False and is_allowed(PositiveInt, window)
    sliding = kinds.count("sliding_attention") if isinstance(kinds, list) else 0
    if on and sliding == num_layers == len(kinds or ()):
        return window, {}
    return None, full_attention(settings)


def full_attention(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the only values of settings of windows with which all layers have full attention."""
    kinds = settings.get("layer_types")
    if kinds and set(kinds) == {"full_attention"}:
        return {}
    if kinds:
        return {"layer_types": "full_attention", "sliding_window": None}
    if settings.get("use_sliding_window") is False:
        return {}
    return {"sliding_window": None, "use_sliding_window": False}


def published_sizes(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of layers and the depth, if it is known, of a published config."""
    proposal = settings.get("speculators_config", {}).get("proposal_methods", [settings])[0]
    depth, drafted = proposal.get("speculative_tokens"), settings.get("draft_vocab_size") or 0
    return {
        **({"depth": depth} if depth else {}),
        "attention_heads": settings["num_attention_heads"],
        "key_value_heads": settings.get("num_key_value_heads") or 0,
        "head_dim": settings.get("head_dim") or 0,
        "inner_dim": settings["intermediate_size"],
        "epsilon": settings["rms_norm_eps"],
        "draft_tokens": drafted if drafted != settings["vocab_size"] else 0,
    }


class GatedMlp(nn.Module):
    """down(SiLU(gate x) * up x), with parameter names of Llama; see `inner_dim` for its width."""

    def __init__(self, width: int, inner_dim: int) -> None:
        super().__init__()
        inner = inner_dim or math.ceil(width / 6) * 16
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, values: Tensor) -> Tensor:
        """Return the update of the residual stream."""
        return self.down_proj(F.silu(self.gate_proj(values)) * self.up_proj(values))


class LlamaLayer(nn.Module):
    """A Llama layer that may also read the embedding of a token, as EAGLE-3's first layer does.

    `config` is that of `Attention`, with `inner_dim` and `epsilon`.
    """

    def __init__(self, config: Any, width: int, *, reads_tokens: bool = False) -> None:
        super().__init__()
        self.norm_before_residual = reads_tokens and config.norm_before_residual
        self.input_layernorm = RMSNorm(width, config.epsilon)
        self.hidden_norm = RMSNorm(width, config.epsilon) if reads_tokens else None
        self.self_attn = Attention(config, width, (1 + reads_tokens) * width)
        self.post_attention_layernorm = RMSNorm(width, config.epsilon)
        self.mlp = GatedMlp(width, config.inner_dim)

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors of a base's layer; the inputs of a token, which it lacks, get zeros."""
        own: dict[str, Tensor] = dict(self.named_parameters())
        # the base has none
        own.pop("self_attn.attention_sink_bias", None)
        if self.hidden_norm is not None:
            own["input_layernorm.weight"] = own.pop("hidden_norm.weight")
            for name in (f"self_attn.{one}_proj.weight" for one in "qkv"):
                own[name] = own[name].zero_().chunk(2, dim=1)[1]
        shapes = [{name: (*one.shape,) for name, one in each.items()} for each in (own, tensors)]
        for name in sorted(own.keys() | tensors.keys()):
            here, there = (each.get(name) for each in shapes)
            if here != there:
                raise InputError(
                    f"head.init_from_base=true needs equal layers, got {name} of {there} in the "
                    f"base and {here} in the head; set the sizes under head= to 0, or leave it out"
                )
            own[name].copy_(tensors[name])

    def read(
        self, stream: Tensor, positions: Int[Tensor, "batch time"], embedded: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the residual stream, the input of attention, and its keys and values."""
        if self.hidden_norm is None:
            inputs = self.input_layernorm(stream)
        else:
            normed = self.hidden_norm(stream)
            inputs = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
            stream = normed if self.norm_before_residual else stream
        return stream, inputs, self.self_attn.keys_values(inputs, positions)

    def forward(self, stream: Tensor, inputs: Tensor, *attended: Any) -> Tensor:
        """Return the stream after this layer; `attended` are further arguments of `Attention`."""
        stream = stream + self.self_attn(inputs, *attended)
        return stream + self.mlp(self.post_attention_layernorm(stream))


SPARE_SLOTS = 256
"""HeadCache of a windowed cache next to the window: it is cut each time that they are in use."""


@dataclass(slots=True)
class HeadCache:
    """KV cache of a head: committed positions of each row; later slots are never visible.

    With a window only the last positions are kept, so that memory does not grow with the text.
    """

    kv_cache: Tensor
    """(batch, key head, 2, slot, head_dim): the slices of one layer are read without a copy."""
    lengths: Int[Tensor, " batch"]
    """Committed positions of each row."""
    extent: int
    """Upper bound of the slots in use, known without synchronising."""
    dropped: Int[Tensor, " batch"]
    """Oldest positions of each row that are no longer here."""
    places: Int[Tensor, "batch slot"] | None = None
    """Slot of each position in the only row of `kv_cache`; None: each row has its own slots."""
    capacity: int = 0
    """Most positions of a row."""
    window: int | None = None
    """Number of positions to keep. None is all."""

    @classmethod
    def empty(
        cls, layers: Sequence[LlamaLayer], batch: int, capacity: int, window: int | None = None
    ) -> "HeadCache":
        """Return rows without positions, in the dtype and on the device of these layers.

        Layers have one shape and one window, and are concatenated along the axis of key heads.
        """
        attention = layers[0].self_attn
        weight, heads = attention.k_proj.weight, len(layers) * attention.num_key_value_heads
        lengths = torch.zeros(batch, dtype=torch.long).to(weight.device)
        if window is not None and window + SPARE_SLOTS >= capacity:
            window = None
        size = capacity if window is None else window + SPARE_SLOTS
        cache = weight.new_zeros(batch, heads, 2, size, attention.head_dim)
        return cls(cache, lengths, 0, lengths, capacity=capacity, window=window)

    def advance(self, time: int, count: Int[Tensor, " batch"]) -> Int[Tensor, "row time"]:
        """Return the next `time` positions of each row, and keep the first `count` of them."""
        positions = self.lengths[:, None] + torch.arange(time, device=self.lengths.device)
        if self.places is None:
            if self.window is not None and self.extent + time > self.kv_cache.shape[3]:
                self._cut(self.window, time)
            self.extent = min(self.extent + time, self.kv_cache.shape[3])
        self.lengths = self.lengths + count
        return positions

    def _cut(self, window: int, time: int) -> None:
        """Drop the positions before the window; make room for `time` more."""
        kept = min(self.extent, window)
        excess = (self.lengths - self.dropped - kept).clamp(min=0)
        slots = excess[:, None] + torch.arange(kept, device=excess.device)
        held = self.kv_cache.take_along_dim(slots[:, None, None, :, None], dim=3)
        # a long prompt is read at once; the next cut returns its memory
        self.kv_cache = _resized(held, max(window + SPARE_SLOTS, kept + time))
        self.dropped, self.extent = self.dropped + excess, kept

    def write(self, fresh: Tensor, positions: Int[Tensor, "row time"], layer: int = 0) -> None:
        """Write keys and values at these positions, for one layer or for all layers at once."""
        rows = torch.arange(len(fresh), device=positions.device)[:, None]
        if self.places is not None:
            rows, slots = 0 * rows, self.places.gather(1, positions)
        else:
            # padding of a row near its capacity may exceed it
            slots = (positions - self.dropped[:, None]).clamp(max=self.kv_cache.shape[3] - 1)
        heads = fresh.shape[1]
        layer_cache = self.kv_cache[:, layer * heads : (layer + 1) * heads]
        layer_cache[rows, :, :, slots] = fresh.permute(0, 3, 1, 2, 4)

    def past(
        self, seen: Int[Tensor, "row time"] | None = None, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the slots in use, and a mask of the visible ones: (batch, time, slot).

        These are the last `window` ones up to `seen`; None is all, up to a row's newest position.
        """
        newest = self.lengths[:, None] - 1
        seen = newest if seen is None else seen
        slots = torch.arange(self.extent, device=seen.device) + self.dropped[:, None, None]
        visible = slots <= seen.minimum(newest)[..., None]
        if window is not None:
            visible &= slots > seen[..., None] - window
        if self.places is not None:
            return self.kv_cache[0][:, :, self.places].permute(2, 0, 1, 3, 4), visible
        return self.kv_cache[:, :, :, : self.extent], visible

    def scatter(self, places: Tensor, lengths: Tensor) -> "HeadCache":
        """Return rows with slots anywhere in the only row of this: see `Memory.scatter`."""
        # the engine decides what it keeps
        self.kv_cache = _resized(self.kv_cache, self.capacity)
        return HeadCache(self.kv_cache, lengths, places.shape[1], torch.zeros_like(lengths), places)

    def keep(self, rows: Int[Tensor, " kept"]) -> "HeadCache":
        """Return these rows; this synchronises to read the number of slots in use."""
        cache, lengths, dropped = self.kv_cache[rows], self.lengths[rows], self.dropped[rows]
        extent = int((lengths - dropped).max())
        return replace(self, kv_cache=cache, lengths=lengths, extent=extent, dropped=dropped)

    def join(self, other: "HeadCache") -> "HeadCache":
        """Return the rows of both; they must have the same capacity."""
        size = max(self.kv_cache.shape[3], other.kv_cache.shape[3])
        return replace(
            self,
            kv_cache=torch.cat([_resized(one.kv_cache, size) for one in (self, other)]),
            lengths=torch.cat([self.lengths, other.lengths]),
            dropped=torch.cat([self.dropped, other.dropped]),
            extent=max(self.extent, other.extent),
        )


def _resized(cache: Tensor, slots: int) -> Tensor:
    """Return a cache with this number of slots, which is not smaller than before."""
    more = slots - cache.shape[3]
    return F.pad(cache, (0, 0, 0, more)) if more else cache

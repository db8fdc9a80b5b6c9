"""Attention of heads over committed positions and over the path of each query.

Each query sees the slots that its mask allows, which are common to all queries, and its own path.
In training the slots are a text and a path is the draft from one position. In drafting the slots
are the committed positions and a path is a branch of the tree. Both use the same formula.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from specheads.core.errors import InputError
from specheads.core.features import PackedDocuments
from specheads.core.kernels import flash_supports, product_dtype
from specheads.core.ranges import NonNegativeInt, WidthOrZero
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


@dataclass(frozen=True, slots=True)
class AttentionContext:
    """What the queries of one layer attend to, under one softmax: a text, and each query's path."""

    text: Float[Tensor, "batch shared 2 slot width"]
    """Keys and values of the text, from `Attention.project_keys_values`."""
    visible: Bool[Tensor, "row query slot"] | None
    """Slots of the text that each query sees; row and query may be one. None with `documents`."""
    path: Float[Tensor, "batch shared 2 node level width"] | None = None
    """Keys and values of the drafted tokens on the path of each query, the query included."""
    documents: PackedDocuments | None = None
    """Documents of packed rows, in which each position sees its own up to itself. Slots are then
    positions, and there is a path."""
    window: int | None = None
    """With `documents`, the number of positions that each position sees; None is all."""


class Attention(nn.Module):
    """Rotary attention with grouped keys and values, and parameter names of Llama.

    `config` has the settings of `AttentionConfig`, `rope_theta` and, for some kinds,
    `rope_scaling`, `rotary_share` (as in GLM-4.5), `attention_bias` (as in Qwen2), `qk_norm` (as in
    Qwen3), `output_gate` (as in Qwen3-Next) and `attention_sink` (as in gpt-oss). An `input_width`
    of zero is the width of the output. With `queries_only`, keys and values are those of another
    module of the same sizes.
    """

    def __init__(
        self, config: Any, width: int, input_width: int = 0, *, queries_only: bool = False
    ) -> None:
        super().__init__()
        num_heads = config.attention_heads or max(1, width // 64)
        num_shared = self.num_key_value_heads = config.key_value_heads or num_heads
        size = self.head_dim = getattr(config, "head_dim", 0) or width // num_heads
        if num_heads % num_shared or size % 2:
            raise InputError(
                "attention needs key_value_heads that divide attention_heads and an even head_dim, "
                f"got {num_shared}, {num_heads} and {size}; set them under head="
            )
        self.rope = rope(config.rope_theta, getattr(config, "rope_scaling", {}))
        self.rotary_share = getattr(config, "rotary_share", 1.0)
        self.has_gate = bool(getattr(config, "output_gate", False))
        bias = getattr(config, "attention_bias", False)
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(input_width or width, heads * size, bias=bias)
            for heads in (num_heads * (1 + self.has_gate), num_shared, num_shared)
        )
        if queries_only:
            del self.k_proj, self.v_proj
        self.o_proj = nn.Linear(num_heads * size, width, bias=False)
        has_norms = getattr(config, "qk_norm", False)
        self.q_norm, self.k_norm = (
            RMSNorm(size, config.epsilon) if has_norms else nn.Identity() for _ in range(2)
        )
        sink = bool(getattr(config, "attention_sink", False))
        self.attention_sink_bias = nn.Parameter(torch.zeros(num_heads)) if sink else None

    def project_keys_values(
        self, inputs: Tensor, positions: Int[Tensor, "batch time"]
    ) -> Float[Tensor, "row shared 2 time width"]:
        """Return keys and values."""
        keys = self.k_norm(self._split_heads(self.k_proj(inputs)))
        keys = rotate(self.rope, keys, positions, self.rotary_share)
        return torch.stack([keys, self._split_heads(self.v_proj(inputs))], dim=2)

    def forward(
        self, inputs: Tensor, positions: Int[Tensor, "batch time"], context: AttentionContext
    ) -> Tensor:
        """Compute attention of inputs (batch, time, input_width) over the context.

        Only differences of `positions` matter.
        """
        projected, gate = self.q_proj(inputs), None
        if self.has_gate:
            projected, gate = projected.unflatten(-1, (-1, 2, self.head_dim)).unbind(-2)
            projected = projected.flatten(2)
        queries = self.q_norm(self._split_heads(projected))
        queries = rotate(self.rope, queries, positions, self.rotary_share)
        if self.attention_sink_bias is not None:
            queries = _add_sink_logit(queries, self.attention_sink_bias)
            context = _add_sink_slot(context)
        width = queries.shape[-1]
        if context.path is None:
            mixed = _attend(queries, context)
        elif context.documents is None:
            mixed = _attend_with_paths(queries, context)
        elif queries.device.type == "cpu" or not flash_supports(product_dtype(queries), width):
            mixed = _attend_by_document(queries, context, context.documents.lengths)
        else:
            documents, window = context.documents, context.window
            mixed = path_attention(queries, context.text, context.path, documents, window)
        mixed = mixed[..., : self.head_dim].transpose(1, 2)
        return self.o_proj((mixed if gate is None else mixed * gate.sigmoid()).flatten(2))

    def _split_heads(self, values: Tensor) -> Tensor:
        return values.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


SINK_CHANNELS = 8
"""Channels that a sink adds to queries, keys and values: fused kernels take multiples of 8."""


def _add_sink_logit(queries: Tensor, sink: Tensor) -> Tensor:
    """Add channels to queries, whose product with the key of a sink's slot is the sink's logit."""
    size = queries.shape[-1]
    padded_size = size + SINK_CHANNELS
    # scores are divided by the root of the width
    logits = (sink * math.sqrt(padded_size))[:, None, None].expand(*queries.shape[:-1], 1)
    logits = F.pad(logits, (0, SINK_CHANNELS - 1)).to(queries.dtype)
    return torch.cat([queries * math.sqrt(padded_size / size), logits], dim=-1)


def _add_sink_slot(context: AttentionContext) -> AttentionContext:
    """Add channels, and a last slot for the sink to the paths, or to a text without paths."""
    if context.path is not None:
        return replace(context, text=_pad(context.text), path=_pad(context.path, slots=1))
    visible = None if context.visible is None else F.pad(context.visible, (0, 1), value=True)
    return replace(context, text=_pad(context.text, slots=1), visible=visible)


def _pad(keys_values: Tensor, slots: int = 0) -> Tensor:
    """Add the channels of a sink, and its slot, whose value is zero."""
    size = keys_values.shape[-1]
    padded = F.pad(keys_values, (0, SINK_CHANNELS, 0, slots))
    if slots:
        padded.select(2, 0)[..., -1, size] = 1
    return padded


def _attend(queries: Tensor, context: AttentionContext) -> Tensor:
    """Return torch's attention over the visible slots."""
    text, visible = context.text, context.visible
    assert visible is not None
    is_grouped = queries.shape[1] != text.shape[1]
    if is_grouped and text.device.type != "cpu":
        # no fused kernel on CUDA supports a mask with fewer key heads, and the plain one is large
        text = text.repeat_interleave(queries.shape[1] // text.shape[1], dim=1)
        is_grouped = False
    keys, values = text.unbind(2)
    mask = visible[:, None]
    return F.scaled_dot_product_attention(queries, keys, values, mask, enable_gqa=is_grouped)


def _attend_by_document(
    queries: Tensor, context: AttentionContext, lengths: Sequence[int]
) -> Tensor:
    """Attend within each document separately, without the scores between documents."""
    assert context.path is not None
    # one split along one axis needs only one concatenation in the backward pass
    columns = (
        values.movedim(axis, 1).flatten(0, 1).split(lengths)
        for values, axis in ((queries, 2), (context.text, 3), (context.path, 3))
    )
    outputs = []
    for query, text, path in zip(*columns, strict=True):
        text, path = text[None].movedim(1, 3), path[None].movedim(1, 3)
        document = AttentionContext(text, None, path, window=context.window)
        output = _attend_with_paths(query[None].movedim(1, 2), document)
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs).unflatten(0, (len(queries), -1)).transpose(1, 2)


def _attend_with_paths(queries: Tensor, context: AttentionContext) -> Tensor:
    """Attend to the text and to each query's path; the backward pass recomputes the weights."""
    if not torch.is_grad_enabled():
        return _mix(queries, context)
    mixed = checkpoint(_mix, queries, context, use_reentrant=False)
    assert isinstance(mixed, Tensor)
    return mixed


def _mix(queries: Tensor, context: AttentionContext) -> Tensor:
    """Compute `_attend_with_paths`. Without a mask the text is one document, which is causal."""
    assert context.path is not None
    (keys, values), visible = context.text.unbind(2), context.visible
    path_keys, path_values = context.path.unbind(2)
    if visible is None:
        pairs = queries.new_ones(1, *queries.shape[2:3] * 2, dtype=torch.bool)
        visible = limit_to_window(pairs.tril(), context.window)
    grouped = queries.unflatten(1, (keys.shape[1], -1)) / math.sqrt(queries.shape[-1])
    scores = torch.einsum("bhgtd,bhsd->bhgts", grouped, keys)
    scores = scores.masked_fill(~visible[:, None, None], -math.inf)
    path_scores = torch.einsum("bhgtd,bhtld->bhgtl", grouped, path_keys)
    weights = torch.cat([scores, path_scores], dim=-1).softmax(-1).to(values.dtype)
    weights, path_weights = weights.split([keys.shape[2], path_keys.shape[3]], dim=-1)
    mixed = torch.einsum("bhgts,bhsd->bhgtd", weights, values)
    return (mixed + torch.einsum("bhgtl,bhtld->bhgtd", path_weights, path_values)).flatten(1, 2)


def check_full_layers(config: Any) -> None:
    """Refuse `full_layers` that are not layers next to ones with a window."""
    full_layers = config.full_layers
    others = {*range(config.num_layers)} - {*full_layers}
    is_part = 0 < len(others) == config.num_layers - len(full_layers)
    if full_layers and not (config.sliding_window and is_part):
        raise InputError(
            f"head.full_layers needs head.sliding_window and some of {config.num_layers} layers "
            f"from 0 on, got {full_layers}; correct it, or leave it out"
        )


def layer_windows(config: Any, num_layers: int) -> list[int | None]:
    """Return the window of each layer; None is the whole text."""
    full_layers = getattr(config, "full_layers", ())
    window = getattr(config, "sliding_window", None)
    return [None if index in full_layers else window for index in range(num_layers)]


def limit_to_window(
    visible: Bool[Tensor, "row time time"], window: int | None
) -> Bool[Tensor, "row time time"]:
    """Return a mask without the pairs of positions that are `window` or more apart."""
    if window is None:
        return visible
    return visible & torch.ones_like(visible[0]).triu(1 - window)


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
    def copy_layer(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors of a base's layer; the inputs of a token, which it lacks, get zeros."""
        parameters: dict[str, Tensor] = dict(self.named_parameters())
        # the base has none
        parameters.pop("self_attn.attention_sink_bias", None)
        if self.hidden_norm is not None:
            parameters["input_layernorm.weight"] = parameters.pop("hidden_norm.weight")
            for name in (f"self_attn.{letter}_proj.weight" for letter in "qkv"):
                parameters[name] = parameters[name].zero_().chunk(2, dim=1)[1]
        for name in sorted(parameters.keys() | tensors.keys()):
            shape, base_shape = (
                tuple(layer[name].shape) if name in layer else None
                for layer in (parameters, tensors)
            )
            if shape != base_shape:
                raise InputError(
                    f"head.init_from_base=true needs equal layers, got {name} of {base_shape} in "
                    f"the base and {shape} in the head; set the sizes under head= to 0, or leave "
                    "it out"
                )
            parameters[name].copy_(tensors[name])

    def prepare(
        self, stream: Tensor, positions: Int[Tensor, "batch time"], embedded: Tensor | None = None
    ) -> "LayerInputs":
        """Return the inputs of this layer, with the keys and values of their positions."""
        if self.hidden_norm is None:
            inputs = self.input_layernorm(stream)
        else:
            normed = self.hidden_norm(stream)
            inputs = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
            stream = normed if self.norm_before_residual else stream
        keys_values = self.self_attn.project_keys_values(inputs, positions)
        return LayerInputs(stream, inputs, positions, keys_values)

    def forward(self, inputs: "LayerInputs", context: AttentionContext) -> Tensor:
        """Return the residual stream after this layer."""
        stream = inputs.stream + self.self_attn(inputs.attention, inputs.positions, context)
        return stream + self.mlp(self.post_attention_layernorm(stream))


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """What a `LlamaLayer` reads at some positions."""

    stream: Float[Tensor, "batch time width"]
    """Residual stream."""
    attention: Float[Tensor, "batch time input"]
    """Input of attention."""
    positions: Int[Tensor, "row time"]
    keys_values: Float[Tensor, "batch shared 2 slot head"]
    """Keys and values of these positions, or of more of them."""

    def select(
        self, select: Callable[[Tensor], Tensor], positions: Int[Tensor, "batch time"]
    ) -> "LayerInputs":
        """Return the inputs at some positions, with the keys and values of all."""
        stream, attention = select(self.stream), select(self.attention)
        return LayerInputs(stream, attention, positions, self.keys_values)


STEP = 256
"""A recorded draft reads a multiple of this many slots, which limits the number of recordings."""
SPARE_SLOTS = 256
"""HeadCache of a windowed cache next to the window: it is cut each time that they are in use."""


@dataclass(slots=True)
class HeadCache:
    """KV cache of a head: committed positions of each row; later slots are never visible.

    With a window only the last positions are stored, so that memory does not grow with the text.
    """

    kv_cache: Tensor
    """(batch, key head, 2, slot, head_dim): the slices of one layer are read without a copy."""
    lengths: Int[Tensor, " batch"]
    """Committed positions of each row."""
    extent: int
    """Upper bound of the slots in use, known without synchronising."""
    dropped: Int[Tensor, " batch"]
    """Oldest positions of each row that are no longer stored."""
    paged_slots: Int[Tensor, "batch slot"] | None = None
    """Slot of each position in the only row of `kv_cache`; None: each row has its own slots."""
    capacity: int = 0
    """Most positions of a row."""
    window: int | None = None
    """Number of positions to store. None is all."""
    num_layers: int = 1
    """Number of layers, whose key heads are concatenated in `kv_cache`."""
    gathered: dict[int, Tensor] = field(default_factory=dict)
    """With `paged_slots`, the text of layers that were read: all levels of a draft read it."""
    num_read: int | None = None
    """Number of slots that queries read, after `fix_shapes`; None is `extent`."""

    @classmethod
    def empty(
        cls,
        layers: Sequence[LlamaLayer],
        batch: int,
        capacity: int,
        windows: Sequence[int | None] = (None,),
    ) -> "HeadCache":
        """Return rows without positions, in the dtype and on the device of these layers.

        Layers have one shape, and `windows` differ in None only.
        """
        attention = layers[0].self_attn
        weight, heads = attention.k_proj.weight, len(layers) * attention.num_key_value_heads
        lengths = torch.zeros(batch, dtype=torch.long).to(weight.device)
        window = None if None in windows else windows[0]
        if window is not None and window + SPARE_SLOTS >= capacity:
            window = None
        size = capacity if window is None else window + SPARE_SLOTS
        cache = weight.new_zeros(batch, heads, 2, size, attention.head_dim)
        return cls(cache, lengths, 0, lengths, None, capacity, window, len(layers))

    def advance(self, time: int, count: Int[Tensor, " batch"]) -> Int[Tensor, "row time"]:
        """Return the next `time` positions of each row, and commit the first `count` of them."""
        positions = self.lengths[:, None] + torch.arange(time, device=self.lengths.device)
        if self.paged_slots is None and self.num_read is None:
            self._make_room(time)
        self.lengths = self.lengths + count
        return positions

    def _make_room(self, time: int) -> None:
        if self.window is not None and self.extent + time > self.kv_cache.shape[3]:
            self._drop_positions(self.window, time)
        self.extent = min(self.extent + time, self.kv_cache.shape[3])

    def fix_shapes(self, time: int, longest: int) -> int:
        """Make room for `time` positions of rows of at most `longest`, as `advance` does.

        Returns a `num_read` that many steps share: shapes do not change then.
        """
        size = self.kv_cache.shape[3]
        if self.window is None:
            self.extent = min(self.extent, longest)
        elif size > self.window + SPARE_SLOTS:
            # after a long prompt
            self._drop_positions(self.window, time)
        self._make_room(time)
        size = self.kv_cache.shape[3]
        return size if self.window is not None else min(-(-self.extent // STEP) * STEP, size)

    def can_hold(self, other: "HeadCache", rows: int) -> bool:
        """Return whether these buffers have room for the positions of another cache."""
        sizes = zip(other.kv_cache.shape[1:], self.kv_cache.shape[1:], strict=True)
        is_large = rows <= len(self.kv_cache) and all(size <= room for size, room in sizes)
        return is_large and self.window == other.window

    def _drop_positions(self, window: int, time: int) -> None:
        """Drop the positions before the window; make room for `time` more."""
        extent = min(self.extent, window)
        excess = (self.lengths - self.dropped - extent).clamp(min=0)
        slots = excess[:, None] + torch.arange(extent, device=excess.device)
        cache = self.kv_cache.take_along_dim(slots[:, None, None, :, None], dim=3)
        # a long prompt is read at once; the next cut returns its memory
        self.kv_cache = _resize(cache, max(window + SPARE_SLOTS, extent + time))
        self.dropped, self.extent = self.dropped + excess, extent

    def write(
        self, keys_values: Tensor, positions: Int[Tensor, "row time"], layer: int = 0
    ) -> None:
        """Write keys and values at these positions, for one layer or for all layers at once."""
        rows = torch.arange(len(keys_values), device=positions.device)[:, None]
        if self.paged_slots is not None:
            rows, slots = 0 * rows, self.paged_slots.gather(1, positions)
        else:
            # padding of a row near its capacity may exceed it
            slots = (positions - self.dropped[:, None]).clamp(max=self.kv_cache.shape[3] - 1)
        heads = keys_values.shape[1]
        for index in range(layer, layer + heads * self.num_layers // self.kv_cache.shape[1]):
            self.gathered.pop(index, None)
        layer_cache = self.kv_cache[:, layer * heads : (layer + 1) * heads]
        layer_cache[rows, :, :, slots] = keys_values.permute(0, 3, 1, 2, 4)

    def text(self, layer: int = 0) -> Float[Tensor, "batch shared 2 slot width"]:
        """Return the keys and values of a layer in the slots in use."""
        cache = self.kv_cache.chunk(self.num_layers, dim=1)[layer]
        if self.paged_slots is not None:
            if layer not in self.gathered:
                # half the time of an index with a tensor
                rows = cache[0].flatten(0, 1).index_select(1, self.paged_slots.flatten())
                rows = rows.view(*cache.shape[1:3], *self.paged_slots.shape, -1)
                self.gathered[layer] = rows.permute(2, 0, 1, 3, 4)
            return self.gathered[layer]
        return cache[:, :, :, : self.num_read or self.extent]

    def visible(
        self, ends: Int[Tensor, "row time"] | None = None, window: int | None = None
    ) -> Bool[Tensor, "batch time slot"]:
        """Return the slots of `text` that queries see: the last `window` ones up to `ends`.

        None is all, up to a row's newest position.
        """
        newest = self.lengths[:, None] - 1
        ends = newest if ends is None else ends
        num_slots = self.num_read or self.extent
        slots = torch.arange(num_slots, device=ends.device) + self.dropped[:, None, None]
        visible = slots <= ends.minimum(newest)[..., None]
        if window is not None:
            visible &= slots > ends[..., None] - window
        return visible

    def scatter(self, slots: Tensor, lengths: Tensor) -> "HeadCache":
        """Return rows with slots anywhere in the only row of this: see `Memory.scatter`."""
        # the engine decides what it keeps
        self.kv_cache = _resize(self.kv_cache, self.capacity)
        dropped = torch.zeros_like(lengths)
        return HeadCache(
            self.kv_cache, lengths, slots.shape[1], dropped, slots, num_layers=self.num_layers
        )

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
            kv_cache=torch.cat([_resize(cache.kv_cache, size) for cache in (self, other)]),
            lengths=torch.cat([self.lengths, other.lengths]),
            dropped=torch.cat([self.dropped, other.dropped]),
            extent=max(self.extent, other.extent),
        )


def _resize(cache: Tensor, num_slots: int) -> Tensor:
    """Return a cache with this number of slots, which is not smaller than before."""
    num_new = num_slots - cache.shape[3]
    return F.pad(cache, (0, 0, 0, num_new)) if num_new else cache

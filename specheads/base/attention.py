"""Attention of tree nodes over a cache, and within each document of a packed batch.

transformers calls one registered function in each layer. What it computes is an argument of the
forward, which the layers pass on. See docs/tree_verification.md.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedConfig
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from specheads.core.features import PackedDocuments
from specheads.core.kernels import (
    AttentionInputs,
    changes_scores,
    flash_supports,
    opaque,
    refuse_changed_scores,
)

MAX_FOLDED_NODES = 64
"""Largest tree for which folding query heads into nodes is faster than repeating the keys."""
MASK_STRIDE = 16
"""Row stride of a mask, in elements: the CUDA kernel copies a mask with any other stride."""
FIRST_INDEX = 2
"""torch.compile makes graphs of their own for the indices 0 and 1, so the smallest one is 2."""
NAME, ARGUMENT = "specheads", "specheads_attention"
"""Names of the registered function and of its argument."""
Attention = Callable[[AttentionInputs], Tensor]
"""Computes (batch, position, heads, width) in each layer."""
_HAS_ENABLE_GQA = "enable_gqa" in signature(varlen_attn).parameters


@contextmanager
def attending(config: PreTrainedConfig, attention: Attention) -> Iterator[dict[str, Any]]:
    """Let a model compute attention so in this context; yield the argument for its forward.

    A model whose attention cannot be replaced gets no argument, and uses its mask.
    """
    before = config._attn_implementation
    if before != "sdpa":
        yield {}
        return
    config._attn_implementation = NAME
    try:
        yield {ARGUMENT: attention}
    finally:
        config._attn_implementation = before


def _compute_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    *,
    specheads_attention: Attention | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    # StableLM and Nemotron do not pass the argument on; their mask is enough
    compute = specheads_attention or GroupedAttention()
    inputs = AttentionInputs(module, query, key, value, attention_mask, scaling, settings)
    return compute(inputs), None


def _compute_as_transformers(inputs: AttentionInputs) -> Tensor:
    module, query, key, value, mask, scaling, settings = inputs
    return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **settings)[0]


AttentionInterface.register(NAME, _compute_attention)


class GroupedAttention:
    """Attention from each row's nodes to its slots, in all layers of one forward.

    Query heads that share keys are folded into the node axis. transformers repeats keys and values
    for each query head instead, which copies the whole cache at every step.
    """

    def __init__(self) -> None:
        self._masks: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        """Masks and repeated masks: most layers share theirs."""

    def __call__(self, inputs: AttentionInputs) -> Tensor:
        """Compute attention (batch, node, heads, width)."""
        query = inputs.query
        is_large = query.shape[2] > MAX_FOLDED_NODES and query.device.type == "cpu"
        if changes_scores(inputs) or is_large:
            return _compute_as_transformers(inputs)
        mask = self._repeat_mask(inputs.mask, query.shape[1] // inputs.key.shape[1])
        return attend_folded(query, inputs.key, inputs.value, mask, inputs.scaling)

    def _repeat_mask(self, mask: Tensor, group: int) -> Tensor:
        if torch.compiler.is_compiling():
            return repeat_mask(mask, group)
        if (id(mask), group) not in self._masks:
            self._masks[id(mask), group] = mask, repeat_mask(mask, group)
        return self._masks[id(mask), group][1]


class CountedAttention(GroupedAttention):
    """Attention that counts the layers that call it; `plain` leaves out changed scores."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.plain, self.num_calls = plain, 0

    def __call__(self, inputs: AttentionInputs) -> Tensor:
        """Count the call, and compute attention."""
        self.num_calls += not (self.plain and changes_scores(inputs))
        return super().__call__(inputs)


def repeat_mask(mask: Tensor, group: int) -> Tensor:
    """Return the mask of nodes (batch, 1, node, slot) for `group` query heads that share keys."""
    if mask.device.type == "cpu":
        # repeat() takes ten times as long on such a small tensor
        return torch.cat([mask] * group, dim=2)
    slots = mask.shape[-1]
    return F.pad(mask, (0, -slots % MASK_STRIDE)).repeat(1, 1, group, 1)[..., :slots]


def attend_folded(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None
) -> Tensor:
    """Return attention (batch, node, heads, width), with query heads folded into nodes.

    `mask` is already repeated for each head of a group: `repeat_mask`.
    """
    batch, heads, nodes, width = query.shape
    query = query.reshape(batch, key.shape[1], -1, width)
    # the compiler would make graphs of the kernel's own cases
    attend = _opaque_masked if torch.compiler.is_compiling() else _attend_masked
    out = attend(query, key, value, mask, scaling)
    return out.reshape(batch, heads, nodes, -1).transpose(1, 2).contiguous()


def _attend_masked(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None
) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)


def _masked_shape(query: Tensor, _key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return query.new_empty(*query.shape[:-1], value.shape[-1])


_opaque_masked = opaque("grouped_attention", _attend_masked, _masked_shape)


# --- compiled layers: the compiler must not see the cache -----------------------------------------


class UnwrittenCache(Cache):
    """A cache for compiled layers: it passes new keys and values on to `LayerAttention`.

    A compiled layer that knew its cache would be compiled again for each layer and each length.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the new keys and values."""
        return key_states, value_states


@dataclass
class LayerAttention:
    """Attention of one compiled layer, which first writes its new keys and values.

    Tensors and numbers, and no cache, so that all layers share a graph.
    """

    keys: Tensor
    """Memory of several layers (layer, batch, heads, slot, width)."""
    values: Tensor
    keys_index: int
    """Index of this layer's keys in their memory, plus `FIRST_INDEX`."""
    values_index: int
    rows: Tensor
    """Row and slot of each new position."""
    slots: Tensor
    lengths: Tensor
    """Number of committed slots of each row."""

    def __call__(self, inputs: AttentionInputs) -> Tensor:
        """Compute attention (batch, node, heads, width); the mask may be repeated already.

        A mask of the nodes alone (batch, 1, node, node) stands for one over all slots.
        """
        refuse_changed_scores(inputs, "compile=true on CUDA")
        _, query, key, value, mask, scaling, _ = inputs
        memory = self.keys, self.values, self.keys_index, self.values_index
        places = self.rows, self.slots, self.lengths
        return _opaque_layer(query, key, value, mask, scaling, *memory, *places)


def _attend_layer(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float | None,
    keys: Tensor,
    values: Tensor,
    keys_index: int,
    values_index: int,
    rows: Tensor,
    slots: Tensor,
    lengths: Tensor,
) -> Tensor:
    keys, values = keys[keys_index - FIRST_INDEX], values[values_index - FIRST_INDEX]
    keys[rows, :, slots] = key.transpose(1, 2)
    values[rows, :, slots] = value.transpose(1, 2)
    group = query.shape[1] // key.shape[1]
    if mask.shape[2] != group * query.shape[2]:
        mask = repeat_mask(mask[:, :, : query.shape[2]], group)
    if mask.shape[-1] == key.shape[2]:
        text = attend_text(query, keys[: len(query)], values[: len(query)], lengths, scaling)
        return merge_parts(text, attend_nodes(query, key, value, mask, scaling))
    batch, end = len(query), mask.shape[-1]
    return attend_folded(query, keys[:batch, :, :end], values[:batch, :, :end], mask, scaling)


def _layer_shape(query: Tensor, _key: Tensor, value: Tensor, *_: Any) -> Tensor:
    batch, heads, nodes = query.shape[:3]
    return query.new_empty(batch, nodes, heads, value.shape[-1])


_opaque_layer = opaque("layer_attention", _attend_layer, _layer_shape)


# --- trees in two parts: the text needs no mask --------------------------------------------------

Part = tuple[Tensor, Tensor]
"""Attention to some of the keys (batch, heads, node, width), and the logarithm of each sum of
exponentials (batch, heads, node)."""


def attend_text(
    query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, scaling: float | None
) -> Part:
    """Attend to the first `lengths` slots of each row, at least one."""
    batch, heads, nodes, slots = *query.shape[:3], keys.shape[2]
    if query.device.type == "cpu":
        is_text = torch.arange(slots, device=lengths.device) < lengths[:, None]
        mask = torch.zeros_like(is_text, dtype=query.dtype).masked_fill_(~is_text, -torch.inf)
        group = heads // keys.shape[1]
        return attend_nodes(
            query, keys, values, mask[:, None, None].expand(-1, 1, group * nodes, -1), scaling
        )
    # rows are one sequence of slots, each with a bound of its own: no mask, and no copy of keys
    bounds = torch.arange(batch + 1, dtype=torch.int32, device=query.device)
    queries, keys, values = (
        states.transpose(1, 2).flatten(0, 1) for states in (query, keys, values)
    )
    out, log_sum, *_ = torch.ops.aten._flash_attention_forward(
        *(queries, keys, values, bounds * nodes, bounds * slots, nodes, slots, 0.0, False, False),
        scale=scaling,
        seqused_k=lengths.int(),
    )
    out = out.unflatten(0, (batch, nodes)).transpose(1, 2)
    return out, log_sum.unflatten(1, (batch, nodes)).transpose(0, 1)


def attend_nodes(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None
) -> Part:
    """Attend under a mask that is repeated for the query heads that share keys."""
    batch, heads, nodes = query.shape[:3]
    folded = query.reshape(batch, key.shape[1], -1, query.shape[-1])
    if query.device.type == "cpu":
        out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            folded, key, value, attn_mask=mask, scale=scaling
        )
    else:
        out, log_sum, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            folded, key, value, mask.expand(-1, key.shape[1], -1, -1), True, scale=scaling
        )
    # the kernel pads the sums
    log_sum = log_sum[..., : folded.shape[2]].reshape(batch, heads, nodes)
    return out.reshape(batch, heads, nodes, -1), log_sum


def merge_parts(first: Part, second: Part) -> Tensor:
    """Return attention (batch, node, heads, width) to the keys of both parts.

    Source: Dao et al. 2022, arXiv:2205.14135, section 3.1, for the merge of softmax by parts.
    """
    share = (first[1] - second[1]).sigmoid()[..., None]
    mixed = share * first[0] + (1 - share) * second[0]
    return mixed.to(first[0].dtype).transpose(1, 2).contiguous()


# --- documents: masked scores are not computed ----------------------------------------------------


def document_attention(
    documents: PackedDocuments, windows: Sequence[int | None]
) -> Attention | None:
    """Return attention within documents; None if a window is shorter than a document."""
    longest = max(documents.lengths)
    if any(window is not None and window < longest for window in windows):
        return None
    return partial(_attend_documents, documents)


def _attend_documents(documents: PackedDocuments, inputs: AttentionInputs) -> Tensor:
    """Compute attention within each document of a packed batch: (batch, time, heads, width)."""
    _, query, key, value, _, scaling, settings = inputs
    on_cuda, is_grouped = query.device.type == "cuda", query.shape[1] != key.shape[1]
    is_uniform = query.dtype == key.dtype == value.dtype and query.shape[-1] == value.shape[-1]
    fits = not on_cuda or (is_uniform and flash_supports(query.dtype, query.shape[-1]))
    if changes_scores(inputs) or settings.get("dropout") or not fits:
        return _compute_as_transformers(inputs)
    lengths, bounds = documents
    # one split along one axis needs only one concatenation in the backward pass
    flat = [states.transpose(1, 2).flatten(0, 1) for states in (query, key, value)]
    if on_cuda:
        mixed = _attend_flash(flat[0], flat[1], flat[2], bounds, max(lengths), scaling)
        return mixed.unflatten(0, (len(query), -1))
    mixed_documents = []
    for states in zip(*(values.split(lengths) for values in flat), strict=True):
        document_states = [piece.transpose(0, 1)[None] for piece in states]
        mixed = F.scaled_dot_product_attention(
            *document_states, is_causal=True, scale=scaling, enable_gqa=is_grouped
        )
        mixed_documents.append(mixed[0].transpose(0, 1))
    return torch.cat(mixed_documents).unflatten(0, (len(query), -1))


def _attend_flash(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scaling: float | None
) -> Tensor:
    """Compute attention within all documents in one kernel: (position, heads, width)."""
    # torch 2.11 has no enable_gqa, and shares keys without it
    settings: dict[str, Any] = {"scale": scaling, "window_size": (-1, 0)}
    if query.shape[1] != key.shape[1] and _HAS_ENABLE_GQA:
        settings["enable_gqa"] = True
    mixed = varlen_attn(query, key, value, bounds, bounds, longest, longest, **settings)
    assert isinstance(mixed, Tensor)
    return mixed

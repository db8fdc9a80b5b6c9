"""Attention of tree nodes over a cache: contiguous, paged, or within compiled layers.

See docs/tree_verification.md.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, TypeGuard

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from specheads.base.cache import RowCache
from specheads.base.exact_attention import exact_attention
from specheads.base.masks import is_special, replaced
from specheads.base.paged import PagedKVCache
from specheads.core.errors import InputError
from specheads.core.kernels import opaque, without_cudnn_attention

MOST_NODES = 64
"""Largest tree for which folding query heads into nodes is faster than repeating the keys."""

CALL = 256
"""Cost of one more call of attention, in slots of one row."""

ALIGNED = 16
"""Row stride of a mask, in elements: the CUDA kernel copies a mask with any other stride."""

_LENGTHS: ContextVar[tuple[int, ...]] = ContextVar("committed tokens of each row", default=())
_TALL = WeakTensorKeyDictionary()
"""The repeated mask of each mask, for as long as that mask lives: its layers share it."""


@contextmanager
def ragged(lengths: Sequence[int]) -> Iterator[None]:
    """Set the number of committed tokens of each row for the attention of one forward.

    A context variable, because a compiled graph serves all lengths: it may not take them as
    arguments, and it drops attributes of its input tensors.
    """
    token = _LENGTHS.set(tuple(lengths))
    try:
        yield
    finally:
        _LENGTHS.reset(token)


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Compute attention from each row's nodes to its slots; transformers calls this in each layer.

    Queries are (batch, heads, node, width), keys and values (batch, key heads, slot, width). Query
    heads that share keys are folded into the node axis. transformers repeats keys and values for
    each query head instead, which copies the whole cache at every step. On a CPU, rows are read in
    spans, each up to its longest row: see `spans`.
    """
    nodes = query.shape[2]
    if is_special(settings) or (nodes > MOST_NODES and query.device.type == "cpu"):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **settings
        )
    return folded(query, key, value, attention_mask, scaling), None


def folded(
    query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float | None
) -> Tensor:
    """Return attention (batch, node, heads, width), with query heads folded into nodes."""
    (batch, heads, nodes, width), shared = query.shape, key.shape[1]
    group = heads // shared
    query = query.reshape(batch, shared, group * nodes, width)
    if query.device.type == "cpu":
        # repeat() takes ten times as long on such a small tensor
        mask = torch.cat([attention_mask] * group, dim=2)
    else:
        mask = _tall(attention_mask, group)
    # one compiled graph serves rows of all lengths: the operator looks them up when it runs
    attend = _opaque_grouped if torch.compiler.is_compiling() else _attend_grouped
    out = attend(query, key, value, mask, nodes, scaling)
    return out.reshape(batch, heads, nodes, -1).transpose(1, 2).contiguous()


def _tall(mask: Tensor, group: int) -> Tensor:
    """Return the mask repeated for each query head of a group; computed once per mask."""
    if mask not in _TALL:
        slots = mask.shape[-1]
        _TALL[mask] = F.pad(mask, (0, -slots % ALIGNED)).repeat(1, 1, group, 1)[..., :slots]
    return _TALL[mask]


def _attend_grouped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, nodes: int, scaling: float | None
) -> Tensor:
    if query.device.type != "cpu":
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    out = [
        F.scaled_dot_product_attention(
            query[rows],
            key[rows, :, :end],
            value[rows, :, :end],
            attn_mask=mask[rows, ..., :end],
            scale=scaling,
        )
        for rows, end in _spans(len(query), nodes, key.shape[2])
    ]
    return out[0] if len(out) == 1 else torch.cat(out)


def _grouped_shape(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, nodes: int, scaling: float | None
) -> Tensor:
    del key, mask, nodes, scaling
    return query.new_empty(*query.shape[:-1], value.shape[-1])


_opaque_grouped = opaque("grouped_attention", _attend_grouped, _grouped_shape)


def _spans(batch: int, nodes: int, end: int) -> list[tuple[slice, int]]:
    """Return the rows of each call of attention, and the last slot that it reads."""
    if len(lengths := _LENGTHS.get()) != batch:
        return [(slice(None), end)]
    return [(rows, longest + nodes) for rows, longest in spans(lengths)]


@lru_cache(maxsize=8)
def spans(lengths: tuple[int, ...]) -> list[tuple[slice, int]]:
    """Split rows into spans of neighbours; return each span and the length of its longest row.

    The split reads the fewest slots of all, where each call costs `CALL` slots.
    """
    # for the first n rows: the lowest cost, the first row of the last span, its longest row
    least: list[tuple[int, int, int]] = [(0, 0, 0)]
    for count in range(1, len(lengths) + 1):
        # extending the last span is usually the best
        _, first, longest = least[-1]
        longest = max(longest, lengths[count - 1])
        best = (least[first][0] + CALL + (count - first) * longest, first, longest)
        longest = 0
        for first in reversed(range(count)):
            longest = max(longest, lengths[first])
            taken = least[first][0] + CALL + (count - first) * longest
            best = min(best, (taken, first, longest))
            # a span that begins further left costs at least as much without its call
            if taken - CALL >= best[0]:
                break
        least.append(best)
    out, count = [], len(lengths)
    while count:
        _, first, longest = least[count]
        out.append((slice(first, count), longest))
        count = first
    return out[::-1]


_LAYERS: ContextVar[Iterator[Any]] = ContextVar("layers of the cache, the next to attend first")


class DeferredCache(Cache):
    """A cache for compiled layers: it passes new keys and values on to attention.

    `deferred_attention` writes them and reads the real cache where no compiler looks. A compiled
    layer that knew its cache would be compiled again for each layer and each length.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the new keys and values; `deferred_attention` writes them."""
        return key_states, value_states


@contextmanager
def deferring(cache: RowCache) -> Iterator[None]:
    """Let `deferred_attention` write to and read the layers of this cache, in order.

    A context variable, because any argument would make the compiler specialise on the layer.
    """
    layers = iter(cache.layers)
    token = _LAYERS.set(layers)
    try:
        yield
        if next(layers, None) is not None:
            raise InputError(
                "compile=true on CUDA needs layers that call attention once each, in order; "
                "leave compile=true out"
            )
    finally:
        _LAYERS.reset(token)


def deferred_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Write new keys and values to the next layer's cache, then compute attention."""
    del module
    if is_special(settings):
        raise InputError(
            "compile=true on CUDA supports plain attention only, and this base adds to its scores; "
            "leave compile=true out"
        )
    return _opaque_deferred(query, key, value, attention_mask, scaling), None


def _attend_deferred(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None
) -> Tensor:
    keys, values = next(_LAYERS.get()).update(key, value)
    return folded(query, keys, values, mask, scaling)


def _deferred_shape(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None
) -> Tensor:
    del key, mask, scaling
    batch, heads, nodes, _ = query.shape
    return query.new_empty(batch, nodes, heads, value.shape[-1])


_opaque_deferred = opaque("deferred_attention", _attend_deferred, _deferred_shape)


QUERY_BLOCK = 128
"""Nodes per tile of the mask; the default of flex_attention."""


def tree_block_mask(
    ancestors: Bool[Tensor, "batch node node"],
    depths: Int[Tensor, "batch node"],
    cache: PagedKVCache,
    window: int | None,
) -> BlockMask:
    """Return the mask of `masks.tree_mask` as a block mask over the pool.

    Blocks that are visible to every node are listed as full and need no mask. Only blocks with
    scratch slots or the edge of a window are masked slot by slot. Memory is one number per row and
    block. Arguments are those of `tree_mask`; the cache has reserved room.
    """
    num_nodes, size = ancestors.shape[1], cache.pool.block_size
    lengths = cache.lengths[:, None]
    begins = torch.arange(cache.table.shape[1], device=cache.device) * size
    used = (begins < lengths + num_nodes) & (cache.table != cache.pool.spare)
    full = begins + size <= lengths
    if window is not None:
        # the root sees furthest back, and no node is deeper than the last node of a chain
        used = used & (begins + size > lengths - window + 1)
        full = full & (begins > lengths + num_nodes - 1 - window)
    visible = _visible(ancestors, depths, cache, window)
    blocks = cache.pool.num_blocks + 1
    tiles = -(-num_nodes // QUERY_BLOCK)
    mask = BlockMask.from_kv_blocks(
        *_listed(used & ~full, cache.table, tiles, blocks),
        *_listed(used & full, cache.table, tiles, blocks),
        BLOCK_SIZE=(QUERY_BLOCK, size),
        mask_mod=visible,
        seq_lengths=(num_nodes, blocks * size),
        compute_q_blocks=False,
    )
    # GPT-2 reads the number of dimensions of any mask
    mask.ndim = 4  # pyright: ignore[reportAttributeAccessIssue]
    return mask


def _listed(chosen: Tensor, table: Tensor, tiles: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the number of chosen blocks of each tile, and the blocks, chosen ones first."""
    order = (~chosen).to(torch.uint8).argsort(dim=1, stable=True)
    counts = chosen.sum(1, dtype=torch.int32)[:, None, None].expand(-1, 1, tiles)
    blocks = table.gather(1, order).int()[:, None, None].expand(-1, 1, tiles, -1)
    # kernels expect lists as long as the pool
    blocks = torch.nn.functional.pad(blocks, (0, width - blocks.shape[-1]))
    return counts.contiguous(), blocks.contiguous()


def _visible(
    ancestors: Tensor, depths: Tensor, cache: PagedKVCache, window: int | None
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return the mask function: whether a node of a row sees a slot of the pool."""
    num_nodes, size, lengths = ancestors.shape[1], cache.pool.block_size, cache.lengths
    places = torch.arange(cache.table.shape[1], device=cache.device).expand_as(cache.table)
    # index of each block of the pool within each row; -1 if the row does not have it
    place = cache.table.new_full((len(cache.table), cache.pool.num_blocks + 1), -1)
    place.scatter_(1, cache.table, places)
    place[:, cache.pool.spare] = -1

    def visible(row: Tensor, _: Tensor, node: Tensor, slot: Tensor) -> Tensor:
        block = place[row, slot // size]
        own = block * size + slot % size
        other = own - lengths[row]
        seen = other.clamp(0, num_nodes - 1)
        known = (block >= 0) & (other < num_nodes) & ((other < 0) | ancestors[row, node, seen])
        if window is None:
            return known
        position = torch.where(other < 0, other, depths[row, seen])
        return known & (position > depths[row, node] - window)

    return visible


@functools.cache
def _kernel(device_type: str) -> Callable[..., Any]:
    # without the compiler it stores all scores at once: correct, and for tests only
    return torch.compile(flex_attention) if device_type == "cuda" else flex_attention


def _capped(bound: float) -> Callable[..., Tensor]:
    return lambda score, *_: bound * torch.tanh(score / bound)


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: BlockMask,
    scaling: float | None = None,
    softcap: float | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Compute attention from each row's nodes to the pool; transformers calls this in each layer.

    Queries are (batch, heads, node, width), keys and values (1, key heads, slots of the pool,
    width). The default `scaling` is `width ** -0.5`. `softcap` caps the scores, as in Gemma 2.
    """
    del module
    for name in ("s_aux", "position_bias"):
        if settings.get(name) is not None:
            raise InputError(
                f"paged attention on CUDA does not support {name!r}, which this base needs; "
                "use a pool with flex=False"
            )
    out = _kernel(query.device.type)(
        query,
        key,
        value,
        score_mod=None if softcap is None else _capped(softcap),
        block_mask=attention_mask,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2).contiguous(), None


def reads_in_place(cache: RowCache) -> TypeGuard[PagedKVCache]:
    """Return whether attention reads the blocks of this cache's pool without copying them."""
    return isinstance(cache, PagedKVCache) and cache.pool.flex


@contextmanager
def attending(
    config: PreTrainedConfig, cache: RowCache, *, exact: bool = False, deferred: bool = False
) -> Iterator[None]:
    """Select the attention implementation for the forwards in this context.

    `exact` gives each node bit for bit the result of decoding it alone. `deferred` is for compiled
    layers, which receive a `DeferredCache`.
    """
    if deferred:
        name, function = "specheads_deferred", deferred_attention
    elif exact:
        name, function = "specheads_exact", exact_attention
    elif reads_in_place(cache):
        name, function = "specheads_paged", paged_attention
    elif config._attn_implementation == "sdpa":
        name, function = "specheads_grouped", grouped_attention
    else:
        yield
        return
    written = deferring(cache) if deferred else nullcontext()
    with (
        replaced(config, name, function),
        ragged(cache.row_lengths),
        without_cudnn_attention(cache.device),
        written,
    ):
        yield

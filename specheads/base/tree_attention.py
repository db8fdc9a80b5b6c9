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
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from specheads.base.cache import RowCache
from specheads.base.exact_attention import exact_attention, one_forward
from specheads.base.masks import is_special, replaced
from specheads.base.paged import PagedKVCache
from specheads.core.errors import InputError
from specheads.core.opaque import opaque

MOST_NODES = 64
"""Nodes up to which copying keys costs more than a mask that is as much higher."""

CALL = 256
"""Slots of a row that are read while attention is called once more: fewer are not worth a call."""

ALIGNED = 16
"""Elements between rows of a mask: the kernel of CUDA copies a mask whose rows begin elsewhere."""

_LENGTHS: ContextVar[tuple[int, ...]] = ContextVar("committed tokens of each row", default=())
_TALL: ContextVar[dict[int, tuple[Tensor, Tensor]]] = ContextVar("masks of all heads of a group")


@contextmanager
def ragged(lengths: Sequence[int]) -> Iterator[None]:
    """Let attention know how many slots each row has before the nodes of this forward."""
    tokens = _LENGTHS.set(tuple(lengths)), _TALL.set({})
    try:
        yield
    finally:
        _LENGTHS.reset(tokens[0])
        _TALL.reset(tokens[1])


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Attend from every row's nodes to its slots: what transformers calls in each layer.

    Queries are (batch, heads, node, width), keys and values (batch, key heads, slot, width).
    Heads that share keys are taken for further nodes of one head, where transformers repeats keys
    and values once a head: so much would be copied at every step. On a processor rows are read by
    spans, each up to its own longest row: see `spans`.
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
    """Return what the nodes see (batch, node, heads, width), heads that share keys as nodes."""
    (batch, heads, nodes, width), shared = query.shape, key.shape[1]
    group = heads // shared
    query = query.reshape(batch, shared, group * nodes, width)
    if query.device.type == "cpu":
        # repeat() takes ten times as long on so small a thing, once a layer
        mask = torch.cat([attention_mask] * group, dim=2)
    else:
        mask = _tall(attention_mask, group)
    # the compiler makes one graph for rows of all lengths, and they are looked up when it runs
    attend = _opaque_grouped if torch.compiler.is_compiling() else _attend_grouped
    out = attend(query, key, value, mask, nodes, scaling)
    return out.reshape(batch, heads, nodes, -1).transpose(1, 2).contiguous()


def _tall(mask: Tensor, group: int) -> Tensor:
    """Return the mask of all heads of a group, one below the other; worked out once a forward."""
    known, slots = _TALL.get({}), mask.shape[-1]
    if id(mask) not in known:
        aligned = F.pad(mask, (0, -slots % ALIGNED)).repeat(1, 1, group, 1)[..., :slots]
        # the mask is kept beside it, or another could come to lie at its address
        known[id(mask)] = mask, aligned
    return known[id(mask)][1]


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
    """Return which rows are read together, and up to which slot."""
    if len(lengths := _LENGTHS.get()) != batch:
        return [(slice(None), end)]
    return [(rows, longest + nodes) for rows, longest in spans(lengths)]


@lru_cache(maxsize=8)
def spans(lengths: tuple[int, ...]) -> list[tuple[slice, int]]:
    """Return which neighbours are read together, each span up to its longest row, and that length.

    Of all ways to part the rows it is the one that reads the fewest slots, a call counting `CALL`.
    """
    # the least that the first so many rows take, where the last span of theirs begins, and its end
    least: list[tuple[int, int, int]] = [(0, 0, 0)]
    for count in range(1, len(lengths) + 1):
        # seldom is anything better than to go on with the last span of one row less
        _, first, longest = least[-1]
        longest = max(longest, lengths[count - 1])
        best = (least[first][0] + CALL + (count - first) * longest, first, longest)
        longest = 0
        for first in reversed(range(count)):
            longest = max(longest, lengths[first])
            taken = least[first][0] + CALL + (count - first) * longest
            best = min(best, (taken, first, longest))
            # a span that began further left, cut here, would be one call more and no longer
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
    """Stand in for a cache in compiled layers: hand new keys and values on to attention."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Return what is new: `deferred_attention` writes it."""
        return key_states, value_states


@contextmanager
def deferring(cache: RowCache) -> Iterator[None]:
    """Let `deferred_attention` write to this cache and read it, layer after layer."""
    layers = iter(cache.layers)
    token = _LAYERS.set(layers)
    try:
        yield
        if next(layers, None) is not None:
            raise InputError(
                "compile=true on CUDA needs a base each of whose layers attends once, in order; "
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
    """Write new keys and values to the next layer's cache, then attend as `grouped_attention`."""
    del module
    if is_special(settings):
        raise InputError(
            "compile=true on CUDA attends by plain products, and this base adds to them; "
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


KERNELS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
"""Kernels of attention over a cache on CUDA. cuDNN, which torch prefers on an H100, takes 20 to 40
ms of the host to plan for each new number of slots, and that grows at every step."""

QUERY_BLOCK = 128
"""Nodes of one tile of the mask; flex_attention's own default."""


def tree_block_mask(
    ancestors: Bool[Tensor, "batch node node"],
    depths: Int[Tensor, "batch node"],
    cache: PagedKVCache,
    window: int | None,
) -> BlockMask:
    """Return the mask of `masks.tree_mask`, as the blocks of the pool that hold anything visible.

    Blocks that every node sees whole are listed as full and cost no mask at all; only those at
    the scratch and at a window's edge are looked at slot by slot. The memory it takes is one
    number a row and block. Arguments are those of `tree_mask`; the cache has reserved room.
    """
    num_nodes, size = ancestors.shape[1], cache.pool.block_size
    lengths = cache.lengths[:, None]
    begins = torch.arange(cache.table.shape[1], device=cache.device) * size
    used = (begins < lengths + num_nodes) & (cache.table != cache.pool.spare)
    full = begins + size <= lengths
    if window is not None:
        # the root looks back furthest, and no node is deeper than the last of a chain
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
    # GPT-2 asks any mask how many dimensions it has
    mask.ndim = 4  # pyright: ignore[reportAttributeAccessIssue]
    return mask


def _listed(chosen: Tensor, table: Tensor, tiles: int, width: int) -> tuple[Tensor, Tensor]:
    """Return for every tile how many blocks are chosen, and a row of blocks with those first."""
    order = (~chosen).to(torch.uint8).argsort(dim=1, stable=True)
    counts = chosen.sum(1, dtype=torch.int32)[:, None, None].expand(-1, 1, tiles)
    blocks = table.gather(1, order).int()[:, None, None].expand(-1, 1, tiles, -1)
    # kernels expect a list that could name the whole pool
    blocks = torch.nn.functional.pad(blocks, (0, width - blocks.shape[-1]))
    return counts.contiguous(), blocks.contiguous()


def _visible(
    ancestors: Tensor, depths: Tensor, cache: PagedKVCache, window: int | None
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return what tells, from row, head, node and slot of the pool, whether the node sees it."""
    num_nodes, size, lengths = ancestors.shape[1], cache.pool.block_size, cache.lengths
    places = torch.arange(cache.table.shape[1], device=cache.device).expand_as(cache.table)
    # where each block of the pool stands in each row; -1 where it does not
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
    # uncompiled, it holds every score at once: right everywhere, and only for checks
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
    """Attend from every row's nodes to the pool: what transformers calls in each layer.

    Queries are (batch, heads, node, width), keys and values (1, key heads, slots of the pool,
    width). No `scaling` is one over the root of the width; `softcap` bounds scores, as in Gemma 2.
    """
    del module
    for name in ("s_aux", "position_bias"):
        if settings.get(name) is not None:
            raise InputError(
                f"paged attention on CUDA knows no {name!r}, which this base has; "
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
    """Return whether attention over this cache reads a pool's blocks where they lie."""
    return isinstance(cache, PagedKVCache) and cache.pool.flex


@contextmanager
def attending(
    config: PreTrainedConfig, cache: RowCache, *, exact: bool = False, deferred: bool = False
) -> Iterator[None]:
    """Let the model of this config attend in the way that the cache asks for, meanwhile.

    `exact` asks for what a step of its own would give each node, bit for bit. `deferred` is for
    compiled layers, which are given a `DeferredCache`.
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
    kernels = sdpa_kernel(KERNELS) if cache.device.type == "cuda" else nullcontext()
    written = deferring(cache) if deferred else nullcontext()
    with (
        replaced(config, name, function),
        ragged(cache.row_lengths),
        one_forward(),
        kernels,
        written,
    ):
        yield

"""Attention over blocks where they lie: flex_attention with a block mask, no dense mask, no copy.

See docs/tree_verification.md.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeGuard

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import PreTrainedConfig

from specheads.base.attending import replaced
from specheads.base.cache import RowCache
from specheads.base.deferred_attention import deferred_attention, deferring
from specheads.base.exact_attention import exact_attention, one_forward
from specheads.base.grouped_attention import grouped_attention, ragged
from specheads.base.paged import PagedKVCache
from specheads.core.errors import InputError

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

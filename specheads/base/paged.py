"""Paged KV cache: rows allocate blocks as they grow, share them, and return them.

See docs/tree_verification.md.
"""

from collections import Counter
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from specheads.base.cache import RowCache, RowLayer, upload
from specheads.core.errors import InputError
from specheads.core.machine import refuse_bytes


class PoolFullError(Exception):
    """The pool has too few free blocks, and allocated none. Release rows or wait, then retry."""


class BlockPool:
    """Blocks of slots for any number of `PagedKVCache`s.

    The pool counts references only; the caches know which row uses which block. A block contains
    its slots in all layers of the base.

    Source: Kwon et al. 2023, arXiv:2309.06180, section 4.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int = 16,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.device = torch.device(device)
        # reference counts and the free list are Python lists on the host
        refuse_bytes(64 * num_blocks, torch.device("cpu"), "a pool", "lower num_blocks")
        self.references = [0] * num_blocks
        self.copied_blocks = 0
        """Blocks copied so far because a fork wrote into a shared block."""
        self.spare = num_blocks
        """Index of an extra block that stores padding and belongs to no row."""
        self.held: list[tuple[Tensor, ...]] = [()] * num_layers
        """Keys and values of each layer (heads, blocks, slots, width); empty before its first
        forward."""
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Number of free blocks."""
        return len(self._free)

    def memory(self, layer: int, alike: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return a layer's keys and values, allocated for states (batch, heads, length, width)."""
        if not self.held[layer]:
            blocks, size = self.num_blocks + 1, self.block_size
            self.held[layer] = tuple(
                one.new_zeros(one.shape[1], blocks, size, one.shape[-1]) for one in alike
            )
        return self.held[layer]

    def blocks_for(self, slots: int) -> int:
        """Return the number of blocks for this many slots."""
        return -(-slots // self.block_size)

    def take(self, count: int) -> list[int]:
        """Allocate blocks with one reference each; raise PoolFullError if too few are free."""
        if count > self.num_free:
            raise PoolFullError(
                f"the pool must have {count} free blocks, has {self.num_free} of "
                f"{self.num_blocks}; release rows or allocate more"
            )
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self.references[block] = 1
        return taken

    def share(self, rows: list[list[int]]) -> None:
        """Add one reference to each block of these rows."""
        for block in chain.from_iterable(rows):
            self.references[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Remove one reference from each block; blocks without references become free."""
        for block in blocks:
            self.references[block] -= 1
            if not self.references[block]:
                self._free.append(block)


def _gathered(held: Tensor, table: Tensor, end: int) -> Tensor:
    """Return keys or values of these blocks as contiguous rows of `end` slots."""
    # the memory layout of contiguous rows, or matrix products would round differently
    heads = torch.arange(len(held), device=held.device)[:, None] * held.shape[1]
    index = (table[:, None] + heads).flatten()
    picked = held.flatten(0, 1).index_select(0, index)
    slots = table.shape[1] * held.shape[2]
    return picked.view(len(table), len(held), slots, held.shape[-1])[:, :, :end]


class _PagedLayer(RowLayer):
    """One layer of a batch of rows, over the pool's memory of that layer."""

    def __init__(self, cache: "PagedKVCache", number: int) -> None:
        super().__init__(cache)
        self.number = number

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the pool allocates."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write new positions into each row's blocks; return the keys and values to read."""
        cache: PagedKVCache = self.cache
        new = key_states, value_states
        keys, values = cache.pool.memory(self.number, new)
        for held, states in zip((keys, values), new, strict=True):
            held.flatten(1, 2)[:, cache.scratch_slots] = states.transpose(0, 1)
        return _gathered(keys, cache.table, cache.end), _gathered(values, cache.table, cache.end)


class PagedKVCache(RowCache):
    """Rows as tables of blocks: memory follows the text, and forks share their prefix.

    A row allocates blocks when a forward needs them, and returns them when it commits less or is
    removed. A fork references the same blocks; the first writer into a shared, partly filled block
    copies it. Scratch slots need no copies, and batches over one pool join without copying.
    """

    def __init__(self, pool: BlockPool, batch: int) -> None:
        self.pool = pool
        self.blocks: list[list[int]] = [[] for _ in range(batch)]
        """Each row's blocks, first slots first."""
        super().__init__(
            [_PagedLayer(self, layer) for layer in range(len(pool.held))], batch, pool.device
        )
        self.table = torch.empty(0, 0, dtype=torch.long)
        """(batch, blocks) of the reserved forward; shorter rows are padded with the spare block."""
        self.scratch_slots = self.table
        """(batch, length): slots in the pool of the reserved forward's positions."""

    def reserve(self, length: int, counts: list[int] | None = None) -> None:
        """Allocate the blocks of the next forward; a PoolFullError leaves all rows unchanged."""
        own = [length] * len(self.blocks) if counts is None else counts
        ends = [old + new for old, new in zip(self.row_lengths, own, strict=True)]
        shared = self._shared_tails(own)
        missing = [self.pool.blocks_for(end) for end in ends]
        missing = [max(n - len(row), 0) for n, row in zip(missing, self.blocks, strict=True)]
        copies = sum(
            min(writers, self.pool.references[block] - 1)
            for block, writers in Counter(shared.values()).items()
        )
        new = self.pool.take(sum(missing) + copies)
        self._separate(shared, new)
        for row, count in zip(self.blocks, missing, strict=True):
            row += [new.pop() for _ in range(count)]
        self.end = self.extent(length)
        width, spare = self.pool.blocks_for(self.end), self.pool.spare
        table = [(row + [spare] * (width - len(row)))[:width] for row in self.blocks]
        self.table = upload(table, self.device).view(len(table), width)
        self.scratch_slots = self._in_pool(self.scratch(length))

    def _shared_tails(self, counts: list[int]) -> dict[int, int]:
        """Return the partly filled, shared blocks that rows are about to write into."""
        size, references = self.pool.block_size, self.pool.references
        tails = {
            row: self.blocks[row][length // size]
            for row, (length, count) in enumerate(zip(self.row_lengths, counts, strict=True))
            if count and length % size
        }
        return {row: block for row, block in tails.items() if references[block] > 1}

    def _separate(self, shared: dict[int, int], new: list[int]) -> None:
        """Give these rows their own copy of their last block; the last owner needs no copy."""
        pairs: list[tuple[int, int]] = []
        for row, block in shared.items():
            if self.pool.references[block] > 1:
                pairs.append((block, new.pop()))
                self.blocks[row][self.row_lengths[row] // self.pool.block_size] = pairs[-1][1]
                self.pool.release([block])
        if pairs:
            self.pool.copied_blocks += len(pairs)
            source, target = upload(list(zip(*pairs, strict=True)), self.device)
            for held in chain.from_iterable(self.pool.held):
                held[:, target] = held[:, source]

    def _in_pool(self, slots: Tensor) -> Tensor:
        """Return the pool's slots for these slots (batch, length) of each row."""
        size = self.pool.block_size
        return self.table.gather(1, slots // size) * size + slots % size

    def _copy(self, target: Tensor, source: Tensor) -> None:
        target, source = self._in_pool(target), self._in_pool(source)
        for held in chain.from_iterable(self.pool.held):
            flat = held.flatten(1, 2)
            flat[:, target] = flat[:, source]

    def commit(self, paths: list[list[int]]) -> None:
        """Keep nodes `paths[b]` of the last forward; free the blocks that become empty."""
        super().commit(paths)
        self._trim()

    def _trim(self) -> None:
        for row, length in zip(self.blocks, self.row_lengths, strict=True):
            kept = self.pool.blocks_for(length)
            self.pool.release(row[kept:])
            del row[kept:]

    def keep_rows(self, rows: list[int]) -> None:
        """Keep only these rows, in this order; a row listed twice shares its blocks."""
        self._trim()
        before = self.blocks
        self.blocks = [list(before[row]) for row in rows]
        self.pool.share(self.blocks)
        for row in before:
            self.pool.release(row)
        super().keep_rows(rows)

    def join(self, other: RowCache) -> None:
        """Append another batch's rows, without copying."""
        if not isinstance(other, PagedKVCache) or other.pool is not self.pool:
            raise InputError(
                "paged rows that join a batch must use its pool; use one pool for both"
            )
        self._trim()
        other._trim()
        self.pool.share(other.blocks)
        self.blocks += other.blocks
        super().join(other)

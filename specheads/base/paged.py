"""Paged KV cache: rows allocate blocks of a shared pool as they grow, and return them.

See docs/tree_verification.md.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from specheads.base.cache import RowCache, upload
from specheads.base.recurrent import LayerKind


class PoolFullError(Exception):
    """The pool has too few free blocks, and allocated none. Release rows or wait, then retry."""


class BlockPool:
    """Blocks of slots, in all layers of the base, for any number of `PagedKVCache`s.

    Source: Kwon et al. 2023, arXiv:2309.06180, section 4.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int = 16,
        device: Any = "cpu",
        kinds: Sequence[LayerKind] = (),
        *,
        static: bool = False,
    ) -> None:
        self.static, self.graphs = static, dict[Hashable, Any]()
        """Whether forwards have few shapes, and their recordings: see `compile.Recorder`."""
        self.num_blocks, self.block_size = num_blocks, block_size
        self.device, self.kinds = torch.device(device), kinds
        self.padding_block = num_blocks
        """Index of an extra block that stores padding and belongs to no row."""
        self.states: list[tuple[Tensor, ...]] = [()] * num_layers
        """Keys and values of each layer (heads, blocks, slots, width); empty before its first
        forward."""
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Number of free blocks."""
        return len(self._free)

    def memory(self, layer: int, new_states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return a layer's keys and values, allocated for states (batch, heads, length, width)."""
        if not self.states[layer]:
            blocks, size = self.num_blocks + 1, self.block_size
            # memory allocated in inference mode cannot be written to outside of it
            with torch.inference_mode(mode=False):
                self.states[layer] = tuple(
                    new.new_zeros(new.shape[1], blocks, size, new.shape[-1]) for new in new_states
                )
        return self.states[layer]

    def blocks_for(self, slots: int) -> int:
        """Return the number of blocks for this many slots."""
        return -(-slots // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Allocate blocks; raise PoolFullError if too few are free."""
        if count > self.num_free:
            raise PoolFullError(
                f"the pool must have {count} free blocks, has {self.num_free} of "
                f"{self.num_blocks}; release rows or allocate more"
            )
        return [self._free.pop() for _ in range(count)]

    def release(self, blocks: list[int]) -> None:
        """Free blocks."""
        self._free += blocks


def _gather(states: Tensor, table: Tensor, end: int) -> Tensor:
    """Return keys or values of these blocks as contiguous rows of `end` slots."""
    # the memory layout of contiguous rows, or matrix products would round differently
    heads = torch.arange(len(states), device=states.device)[:, None] * states.shape[1]
    index = (table[:, None] + heads).flatten()
    picked = states.flatten(0, 1).index_select(0, index)
    slots = table.shape[1] * states.shape[2]
    return picked.view(len(table), len(states), slots, states.shape[-1])[:, :, :end]


class PagedKVCache(RowCache):
    """Rows as tables of blocks: memory follows the text, and batches of one pool join uncopied."""

    def __init__(self, pool: BlockPool, batch: int) -> None:
        self.pool, self.static = pool, pool.static
        self.blocks: list[list[int]] = [[] for _ in range(batch)]
        """Each row's blocks, first slots first."""
        super().__init__(len(pool.states), batch, pool.device, pool.kinds)
        self.table = torch.empty(0, 0, dtype=torch.long)
        """(batch, blocks) of the reserved forward; shorter rows are padded with `padding_block`."""
        self.scratch_slots = self.table
        """(batch, length): slots in the pool of the reserved forward's positions."""

    @property
    def graphs(self) -> dict[Hashable, Any]:
        """Recordings of forwards over the pool, which all its caches share."""
        return self.pool.graphs

    @property
    def buffers(self) -> list[Tensor]:
        """Keys and values of the pool."""
        return [*chain.from_iterable(self.pool.states)]

    def places(self, rows: int) -> tuple[Tensor, ...]:
        """Return lengths, blocks and scratch slots; padding is empty rows in the padding block."""
        block, missing = self.pool.padding_block, rows - len(self.table)
        table = pad(self.table, (0, 0, 0, missing), value=block)
        slots = pad(self.scratch_slots, (0, 0, 0, missing), value=block * self.pool.block_size)
        return pad(self.lengths, (0, missing)), table, slots

    @contextmanager
    def at(self, places: tuple[Tensor, ...]) -> Iterator[None]:
        """Read and write rows at these places in this context."""
        before = self.lengths, self.table, self.scratch_slots
        self.lengths, self.table, self.scratch_slots = places
        try:
            yield
        finally:
            self.lengths, self.table, self.scratch_slots = before

    def reserve(self, length: int, counts: list[int] | None = None) -> None:
        """Allocate the blocks of the next forward; a PoolFullError leaves all rows unchanged."""
        counts = [length] * len(self.blocks) if counts is None else counts
        ends = [old + new for old, new in zip(self.row_lengths, counts, strict=True)]
        missing = [
            max(self.pool.blocks_for(end) - len(row), 0)
            for end, row in zip(ends, self.blocks, strict=True)
        ]
        new = self.pool.allocate(sum(missing))
        for row, count in zip(self.blocks, missing, strict=True):
            row += [new.pop() for _ in range(count)]
        self.end = self.extent(length)
        width, padding_block = self.pool.blocks_for(self.end), self.pool.padding_block
        table = [(row + [padding_block] * (width - len(row)))[:width] for row in self.blocks]
        self.table = upload(table, self.device).view(len(table), width)
        self.scratch_slots = self._in_pool(self.scratch(length))

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write a layer's new positions into each row's blocks; return the slots in use."""
        memory = self.pool.memory(layer, (keys, values))
        for states, new in zip(memory, (keys, values), strict=True):
            states.flatten(1, 2)[:, self.scratch_slots] = new.transpose(0, 1)
        return _gather(memory[0], self.table, self.end), _gather(memory[1], self.table, self.end)

    def _in_pool(self, slots: Tensor) -> Tensor:
        """Return the pool's slots for these slots (batch, length) of each row."""
        size = self.pool.block_size
        return self.table.gather(1, slots // size) * size + slots % size

    def _copy(self, target: Tensor, source: Tensor) -> None:
        target, source = self._in_pool(target), self._in_pool(source)
        for states in chain.from_iterable(self.pool.states):
            flat = states.flatten(1, 2)
            flat[:, target] = flat[:, source]

    def commit(self, paths: list[list[int]], *, moved: bool = False) -> None:
        """Keep nodes `paths[b]` of the last forward; free the blocks that become empty."""
        super().commit(paths, moved=moved)
        self._trim()

    def _trim(self) -> None:
        for row, length in zip(self.blocks, self.row_lengths, strict=True):
            num_used = self.pool.blocks_for(length)
            self.pool.release(row[num_used:])
            del row[num_used:]

    def keep_rows(self, rows: list[int]) -> None:
        """Keep only these rows, in this order; each at most once."""
        self._trim()
        for row in set(range(len(self.blocks))).difference(rows):
            self.pool.release(self.blocks[row])
        self.blocks = [self.blocks[row] for row in rows]
        super().keep_rows(rows)

    def join(self, new_rows: RowCache) -> RowCache:
        """Append another batch's rows, without copying."""
        assert isinstance(new_rows, PagedKVCache)
        assert new_rows.pool is self.pool
        self._trim()
        new_rows._trim()
        self.blocks += new_rows.blocks
        new_rows.blocks = [[] for _ in new_rows.blocks]
        return super().join(new_rows)

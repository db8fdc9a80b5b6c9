"""Keys and values of the frozen base, with room to try a tree and forget most of it.

See docs/tree_verification.md.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class _Layer(CacheLayerMixin):
    """One layer's rows; reads its place from the cache it belongs to."""

    is_croppable = False

    def __init__(self, cache: "KVCache") -> None:
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate on the first forward, when head counts and widths are known."""
        batch, heads, _, width = key_states.shape
        capacity = self.cache.capacity
        self.keys = key_states.new_zeros(batch, heads, capacity, width)
        self.values = value_states.new_zeros(batch, heads, capacity, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the new positions into each row's scratch; return all slots in use."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = self.keys, self.values
        assert keys is not None
        assert values is not None
        length, shared = key_states.shape[2], self.cache.shared_length
        end = self.cache.extent(length)
        if shared is not None:
            keys[:, :, shared : shared + length] = key_states
            values[:, :, shared : shared + length] = value_states
        else:
            rows, slots = self.cache.scratch(length)
            keys[rows, :, slots] = key_states.transpose(1, 2)
            values[rows, :, slots] = value_states.transpose(1, 2)
        return keys[:, :, :end], values[:, :, :end]

    def move(self, rows: Tensor, target: Tensor, source: Tensor) -> None:
        """Copy slots `source[b]` of each row b to slots `target[b]`."""
        assert self.keys is not None
        assert self.values is not None
        self.keys[rows, :, target] = self.keys[rows, :, source]
        self.values[rows, :, target] = self.values[rows, :, source]

    def gather(self, source: Tensor, first: int) -> None:
        """Copy these slots of every row to the slots from `first` on, in order."""
        assert self.keys is not None
        assert self.values is not None
        end = first + len(source)
        self.keys[:, :, first:end] = self.keys.index_select(2, source)
        self.values[:, :, first:end] = self.values.index_select(2, source)

    def keep_rows(self, index: Tensor) -> None:
        """Forget every row but these."""
        if self.is_initialized:
            assert self.keys is not None
            assert self.values is not None
            self.keys, self.values = self.keys[index], self.values[index]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.extent(query_length), 0

    def get_seq_length(self) -> int:
        return self.cache.longest

    def get_max_length(self) -> int:
        return self.cache.capacity


class KVCache(Cache):
    """Contiguous rows: row b holds `lengths[b]` committed tokens, then scratch.

    A forward writes its tokens into the scratch after each row's own length, so rows of
    different length need no padding on the left and no realignment. `commit` then keeps the
    accepted ones. What lies beyond a row's length is never attended to, because the mask says
    so, and is written over by the next forward.

    Args:
        num_layers: Layers of the base.
        batch: Rows.
        capacity: Slots of a row: committed tokens and the scratch of one forward together.
        device: Where lengths live; keys and values follow the base.
    """

    def __init__(
        self, num_layers: int, batch: int, capacity: int, device: torch.device | str = "cpu"
    ) -> None:
        self.capacity = capacity
        self.device = torch.device(device)
        self._set_lengths([0] * batch)
        self._own_layers = [_Layer(self) for _ in range(num_layers)]
        super().__init__(layers=[*self._own_layers])

    def _set_lengths(self, lengths: list[int]) -> None:
        # the host's copy answers every question of shape without waiting for the device
        self.row_lengths = lengths
        self.lengths = torch.tensor(lengths, device=self.device)
        self.longest = max(lengths)
        self.shared_length = lengths[0] if min(lengths) == self.longest else None

    def scratch(self, length: int) -> tuple[Tensor, Tensor]:
        """Return row and slot indices of the next `length` positions, each (batch, length)."""
        rows = torch.arange(len(self.row_lengths), device=self.device)[:, None]
        slots = self.lengths[:, None] + torch.arange(length, device=self.device)
        return rows.expand_as(slots), slots

    def extent(self, length: int) -> int:
        """Return how many slots a forward over `length` new positions looks at.

        Raises:
            ValueError: The rows have no room for them.
        """
        end = self.longest + length
        if end > self.capacity:
            raise ValueError(
                f"the cache must hold committed and new tokens together: {self.longest} + "
                f"{length} exceed its {self.capacity} slots; allocate more"
            )
        return end

    def commit(self, paths: list[list[int]]) -> None:
        """Keep nodes `paths[b]` of the last forward, in order; forget the rest.

        Args:
            paths: Accepted nodes of each row, by their place in the last forward. They are on
                the host because the engine reads what was accepted once a step anyway.
        """
        moved = any(path != list(range(len(path))) for path in paths)
        if moved and len(paths) == 1:
            # one row needs no index of rows, and slices are cheaper than indices
            first = self.row_lengths[0]
            source = torch.tensor(paths[0], device=self.device) + first
            for layer in self._own_layers:
                layer.gather(source, first)
        elif moved:
            width = max(map(len, paths))
            # rows that keep fewer repeat their last node into slots that stay scratch
            padded = [path + path[-1:] * (width - len(path)) for path in paths]
            rows, target = self.scratch(width)
            source = self.lengths[:, None] + torch.tensor(padded, device=self.device)
            for layer in self._own_layers:
                layer.move(rows, target, source)
        self._set_lengths(
            [old + len(path) for old, path in zip(self.row_lengths, paths, strict=True)]
        )

    def keep_rows(self, rows: list[int]) -> None:
        """Forget every row but these, in this order: finished requests leave the batch."""
        index = torch.tensor(rows, device=self.device)
        for layer in self._own_layers:
            layer.keep_rows(index)
        self._set_lengths([self.row_lengths[row] for row in rows])

"""KV caches of the frozen base, with scratch slots for the nodes of a tree.

See docs/tree_verification.md.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Hashable
from contextlib import nullcontext
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from specheads.base.compile import EXTENT
from specheads.core.errors import InputError


class RowCache(Cache, ABC):
    """Base class of the caches: rows of committed tokens, each followed by scratch slots.

    Row b has `row_lengths[b]` committed tokens. A forward writes its tokens into the scratch after
    each row's own length, so rows of different lengths need no left padding and no realignment.
    `commit` then keeps the accepted ones. The mask hides slots beyond the length of a row, and the
    next forward overwrites them.

    The order of calls is `reserve`, one forward, `commit`. Rows are added and removed between
    steps (`keep_rows`, `join`). Lengths are on `device`; keys and values follow the base.
    """

    static = False
    """Whether forwards of one length have the same shapes while rows grow. Lengths are then read
    from one address on the device, and the number of slots is a multiple of `EXTENT`."""
    capacity = -1
    """Slots of a row: committed tokens and the scratch of one forward; -1 for unlimited."""
    room = 0
    """Minimum number of rows to allocate when other rows join."""

    def __init__(self, layers: list[Any], batch: int, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._set_lengths([0] * batch)
        self.end = 0
        """Number of slots that the reserved forward reads."""
        super().__init__(layers=layers)

    def _set_lengths(self, lengths: list[int]) -> None:
        # the copy on the host gives all shapes without synchronising
        self.row_lengths = lengths
        self.lengths = self._placed(upload(lengths, self.device))
        self.longest = max(lengths, default=0)
        alike = not self.static and min(lengths, default=0) == self.longest
        self.shared_length = self.longest if alike else None

    def _placed(self, lengths: Tensor) -> Tensor:
        """Return the tensor that stores the lengths."""
        return lengths

    def scratch(self, length: int) -> Tensor:
        """Return the slots of each row's next positions: (batch, length)."""
        return self.lengths[:, None] + torch.arange(length, device=self.device)

    @property
    def positions(self) -> Tensor:
        """The position of each row's next token: (batch,)."""
        return self.lengths.clone() if self.static else self.lengths

    def slot_positions(self, end: int) -> Tensor:
        """Return the position of the token in each of the first slots: (batch, end)."""
        return torch.arange(end, device=self.device).repeat(len(self.lengths), 1)

    def extent(self, length: int) -> int:
        """Return the number of slots that a forward over `length` new positions reads."""
        end = self.longest + length
        return _whole(end) if self.static else end

    @abstractmethod
    def reserve(self, length: int, counts: list[int] | None = None) -> None:
        """Make room for the next forward of `length` positions per row.

        Row b can commit at most its first `counts[b]` positions, the rest is padding; None is all.
        """

    def commit(self, paths: list[list[int]]) -> None:
        """Keep nodes `paths[b]` of the last forward, in order; discard the rest.

        The paths are on the host, because the engine reads them once per step anyway.
        """
        if any(path != list(range(len(path))) for path in paths):
            self._move(paths)
        self._set_lengths(
            [old + len(path) for old, path in zip(self.row_lengths, paths, strict=True)]
        )

    def _move(self, paths: list[list[int]]) -> None:
        """Copy nodes `paths[b]` of the last forward to the first slots of each row's scratch."""
        width = max(map(len, paths))
        # rows that keep fewer repeat their last node into slots that stay scratch
        padded = [path + (path[-1:] or [0]) * (width - len(path)) for path in paths]
        source = self.lengths[:, None] + upload(padded, self.device)
        self._copy(self.scratch(width), source)

    @abstractmethod
    def _copy(self, target: Tensor, source: Tensor) -> None:
        """Copy slots `source[b]` of each row b to slots `target[b]`."""

    def keep_rows(self, rows: list[int]) -> None:
        """Keep only these rows, in this order; a row listed twice is forked.

        Finished and cancelled requests leave the batch this way. The copies of a forked row
        continue the same text independently.
        """
        self._set_lengths([self.row_lengths[row] for row in rows])

    def join(self, other: "RowCache") -> None:
        """Append the rows of another cache, which is then empty.

        Raises:
            ValueError: Its rows have another capacity or another pool.
        """
        self._set_lengths(self.row_lengths + other.row_lengths)
        other.keep_rows([])


def upload(values: list[Any], device: torch.device) -> Tensor:
    """Return whole numbers on the device, without waiting for what it is doing."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=torch.long)
    pinned = torch.tensor(values, dtype=torch.long, pin_memory=True)
    return pinned.to(device, non_blocking=True)


def _whole(slots: int) -> int:
    return -(-slots // EXTENT) * EXTENT


C = TypeVar("C", bound=RowCache, covariant=True)


class RowLayer(CacheLayerMixin, Generic[C]):
    """One layer of a cache, in the form that transformers needs."""

    is_croppable = False

    def __init__(self, cache: C) -> None:
        super().__init__()
        # a strong reference would make a cycle, and unused caches would wait for the collector
        self._cache = weakref.ref(cache)

    @property
    def cache(self) -> C:
        """The cache of this layer."""
        cache = self._cache()
        assert cache is not None
        return cache

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of slots that a forward reads, and the first one."""
        del query_length
        return self.cache.end, 0

    def get_seq_length(self) -> int:
        """Return the length of the longest row."""
        return self.cache.longest

    def get_max_length(self) -> int:
        """Return the capacity of a row; -1 for unlimited."""
        return self.cache.capacity


class _Layer(RowLayer["KVCache"]):
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate on the first forward, when head counts and widths are known."""
        if views := self.cache.slab.views(self, key_states, value_states):
            self.keys, self.values = views
            self.is_initialized = True
            return
        heads, capacity = key_states.shape[1], self.cache.capacity
        self._allocate(
            [
                (new, (len(self.cache.row_lengths), heads, capacity, new.shape[-1]))
                for new in (key_states, value_states)
            ]
        )
        self.is_initialized = True

    def _allocate(self, alike: list[tuple[Tensor, tuple[int, ...]]]) -> None:
        # memory allocated in inference mode cannot be written to outside of it
        own = torch.inference_mode(mode=False) if self.cache.static else nullcontext()
        with own:
            self.keys, self.values = (one.new_zeros(size) for one, size in alike)
        self.cache.slab.forget()

    def serve(self, cache: "KVCache") -> None:
        """Become a layer of another cache, which reuses the memory."""
        self._cache = weakref.ref(cache)

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write new positions into each row's scratch; return the slots in use."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = self.held()
        length, shared, end = key_states.shape[2], self.cache.shared_length, self.cache.end
        if shared is not None:
            keys[:, :, shared : shared + length] = key_states
            values[:, :, shared : shared + length] = value_states
        else:
            rows, slots = self.cache.places(length)
            keys[rows, :, slots] = key_states.transpose(1, 2)
            values[rows, :, slots] = value_states.transpose(1, 2)
        return keys[:, :, :end], values[:, :, :end]

    def held(self) -> tuple[Tensor, Tensor]:
        """Return keys and values of all rows, each (batch, heads, capacity, width).

        Memory of rows that have left is not included; rows that join reuse it.
        """
        assert self.keys is not None
        assert self.values is not None
        rows = len(self.cache.row_lengths)
        return self.keys[:rows], self.values[:rows]

    def move(self, targets: list[int], sources: list[int]) -> None:
        """Copy the committed slots of the source rows to the target rows."""
        end = self.cache.longest
        for held in self.held():
            held[targets, :, :end] = held[sources, :, :end]

    def pick(self, rows: list[int]) -> None:
        """Copy these rows, in this order, to new tensors; a static cache copies in place."""
        keys, values = (held[rows] for held in self.held())
        assert self.keys is not None
        assert self.values is not None
        if self.cache.static:
            if len(rows) > len(self.keys):
                self._allocate([(one, tuple(one.shape)) for one in (keys, values)])
            self.keys[: len(rows)], self.values[: len(rows)] = keys, values
        else:
            self.keys, self.values = keys, values
            self.cache.slab.forget()

    def _enlarge(self, rows: int) -> None:
        """Move to new tensors with place for so many rows: every layer at once if it can be."""
        if self.cache.slab.enlarge(rows, self.cache.longest):
            return
        held, end = self.held(), self.cache.longest
        self._allocate([(one, (rows, *one.shape[1:])) for one in held])
        assert self.keys is not None
        assert self.values is not None
        for new, old in zip((self.keys, self.values), held, strict=True):
            new[: len(old), :, :end] = old[:, :, :end]

    def take_over(self, other: "_Layer") -> None:
        """Append another layer's rows, in free memory or in new tensors."""
        ready = self if self.is_initialized else other
        if not ready.is_initialized:
            return
        for one in (self, other):
            if not one.is_initialized:
                one.lazy_initialization(*ready.held())
        own, new = self.held(), other.held()
        before, after = len(own[0]), len(own[0]) + len(new[0])
        assert self.keys is not None
        assert self.values is not None
        if after > len(self.keys):
            self._enlarge(max(after, self.cache.room))
        end = other.cache.longest
        for held, states in zip((self.keys, self.values), new, strict=True):
            held[before:after, :, :end] = states[:, :, :end]


def _rows(held: Tensor) -> Tensor:
    return torch.arange(len(held), device=held.device)[:, None]


class Slab:
    """The memory of a contiguous cache; the next cache can reuse it with its CUDA graphs."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.layers: list[_Layer] = []
        self.lengths: Tensor | None = None
        self.graphs: dict[Hashable, Any] = {}
        """CUDA graphs recorded over this memory: see `compile.CudaGraphs`."""
        self.whole: Tensor | None = None
        """Keys and values of all layers as one tensor (2 * layer, batch, heads, slot, width), so
        that a cache commits with one copy; None: each layer has its own."""

    def views(self, layer: "_Layer", keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return a layer's part of `whole`; None if its keys or values have another shape."""
        batch, heads, width = len(layer.cache.row_lengths), keys.shape[1], keys.shape[-1]
        # memory allocated in inference mode cannot be written to outside of it
        with torch.inference_mode(mode=False):
            if not any(one.is_initialized for one in self.layers):
                self.whole = keys.new_zeros(
                    2 * len(self.layers), batch, heads, self.capacity, width
                )
            whole, place = self.whole, 2 * self.layers.index(layer)
            alike = all(
                whole is not None
                and one.dtype == whole.dtype
                and (one.shape[1], one.shape[-1]) == (whole.shape[2], whole.shape[-1])
                for one in (keys, values)
            )
            if whole is None or not alike:
                self.whole = None
                return None
            return whole[place], whole[place + 1]

    def enlarge(self, rows: int, end: int) -> bool:
        """Move all layers to memory for more rows; return False if each layer has its own.

        Only the first `end` slots of each row are copied.
        """
        if (old := self.whole) is None:
            return False
        with torch.inference_mode(mode=False):
            self.whole = old.new_zeros(len(old), rows, *old.shape[2:])
            self.whole[:, : old.shape[1], :, :end] = old[:, :, :, :end]
        for place, layer in enumerate(self.layers):
            layer.keys, layer.values = self.whole[2 * place], self.whole[2 * place + 1]
        self.graphs.clear()
        return True

    def forget(self) -> None:
        """Discard the recorded graphs after memory moved."""
        self.graphs.clear()
        self.whole = None

    def fits(self, batch: int, capacity: int) -> bool:
        """Return whether it has at least this many rows and slots per row."""
        keys = self.layers[0].keys if self.layers else None
        return keys is not None and len(keys) >= batch and self.capacity >= capacity


class KVCache(RowCache):
    """Contiguous rows of equal capacity: the fastest to read, and sized for the longest text.

    A static cache can reuse the slab of a freed one, and then has its capacity.
    """

    def __init__(
        self,
        num_layers: int,
        batch: int,
        capacity: int,
        device: torch.device | str = "cpu",
        *,
        static: bool = False,
        slab: Slab | None = None,
    ) -> None:
        self.static = static
        self.slab = slab or Slab(_whole(capacity) if static else capacity)
        self.capacity = self.slab.capacity
        self._places: tuple[Tensor, Tensor] | None = None
        self._own_layers = self.slab.layers
        if slab is None:
            self._own_layers += [_Layer(self) for _ in range(num_layers)]
        for layer in self._own_layers:
            layer.serve(self)
        super().__init__(self._own_layers, batch, device)

    def _placed(self, lengths: Tensor) -> Tensor:
        if not self.static:
            return lengths
        held = self.slab.lengths
        if held is None or len(held) < len(lengths):
            with torch.inference_mode(mode=False):
                held = self.slab.lengths = torch.zeros_like(lengths)
            self.slab.graphs.clear()
        return held[: len(lengths)].copy_(lengths)

    def reserve(self, length: int, counts: list[int] | None = None) -> None:
        """Check that the next forward fits; raise a ValueError if it does not."""
        del counts
        if self.longest + length > self.capacity:
            raise InputError(
                f"the cache must hold committed and new tokens together: {self.longest} + "
                f"{length} exceed its {self.capacity} slots; allocate more"
            )
        self.end, self._places = self.extent(length), None

    def places(self, length: int) -> tuple[Tensor, Tensor]:
        """Return rows and slots of the next positions; computed once per forward."""
        if self._places is None or torch.compiler.is_compiling():
            places = _rows(self.lengths), self.scratch(length)
            if torch.compiler.is_compiling():
                return places
            self._places = places
        return self._places

    def _move(self, paths: list[list[int]]) -> None:
        if (whole := self.slab.whole) is None or whole.device.type != "cpu":
            super()._move(paths)
            return
        # a processor copies one slot of all layers after the other in a twentieth of the time
        # that an index of slots takes; paths ascend, so that no node is overwritten before its turn
        for row, (length, path) in enumerate(zip(self.row_lengths, paths, strict=True)):
            for place, node in enumerate(path):
                if node != place:
                    whole[:, row, :, length + place] = whole[:, row, :, length + node]

    def _copy(self, target: Tensor, source: Tensor) -> None:
        if (whole := self.slab.whole) is not None:
            tensors = [whole[:, : len(target)]]
        else:
            tensors = [held[None] for layer in self._own_layers for held in layer.held()]
        rows = torch.arange(len(target), device=self.device)[:, None]
        for held in tensors:
            if len(target) == 1:
                # one row needs no index of rows, and is copied in less time without
                held.index_copy_(3, target[0], held.index_select(3, source[0]))
            else:
                held[:, rows, :, target] = held[:, rows, :, source]

    def keep_rows(self, rows: list[int]) -> None:
        """Keep only these rows, in this order; a row listed twice is copied.

        If each row keeps its index or comes from beyond the new batch, only the latter are copied.
        """
        moved = [(place, row) for place, row in enumerate(rows) if place != row]
        behind = all(row >= len(rows) for _, row in moved)
        for layer in self._own_layers:
            if not layer.is_initialized:
                continue
            if not behind:
                layer.pick(rows)
            elif moved:
                layer.move(*map(list, zip(*moved, strict=True)))
        super().keep_rows(rows)

    def join(self, other: RowCache) -> None:
        """Append another cache's rows, in free memory or in new tensors."""
        if not isinstance(other, KVCache) or other.capacity != self.capacity:
            raise InputError(
                f"rows that join a contiguous batch must be contiguous rows of {self.capacity} "
                f"slots, got {other.capacity}; allocate both with the same capacity"
            )
        for own, new in zip(self._own_layers, other._own_layers, strict=True):
            own.take_over(new)
        super().join(other)

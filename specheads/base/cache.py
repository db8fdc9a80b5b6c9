"""Keys and values of the frozen base, with room to try a tree and forget most of it.

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
    """Rows of committed tokens, each with scratch behind it: what every cache here has in common.

    Row b holds `row_lengths[b]` committed tokens. A forward writes its tokens into the scratch
    after each row's own length, so rows of different length need no padding on the left and no
    realignment. `commit` then keeps the accepted ones. What lies beyond a row's length is never
    attended to, because the mask says so, and is written over by the next forward.

    The order of calls is `reserve`, one forward, `commit`; rows come and go between those
    (`keep_rows`, `join`). Lengths live on the `device`; keys and values follow the base.
    """

    static = False
    """Whether forwards of one length look alike to a compiler while rows grow: lengths are then
    known to the device only, at one address, and slots are looked at `EXTENT` at a time."""
    capacity = -1
    """Slots of a row: committed tokens and the scratch of one forward; -1 where nothing ends it."""
    room = 0
    """Rows that contiguous rows get place for as soon as others join them."""

    def __init__(self, layers: list[Any], batch: int, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._set_lengths([0] * batch)
        self.end = 0
        """Slots that the reserved forward looks at."""
        super().__init__(layers=layers)

    def _set_lengths(self, lengths: list[int]) -> None:
        # the host's copy answers every question of shape without waiting for the device
        self.row_lengths = lengths
        self.lengths = self._placed(upload(lengths, self.device))
        self.longest = max(lengths, default=0)
        alike = not self.static and min(lengths, default=0) == self.longest
        self.shared_length = self.longest if alike else None

    def _placed(self, lengths: Tensor) -> Tensor:
        """Return where the lengths lie from now on."""
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
        """Return how many slots a forward over `length` new positions looks at."""
        end = self.longest + length
        return _whole(end) if self.static else end

    @abstractmethod
    def reserve(self, length: int, counts: list[int] | None = None) -> None:
        """Make room for the next forward, of `length` positions a row.

        Row b can commit `counts[b]` of them at most, and the rest is padding; None is all.
        """

    def commit(self, paths: list[list[int]]) -> None:
        """Keep nodes `paths[b]` of the last forward, in order; forget the rest.

        They are on the host because the engine reads what was accepted once a step anyway.
        """
        if any(path != list(range(len(path))) for path in paths):
            width = max(map(len, paths))
            # rows that keep fewer repeat their last node into slots that stay scratch
            padded = [path + (path[-1:] or [0]) * (width - len(path)) for path in paths]
            source = self.lengths[:, None] + upload(padded, self.device)
            self._copy(self.scratch(width), source)
        self._set_lengths(
            [old + len(path) for old, path in zip(self.row_lengths, paths, strict=True)]
        )

    @abstractmethod
    def _copy(self, target: Tensor, source: Tensor) -> None:
        """Copy slots `source[b]` of each row b to slots `target[b]`."""

    def keep_rows(self, rows: list[int]) -> None:
        """Forget every row but these, in this order; a row named twice is forked.

        Finished and cancelled requests leave the batch this way; the copies of a forked row go on
        from the same text, each in its own direction.
        """
        self._set_lengths([self.row_lengths[row] for row in rows])

    def join(self, other: "RowCache") -> None:
        """Take over another cache's rows, behind the own ones; the other is left without rows.

        Raises:
            ValueError: Its rows have another capacity, or lie in another pool.
        """
        self._set_lengths(self.row_lengths + other.row_lengths)
        other.keep_rows([])


def upload(values: list[Any], device: torch.device) -> Tensor:
    """Return whole numbers on the device, without waiting for what it is doing."""
    tensor = torch.tensor(values, dtype=torch.long)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _whole(slots: int) -> int:
    return -(-slots // EXTENT) * EXTENT


C = TypeVar("C", bound=RowCache, covariant=True)


class RowLayer(CacheLayerMixin, Generic[C]):
    """One layer of a cache, which tells transformers the place of its rows."""

    is_croppable = False

    def __init__(self, cache: C) -> None:
        super().__init__()
        # or caches that nobody holds would wait, tensors and all, for Python to look for cycles
        self._cache = weakref.ref(cache)

    @property
    def cache(self) -> C:
        """The cache that this is a layer of."""
        cache = self._cache()
        assert cache is not None
        return cache

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many slots a forward looks at, and that the first is the first."""
        del query_length
        return self.cache.end, 0

    def get_seq_length(self) -> int:
        """Return the length of the longest row."""
        return self.cache.longest

    def get_max_length(self) -> int:
        """Return the capacity of a row, -1 for none."""
        return self.cache.capacity


class _Layer(RowLayer["KVCache"]):
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate on the first forward, when head counts and widths are known."""
        if self.cache.static and (views := self.cache.slab.views(self, key_states, value_states)):
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
        # memory made in inference mode could not be written to outside of it, where others may be
        own = torch.inference_mode(mode=False) if self.cache.static else nullcontext()
        with own:
            self.keys, self.values = (one.new_zeros(size) for one, size in alike)
        self.cache.slab.forget()

    def serve(self, cache: "KVCache") -> None:
        """Become a layer of another cache, which takes over the memory."""
        self._cache = weakref.ref(cache)

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the new positions into each row's scratch; return all slots in use."""
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
        """Return keys and values of all slots, each (batch, heads, capacity, width).

        Behind them may lie room that rows have left, for those who join.
        """
        assert self.keys is not None
        assert self.values is not None
        rows = len(self.cache.row_lengths)
        return self.keys[:rows], self.values[:rows]

    def move(self, targets: list[int], sources: list[int]) -> None:
        """Copy the committed slots of some rows into the places of others."""
        end = self.cache.longest
        for held in self.held():
            held[targets, :, :end] = held[sources, :, :end]

    def pick(self, rows: list[int]) -> None:
        """Copy these rows, in this order, into new tensors; of a static cache, into its own."""
        keys, values = (held[rows] for held in self.held())
        assert self.keys is not None
        assert self.values is not None
        if self.cache.static:
            if len(rows) > len(self.keys):
                self._allocate([(one, tuple(one.shape)) for one in (keys, values)])
            self.keys[: len(rows)], self.values[: len(rows)] = keys, values
        else:
            self.keys, self.values = keys, values

    def _enlarge(self, rows: int) -> None:
        """Move to new tensors with place for so many rows."""
        held, end = self.held(), self.cache.longest
        self._allocate([(one, (rows, *one.shape[1:])) for one in held])
        assert self.keys is not None
        assert self.values is not None
        for new, old in zip((self.keys, self.values), held, strict=True):
            new[: len(old), :, :end] = old[:, :, :end]

    def take_over(self, other: "_Layer") -> None:
        """Put another layer's rows, even unread ones, behind the own: into room there, or anew."""
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
    """The memory of a contiguous cache, which the next one may take over with its CUDA graphs."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.layers: list[_Layer] = []
        self.lengths: Tensor | None = None
        self.graphs: dict[Hashable, Any] = {}
        """What was recorded over these addresses: see `compile.CudaGraphs`."""
        self.whole: Tensor | None = None
        """Keys and values of all layers as one tensor (2 * layer, batch, heads, slot, width), so
        that a static cache commits in one go; None: each layer has its own."""

    def views(self, layer: "_Layer", keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return a layer's place in the whole; None if its keys or values have another shape."""
        batch, heads, width = len(layer.cache.row_lengths), keys.shape[1], keys.shape[-1]
        # memory made in inference mode could not be written to outside of it
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

    def forget(self) -> None:
        """Forget what was recorded, for memory moved."""
        self.graphs.clear()
        self.whole = None

    def fits(self, batch: int, capacity: int) -> bool:
        """Return whether it has so many rows, each of so many slots."""
        keys = self.layers[0].keys if self.layers else None
        return keys is not None and len(keys) >= batch and self.capacity >= capacity


class KVCache(RowCache):
    """Contiguous rows of one capacity: the fastest to read, and as large as the longest may get.

    A static one may take over the slab of another that is gone, and has then its capacity.
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
        """Check that the next forward fits: a ValueError says that it does not."""
        del counts
        if self.longest + length > self.capacity:
            raise InputError(
                f"the cache must hold committed and new tokens together: {self.longest} + "
                f"{length} exceed its {self.capacity} slots; allocate more"
            )
        self.end, self._places = self.extent(length), None

    def places(self, length: int) -> tuple[Tensor, Tensor]:
        """Return rows and slots of the next positions; worked out once a forward for all layers."""
        if self._places is None or torch.compiler.is_compiling():
            places = _rows(self.lengths), self.scratch(length)
            if torch.compiler.is_compiling():
                return places
            self._places = places
        return self._places

    def _copy(self, target: Tensor, source: Tensor) -> None:
        if self.slab.whole is not None:
            rows = torch.arange(len(target), device=self.device)[:, None]
            whole = self.slab.whole
            whole[:, rows, :, target] = whole[:, rows, :, source]
            return
        for layer in self._own_layers:
            for held in layer.held():
                if len(held) == 1:
                    # one row needs no index of rows, and is copied in less time without
                    held.index_copy_(2, target[0], held.index_select(2, source[0]))
                else:
                    held[_rows(held), :, target] = held[_rows(held), :, source]

    def keep_rows(self, rows: list[int]) -> None:
        """Forget every row but these, in this order; a row named twice is copied.

        Where rows stay in place, or come from behind them all, only the latter are copied.
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
        """Take over another cache's rows, into room that rows have left or into new tensors."""
        if not isinstance(other, KVCache) or other.capacity != self.capacity:
            raise InputError(
                f"rows that join a contiguous batch must be contiguous rows of {self.capacity} "
                f"slots, got {other.capacity}; allocate them alike"
            )
        for own, new in zip(self._own_layers, other._own_layers, strict=True):
            own.take_over(new)
        super().join(other)

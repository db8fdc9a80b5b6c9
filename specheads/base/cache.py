"""KV caches of the frozen base, with scratch slots for the nodes of a tree.

See docs/tree_verification.md.
"""

import itertools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer

from specheads.base.compile import EXTENT
from specheads.base.recurrent import LayerKind, RecurrentLayer
from specheads.core.drafter import refuse_scattering
from specheads.core.errors import InputError
from specheads.core.kernels import flash_supports
from specheads.core.machine import to_device

CHAINS_ONLY = (
    "a base with recurrent layers verifies chains only: a state belongs to one path; take a tree "
    "without branches, tree=chain"
)


class RowCache(Cache, ABC):
    """Base class of the caches: rows of committed tokens, each followed by scratch slots.

    The order of calls is `reserve`, one forward, `commit`; rows join and leave between steps.
    """

    static = False
    """Whether forwards of one length have the same shapes while rows grow, at the same addresses:
    the number of slots is a multiple of `EXTENT`."""
    capacity = -1
    """Slots of a row: committed tokens and the scratch of one forward; -1 for unlimited."""
    room = 0
    """Minimum number of rows to allocate when other rows join."""

    def __init__(
        self,
        num_layers: int,
        batch: int,
        device: torch.device | str,
        kinds: Sequence[LayerKind] = (),
    ) -> None:
        self.device = torch.device(device)
        self._set_lengths([0] * batch)
        self.end = 0
        """Number of slots that the reserved forward reads."""
        numbers = itertools.count()
        kinds = kinds or [LayerKind(has_keys=True, num_states=0)] * num_layers
        layers: Any = [_layer(kind, numbers, self) for kind in kinds]
        self.recurrent = [layer for layer in layers if isinstance(layer, RecurrentLayer)]
        """Layers with states, which `commit` puts back."""
        super().__init__(layers=layers)

    def _set_lengths(self, lengths: list[int]) -> None:
        # the copy on the host gives all shapes without synchronising
        self.row_lengths = lengths
        self.lengths = self._store_lengths(upload(lengths, self.device))
        self.longest = max(lengths, default=0)
        is_shared = not self.static and min(lengths, default=0) == self.longest
        self.shared_length = self.longest if is_shared else None

    def _store_lengths(self, lengths: Tensor) -> Tensor:
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
        return _round_up(end) if self.static else end

    @property
    @abstractmethod
    def graphs(self) -> dict[Hashable, Any]:
        """Recordings of forwards over this memory: see `compile.Recorder`."""

    @property
    @abstractmethod
    def buffers(self) -> list[Tensor]:
        """The memory that a recorded forward reads and writes, at its addresses."""

    def places(self, rows: int) -> tuple[Tensor, ...]:
        """Return where the rows of the reserved forward are, padded to so many rows.

        They are further inputs of a recorded forward. Empty if all of it is in `buffers`: then no
        rows are added.
        """
        return ()

    def at(self, places: tuple[Tensor, ...]) -> AbstractContextManager[None]:
        """Read and write rows at these places in this context."""
        return nullcontext()

    @abstractmethod
    def reserve(self, length: int, counts: list[int] | None = None) -> None:
        """Make room for a forward of `length` positions; row b can commit `counts[b]` of them."""

    @abstractmethod
    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write a layer's new positions into each row's scratch; return the slots in use."""

    def commit(self, paths: list[list[int]], *, moved: bool = False) -> None:
        """Keep nodes `paths[b]` of the last forward, in order; discard the rest.

        `moved` says that `move` has copied them to their slots.
        """
        if not moved and any(path != list(range(len(path))) for path in paths):
            if self.recurrent:
                raise InputError(CHAINS_ONLY)
            self._move(paths)
        for layer in self.recurrent:
            layer.commit([*map(len, paths)])
        pairs = zip(self.row_lengths, paths, strict=True)
        self._set_lengths([length + len(path) for length, path in pairs])

    def _move(self, paths: list[list[int]]) -> None:
        """Copy nodes `paths[b]` of the last forward to the first slots of each row's scratch."""
        width = max(map(len, paths))
        # rows that keep fewer repeat their last node into slots that stay scratch
        padded = [path + (path[-1:] or [0]) * (width - len(path)) for path in paths]
        self.move(upload(padded, self.device))

    def move(self, path: Tensor) -> None:
        """Copy nodes `path` (batch, node) of the last forward to the first slots of the scratch."""
        self._copy(self.scratch(path.shape[1]), self.lengths[:, None] + path)

    @abstractmethod
    def _copy(self, target: Tensor, source: Tensor) -> None:
        """Copy slots `source[b]` of each row b to slots `target[b]`."""

    def keep_rows(self, rows: list[int]) -> None:
        """Keep only these rows, in this order; each at most once."""
        if self.recurrent:
            index = upload(rows, self.device)
            for layer in self.recurrent:
                layer.keep_rows(index)
        self._set_lengths([self.row_lengths[row] for row in rows])

    def keep(self, rows: Tensor) -> "RowCache":
        """Keep only these rows, as `Memory.keep`: a draft model's memory is its cache."""
        self.keep_rows(rows.tolist())
        return self

    def join(self, new_rows: "RowCache") -> "RowCache":
        """Append the rows of a cache of the same capacity or pool, which is then empty."""
        for layer, new_layer in zip(self.recurrent, new_rows.recurrent, strict=True):
            layer.join(new_layer, len(self.row_lengths), len(new_rows.row_lengths))
        self._set_lengths(self.row_lengths + new_rows.row_lengths)
        new_rows.keep_rows([])
        return self

    scatter = refuse_scattering


def upload(values: list[Any], device: torch.device) -> Tensor:
    """Return whole numbers on the device, without waiting for what it is doing."""
    return to_device(torch.tensor(values, dtype=torch.long), device)


def _round_up(slots: int) -> int:
    return -(-slots // EXTENT) * EXTENT


class RowLayer(CacheLayerMixin):
    """One layer of a cache, in the form that transformers needs; the cache stores its values."""

    def __init__(self, number: int, cache: RowCache) -> None:
        super().__init__()
        self.number = number
        # a strong reference would make a cycle, and unused caches would wait for the collector
        self._cache = weakref.ref(cache)

    @property
    def cache(self) -> Any:
        """The cache of this layer."""
        return self._cache()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the cache allocates."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write new positions into each row's scratch; return the slots in use."""
        return self.cache.write(self.number, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of slots that a forward reads, and the first one."""
        return self.cache.end, 0

    def get_seq_length(self) -> int:
        """Return the length of the longest row."""
        return self.cache.longest

    def get_max_length(self) -> int:
        """Return the capacity of a row; -1 for unlimited."""
        return self.cache.capacity


class HybridLayer(RecurrentLayer, RowLayer):  # pyright: ignore[reportIncompatibleMethodOverride]
    """A layer with keys and values and with states."""

    def get_max_length(self) -> int:
        """Return the capacity of a row; -1 for unlimited."""
        return RowLayer.get_max_length(self)

    def __init__(self, number: int, cache: RowCache, num_states: int) -> None:
        RowLayer.__init__(self, number, cache)
        LinearAttentionLayer.__init__(self, num_states)


def _layer(kind: LayerKind, numbers: Iterator[int], cache: RowCache) -> Any:
    """Return a layer; `numbers` count those with keys."""
    if not kind.has_keys:
        # a layer that keeps nothing has no states; transformers 5.19 has no class for it
        return RecurrentLayer(kind.num_states)
    if not kind.num_states:
        return RowLayer(next(numbers), cache)
    return HybridLayer(next(numbers), cache, kind.num_states)


class StateLocation(NamedTuple):
    """Where the keys, or the values, of a layer are in a slab."""

    stack: int
    position: int


class Slab:
    """The memory of a contiguous cache; the next static cache can reuse it with its CUDA graphs."""

    def __init__(self, num_layers: int, capacity: int) -> None:
        self.num_layers, self.capacity = num_layers, capacity
        self.lengths: Tensor | None = None
        self.graphs: dict[Hashable, Any] = {}
        """CUDA graphs recorded over this memory: see `compile.Recorder`."""
        self.stacks: list[Tensor] = []
        """Keys and values (index, batch, heads, slot, width); one stack has those of all layers
        with the same shapes, so that one copy commits a step."""
        self.locations: dict[int, tuple[StateLocation, StateLocation]] = {}
        """Of the keys and of the values of each layer."""

    @property
    def rows(self) -> int:
        """Number of rows that it has memory for."""
        return self.stacks[0].shape[1] if self.stacks else 0

    def states(self, layer: int, new: tuple[Tensor, Tensor]) -> list[Tensor]:
        """Return a layer's keys and values (batch, heads, slot, width), allocated like new ones."""
        if layer not in self.locations:
            self._allocate(layer, *new)
        return [self.stacks[stack][position] for stack, position in self.locations[layer]]

    def _allocate(self, layer: int, keys: Tensor, values: Tensor) -> None:
        rows, num_states = self.rows or len(keys), 2 * self.num_layers
        if not self.stacks and _shape_key(keys) == _shape_key(values):
            self.stacks.append(self._zeros(keys, num_states, rows))
        is_shared = self.stacks and len(self.stacks[0]) == num_states
        shared_key = {_shape_key(self.stacks[0])} if is_shared else ()
        if {_shape_key(keys), _shape_key(values)} == shared_key:
            self.locations[layer] = StateLocation(0, 2 * layer), StateLocation(0, 2 * layer + 1)
        else:
            first = len(self.stacks)
            self.stacks += self._zeros(keys, 1, rows), self._zeros(values, 1, rows)
            self.locations[layer] = StateLocation(first, 0), StateLocation(first + 1, 0)

    def _zeros(self, states: Tensor, num_states: int, rows: int) -> Tensor:
        """Return memory for keys or values like these (..., heads, slot, width)."""
        heads, width = states.shape[-3], states.shape[-1]
        # memory allocated in inference mode cannot be written to outside of it
        with torch.inference_mode(mode=False):
            if states.is_cuda:
                # flash attention reads rows as one sequence of slots
                sizes = num_states, rows, self.capacity, heads, width
                return states.new_zeros(sizes).transpose(2, 3)
            return states.new_zeros(num_states, rows, heads, self.capacity, width)

    def allocate_like(self, slab: "Slab", rows: int) -> None:
        """Allocate memory for so many rows with the stacks of another slab."""
        self.stacks = [stack[:, :0] for stack in slab.stacks]
        self.locations = dict(slab.locations)
        self.enlarge(rows, 0)

    def enlarge(self, rows: int, end: int) -> None:
        """Move to memory for more rows; the first `end` slots of each row are copied."""
        with torch.inference_mode(mode=False):
            for number, old in enumerate(self.stacks):
                self.stacks[number] = self._zeros(old, len(old), rows)
                self.stacks[number][:, : old.shape[1], :, :end] = old[:, :, :, :end]
        # they were recorded over the memory before
        self.graphs.clear()


def _shape_key(states: Tensor) -> tuple[Any, ...]:
    """Return what keys and values of one stack have in common."""
    return states.dtype, states.shape[-3], states.shape[-1]


class KVCache(RowCache):
    """Contiguous rows of equal capacity: the fastest to read, and sized for the longest text."""

    def __init__(
        self,
        num_layers: int,
        batch: int,
        capacity: int,
        device: torch.device | str = "cpu",
        *,
        static: bool = False,
        slab: Slab | None = None,
        kinds: Sequence[LayerKind] = (),
    ) -> None:
        self.static = static
        self.slab = slab or Slab(num_layers, _round_up(capacity) if static else capacity)
        self.capacity = self.slab.capacity
        self._next_slots: tuple[Tensor, Tensor] | None = None
        super().__init__(num_layers, batch, device, kinds)

    def _store_lengths(self, lengths: Tensor) -> Tensor:
        if not self.static:
            return lengths
        memory = self.slab.lengths
        if memory is None or len(memory) < len(lengths):
            with torch.inference_mode(mode=False):
                memory = self.slab.lengths = torch.zeros_like(lengths)
            self.slab.graphs.clear()
        return memory[: len(lengths)].copy_(lengths)

    @property
    def graphs(self) -> dict[Hashable, Any]:
        """Recordings of forwards over this memory."""
        return self.slab.graphs

    @property
    def buffers(self) -> list[Tensor]:
        """Lengths, keys and values."""
        return [self.lengths, *self.slab.stacks]

    @property
    def can_compile(self) -> bool:
        """Whether compiled layers can write to it: its memory is allocated and does not move."""
        return self.static and bool(self.slab.locations)

    @property
    def has_parts(self) -> bool:
        """Whether attention reads the text without a mask, apart from the nodes."""
        sizes = {(stack.dtype, stack.shape[-1]) for stack in self.slab.stacks}
        if len(sizes) > 1 or self.device.type == "cpu":
            return len(sizes) == 1
        # older GPUs have no flash attention
        return (
            flash_supports(*sizes.pop()) and torch.cuda.get_device_capability(self.device)[0] >= 8
        )

    def reserve(self, length: int, counts: list[int] | None = None) -> None:
        """Check that the next forward fits; raise a ValueError if it does not."""
        if self.longest + length > self.capacity:
            raise InputError(
                f"a cache of {self.capacity} slots cannot hold {self.longest} + {length} tokens"
            )
        self.end, self._next_slots = self.extent(length), None

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write a layer's new positions into each row's scratch; return the slots in use."""
        # memory of rows that have left is not read; rows that join reuse it
        rows, length = len(self.row_lengths), keys.shape[2]
        memory = [states[:rows] for states in self.slab.states(layer, (keys, values))]
        for states, new in zip(memory, (keys, values), strict=True):
            if self.shared_length is not None:
                states[:, :, self.shared_length : self.shared_length + length] = new
            else:
                index, slots = self.next_slots(length)
                states[index, :, slots] = new.transpose(1, 2)
        return memory[0][:, :, : self.end], memory[1][:, :, : self.end]

    def next_slots(self, length: int) -> tuple[Tensor, Tensor]:
        """Return rows and slots of the next positions; computed once per forward."""
        # tensors of a recording that fails have no values
        is_recorded = self.static or torch.compiler.is_compiling()
        if self._next_slots is None or is_recorded:
            rows = torch.arange(len(self.lengths), device=self.device)
            next_slots = rows[:, None], self.scratch(length)
            if is_recorded:
                return next_slots
            self._next_slots = next_slots
        return self._next_slots

    def _move(self, paths: list[list[int]]) -> None:
        if self.device.type != "cpu":
            super()._move(paths)
            return
        # twenty times as fast as an index of slots; paths ascend, so no node is overwritten early
        for row, (length, path) in enumerate(zip(self.row_lengths, paths, strict=True)):
            for depth, node in enumerate(path):
                if node != depth:
                    for stack in self.slab.stacks:
                        stack[:, row, :, length + depth] = stack[:, row, :, length + node]

    def _copy(self, target: Tensor, source: Tensor) -> None:
        rows = torch.arange(len(target), device=self.device)[:, None]
        for stack in self.slab.stacks:
            states = stack[:, : len(target)]
            if len(target) == 1:
                states.index_copy_(3, target[0], states.index_select(3, source[0]))
            else:
                states[:, rows, :, target] = states[:, rows, :, source]

    def keep_rows(self, rows: list[int]) -> None:
        """Keep only these rows, in this order; each at most once."""
        moves = [(target, row) for target, row in enumerate(rows) if target != row]
        if moves:
            targets, sources = upload(moves, self.device).T
            for stack in self.slab.stacks:
                stack[:, targets, :, : self.longest] = stack[:, sources, :, : self.longest]
        super().keep_rows(rows)

    def join(self, new_rows: RowCache) -> RowCache:
        """Append another cache's rows, in free memory or in new tensors."""
        assert isinstance(new_rows, KVCache)
        assert new_rows.capacity == self.capacity
        before, new = len(self.row_lengths), len(new_rows.row_lengths)
        rows, end = max(before + new, self.room), new_rows.longest
        if not self.slab.stacks:
            self.slab.allocate_like(new_rows.slab, rows)
        elif before + new > self.slab.rows:
            self.slab.enlarge(rows, self.longest)
        if end:
            for stack, states in zip(self.slab.stacks, new_rows.slab.stacks, strict=True):
                stack[:, before : before + new, :, :end] = states[:, :new, :, :end]
        return super().join(new_rows)

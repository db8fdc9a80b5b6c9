"""Positions of vLLM's requests that a head reads, and the slots of its KV cache."""

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specheads.core.drafter import Head, Memory
from specheads.core.errors import InputError

CACHE = "vllm.v1.kv_cache_interface"
NULL_SLOT = 0
"""A slot that belongs to no request: vLLM reserves block 0."""


@dataclass(frozen=True, slots=True)
class RequestSpan:
    """Positions of one request that the head reads, without rejected drafts."""

    row: int
    """Row of the request in vLLM's batch."""
    request: str
    start: int
    """Number of positions of its text before these."""
    state_rows: Sequence[int]
    """Row of `UnreadStates` with the hidden state of each position."""
    is_drafting: bool
    """Whether to draft: false until the whole prompt is read."""

    @property
    def count(self) -> int:
        """Number of positions."""
        return len(self.state_rows)

    @property
    def end(self) -> int:
        """Number of positions of its text up to the last of these."""
        return self.start + self.count

    def last_position(self) -> "RequestSpan":
        """Return the last position alone."""
        return replace(self, start=self.end - 1, state_rows=self.state_rows[-1:])


class UnreadStates:
    """Hidden states of the last forward, and of earlier positions that the head has not read.

    vLLM returns the states of a forward once. A budget that skips drafts, or a request that waits
    for its turn, leaves positions to be read later.
    """

    def __init__(self) -> None:
        self.spans: dict[str, RequestSpan] = {}
        """Positions of requests that earlier forwards computed and the head did not read."""
        self._forwards: list[list[Tensor]] = []
        """Hidden states, then auxiliary ones, of unread positions and of the last forward's."""

    def __len__(self) -> int:
        return sum(len(states[0]) for states in self._forwards)

    def add_forward(self, states: list[Tensor]) -> None:
        """Append the hidden states of a forward, and the auxiliary ones, one row a position."""
        self._forwards.append(states)

    def drop(self, requests: Iterable[str]) -> None:
        """Forget the positions of finished requests."""
        for request in requests:
            self.spans.pop(request, None)

    def with_unread(self, span: RequestSpan) -> RequestSpan:
        """Return a span with the unread positions before it."""
        unread = self.spans.get(span.request)
        # a request that was preempted starts at an earlier position
        if unread is None or unread.end != span.start:
            return span
        state_rows = [*unread.state_rows, *span.state_rows]
        return replace(span, start=unread.start, state_rows=state_rows)

    def all(self) -> list[Tensor]:
        """Return all hidden states, then all auxiliary ones, as one tensor each."""
        if len(self._forwards) > 1:
            self._forwards = [[torch.cat(states) for states in zip(*self._forwards, strict=True)]]
        return self._forwards[0]

    def retain(self, spans: Sequence[RequestSpan], requests_read: set[str]) -> None:
        """Keep the states of the spans of other requests than `requests_read`, and of absent ones.

        `spans` are those of the last forward.
        """
        unread = {
            span.request: self.with_unread(span)
            for span in spans
            if span.request not in requests_read
        }
        present = {span.request for span in spans}
        unread |= {name: span for name, span in self.spans.items() if name not in present}
        if requests_read and unread:
            state_rows, end = [row for span in unread.values() for row in span.state_rows], 0
            for name, span in unread.items():
                unread[name] = replace(span, state_rows=range(end, end + span.count))
                end += span.count
            index = torch.tensor(state_rows)
            self._forwards = [[states[index.to(states.device)] for states in self.all()]]
        elif unread:
            # the engine may write the next states to the same memory
            self._forwards[-1] = [states.clone() for states in self._forwards[-1]]
        else:
            self._forwards = []
        self.spans = unread


@dataclass(frozen=True, slots=True)
class SharedSlots:
    """A head's KV cache with the slots of vLLM's own: one of vLLM's block tables places both."""

    memory: Memory
    """The head's memory: one row with as many positions as vLLM has slots."""
    group: int
    """Index of vLLM's cache group, whose block table has every position of a text."""
    block_size: int

    @classmethod
    def allocate(cls, head: Head, vllm_config: Any, cache_config: Any) -> "SharedSlots | None":
        """Allocate the cache of a head; None if it has none.

        `cache_config` is a `KVCacheConfig`. It must hold all positions in this process.
        """
        if head.memory(1, 1) is None:
            return None
        full = importlib.import_module(CACHE).FullAttentionSpec
        groups = cache_config.kv_cache_groups
        is_full = [isinstance(group.kv_cache_spec, full) for group in groups]
        is_split = vllm_config.parallel_config.decode_context_parallel_size > 1
        if vllm_config.kv_transfer_config is not None or is_split or not any(is_full):
            raise InputError(
                f"{head.kind} needs a KV cache of full attention in vLLM that is not "
                "transferred or split among devices; use another kind of head"
            )
        group = is_full.index(True)
        block_size = groups[group].kv_cache_spec.block_size
        memory = head.memory(1, cache_config.num_blocks * block_size)
        assert memory is not None
        return cls(memory, group, block_size)


def slots_of(table: Any, num_rows: int, rows: Tensor, lengths: Tensor, extent: int) -> Tensor:
    """Return the slots of each row's first `extent` positions; `NULL_SLOT` after its end.

    `table` is a block table of vLLM with `num_rows` requests; `rows` and `lengths` have one value a
    row.
    """
    blocks = table.get_device_tensor(num_rows)[rows].long()
    positions = torch.arange(extent, device=rows.device)
    # padding may exceed the maximum length of a text
    block = (positions // table.block_size).clamp(max=blocks.shape[1] - 1)
    slots = blocks[:, block] * table.block_size + positions % table.block_size
    return slots.where(positions < lengths[:, None], NULL_SLOT)

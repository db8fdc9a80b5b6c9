"""Drafts that are recorded once and replayed: one CUDA graph for all levels on a GPU.

See docs/bases.md.
"""

from collections.abc import Hashable
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from specheads.base.compile import (
    Recorder,
    copy_tensors,
    map_tensors,
    pad_batch,
    padded_rows,
    tensors_in,
)
from specheads.core.drafter import Drafter
from specheads.core.features import Committed
from specheads.core.tree import TokenTree
from specheads.decoding.sampling import SamplingState
from specheads.decoding.trees.policies import TreePolicy


class DraftRecorder:
    """Records the drafts of one drafter, with a memory that stays at its addresses.

    Rows that join or leave are copied into that memory, so that nothing is recorded again.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.graphs: dict[Hashable, Any] = {}
        self._memory: Any = None

    def grow(
        self,
        drafter: Drafter,
        tree: TreePolicy,
        committed: Committed,
        memory: Any,
        sampling: SamplingState,
        longest: int,
    ) -> tuple[TokenTree, Any]:
        """Draft one tree per row; return the trees and the memory, which replaces `memory`.

        `longest` is the number of tokens of the longest row.
        """
        num_rows, time = committed.next_tokens.shape
        num_read = memory.fix_shapes(time, longest) if memory is not None else None
        fixed = self._fix(drafter, memory, num_rows)

        def draft(committed: Committed, sampling: SamplingState) -> tuple[TokenTree, Tensor | None]:
            # one for each call: a recording that fails leaves lengths without values
            current = copy(fixed)
            if current is not None:
                current.num_read = num_read
            drafted = tree.grow(drafter, committed, current, sampling)
            if current is not None:
                # its other tensors are written in place
                fixed.lengths.copy_(current.lengths)
            return replace(drafted, ancestor_mask=drafted.ancestors()), sampling.noise

        # a head that is bound or moved has its weights elsewhere
        module = drafter if isinstance(drafter, nn.Module) else nn.Identity()
        buffers = [*tensors_in(fixed), *module.parameters(), *module.buffers()]
        key = ("drafting", tree, num_read, *sampling.shape_key)
        inputs = pad_batch((committed, sampling.draft_inputs()), num_rows)
        drafted, sampling.noise = self.recorder(self.graphs, key, draft, inputs, buffers)
        return map_tensors(lambda tensor: tensor[:num_rows], (drafted, fixed))

    def _fix(self, drafter: Drafter, memory: Any, num_rows: int) -> Any:
        """Return a memory with the content of this one, at addresses that stay."""
        if memory is None:
            return None
        held, rows = self._memory, padded_rows(num_rows)
        if held is None or not held.can_hold(memory, rows):
            with torch.inference_mode(mode=False):
                empty = drafter.memory(rows, memory.capacity)
                # in an empty memory one tensor can be in two places
                self._memory = held = map_tensors(torch.clone, empty)
            self.graphs.clear()
        fixed = map_tensors(lambda tensor: tensor[:rows], held)
        copy_tensors(fixed, memory)
        fixed.extent = memory.extent
        return fixed

"""What the vLLM plug-in takes from vLLM: tensors and costs for a head, states and cache slots."""

import importlib
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specheads.base.fingerprint import tables_fingerprint
from specheads.base.projection import projection_of
from specheads.core.cpu.weight_layout import optimise_for_few_rows
from specheads.core.drafter import Head, Memory
from specheads.core.errors import InputError
from specheads.core.files import from_json, read_json
from specheads.core.ranges import NonNegativeFloat
from specheads.decoding.chain_budget import ChainBudget
from specheads.decoding.cost import StepCost
from specheads.decoding.trees.tuned import Machine
from specheads.export.layouts.vllm import FORCE_VARIABLE, HEAD_VARIABLE
from specheads.heads.load import load_head, refuse_misfit

LOGGER = logging.getLogger(__name__)
EMBEDDING = "vllm.model_executor.layers.vocab_parallel_embedding"
PARALLEL = "vllm.distributed"
UNNORMED = ("MiMoForCausalLM", "Step3p5ForCausalLM")
"""Models of vLLM that apply their final norm with the projection, after their hidden states."""
COST_FILE = "vllm.json"
"""Its name in an exported folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingCost:
    """Content of vllm.json: what `specheads tune engine=vllm` measured."""

    engine: str
    """vLLM and its version."""
    machine: Machine
    cost: StepCost
    cost_error: dict[str, float | int]
    """As in `Tuned`."""
    ragged: NonNegativeFloat = 0.0
    """Further seconds per request of a step that verifies unequal numbers of drafts."""


def load_served_head(target_model: Any, model_config: Any, depth: int) -> Head:
    """Load the head of `SPECHEADS_HEAD` and bind it to the tensors of a model of vLLM.

    Args:
        target_model: The model that vLLM serves; it gets the layers that the head reads.
        model_config: vLLM's `ModelConfig`.
        depth: Levels that vLLM wants to draft.

    Raises:
        InputError: The plug-in cannot serve this head with this model.
    """
    head = load_head(os.environ[HEAD_VARIABLE])
    embedding, projection, bias = gather_tables(target_model)
    model_name = type(target_model).__name__
    if head.num_anchors:
        raise InputError(
            f"the plug-in serves heads that draft token by token, and {head.kind} drafts "
            "blocks; export it with engine=speculators, which vLLM loads itself"
        )
    if model_name in UNNORMED:
        raise InputError(
            "a head reads states after the base's final norm, and vLLM gives those before it "
            f"for {model_name}; serve another base"
        )
    if head.aux_layers:
        if not hasattr(target_model, "set_aux_hidden_state_layers"):
            raise InputError(
                f"{head.kind} reads earlier layers, which vLLM does not return for "
                f"{model_name}; use a head without aux_layers"
            )
        target_model.set_aux_hidden_state_layers(head.aux_layers)
    if depth > head.depth:
        raise InputError(
            f"num_speculative_tokens must be at most {head.depth}, the head's depth, got {depth}"
        )
    # only these two tables: the engine fuses and shards the layers between them
    is_forced = os.environ.get(FORCE_VARIABLE) == "true"
    fingerprint = "" if is_forced else tables_fingerprint(embedding, projection)
    refuse_misfit(head, embedding, fingerprint)
    head.to(embedding.device, model_config.dtype)
    optimise_for_few_rows(head)
    base_projection = projection_of(model_config.hf_text_config, projection, bias)
    head.bind(embedding, base_projection.scaled_weight, base_projection.scaled_bias)
    return head


def gather_tables(target_model: torch.nn.Module) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gather the input embedding, the vocabulary projection and its bias from all devices."""
    layers = importlib.import_module(EMBEDDING)
    gather = importlib.import_module(PARALLEL).tensor_model_parallel_all_gather
    tables = [
        module
        for module in target_model.modules()
        if isinstance(module, layers.VocabParallelEmbedding)
    ]
    inputs = [table for table in tables if not isinstance(table, layers.ParallelLMHead)]
    if not inputs:
        raise InputError(
            "a head needs its base's input embedding on the device that samples; serve without "
            "pipeline parallelism"
        )
    # a base with tied embeddings has no ParallelLMHead
    outputs = [table for table in tables if table not in inputs] or inputs
    pair = inputs[0], outputs[0]
    weights = [getattr(table, "weight", torch.empty(0, dtype=torch.uint8)) for table in pair]
    if any(weight.dtype.itemsize < 2 for weight in weights):
        raise InputError(
            "a head needs its base's embedding and lm_head in 16 or 32 bits, and this base has a "
            "quantised one; serve a base that keeps both"
        )
    embedding, projection = (
        gather(weight.data, 0)[: table.org_vocab_size]
        for weight, table in zip(weights, pair, strict=True)
    )
    if (bias := getattr(outputs[0], "bias", None)) is not None:
        bias = gather(bias.data, 0)[: len(projection)]
    return embedding, projection, bias


def load_budget(head: Head, machine: Machine, depth: int) -> ChainBudget | None:
    """Return the budget of a calibrated head whose cost was measured on this machine, else None."""
    file, tuned = Path(os.environ[HEAD_VARIABLE]) / COST_FILE, head.tuned
    if not file.is_file() or tuned is None or not tuned.acceptance.curves:
        return None
    serving = from_json(ServingCost, read_json(file), str(file))
    if serving.machine != machine:
        LOGGER.warning(
            "%s was measured on %s and this is %s: every request gets %d drafts; measure again "
            "with specheads tune engine=vllm",
            *(file, serving.machine, machine, depth),
        )
        return None
    acceptance = tuned.acceptance
    return ChainBudget(serving.cost, acceptance.per_depth, acceptance.curves, serving.ragged)


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

    def split(self, count: int) -> tuple["RequestSpan", "RequestSpan"]:
        """Return the first positions, and the others."""
        return (
            replace(self, state_rows=self.state_rows[:count]),
            replace(self, start=self.start + count, state_rows=self.state_rows[count:]),
        )


class UnreadStates:
    """Hidden states of the last forward, and of earlier positions that the head has not read.

    vLLM returns the states of a forward once. A budget that skips drafts, or a request that waits
    for its turn, leaves positions to be read later.
    """

    def __init__(self) -> None:
        self.spans: dict[str, RequestSpan] = {}
        """Positions of requests that earlier forwards computed and the head did not read."""
        self.forwards: list[list[Tensor]] = []
        """Hidden states, then auxiliary ones, of unread positions and of the last forward's."""

    def __len__(self) -> int:
        return sum(len(states[0]) for states in self.forwards)

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
        if len(self.forwards) > 1:
            self.forwards = [[torch.cat(states) for states in zip(*self.forwards, strict=True)]]
        return self.forwards[0]

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
            self.forwards = [[states[index.to(states.device)] for states in self.all()]]
        elif unread:
            # the engine may write the next states to the same memory
            self.forwards[-1] = [states.clone() for states in self.forwards[-1]]
        else:
            self.forwards = []
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

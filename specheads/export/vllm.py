"""Plug-in for vLLM: drafts chains in batches with any head but the block heads.

vLLM calls a proposer class (`custom_class`) with token ids and without hidden states. So
`register`, which vLLM calls in each of its processes, wraps four methods of its model runner:

- `propose_draft_token_ids` passes the forward's hidden states to the proposer.
- `_setup_eagle3_aux_hidden_state_outputs` lets the model return the layers that a head reads.
- `_input_fits_in_drafter` is always true. Otherwise one request near the end of its context would
  skip drafting for the whole batch. The scheduler truncates drafts that do not fit.
- `initialize_kv_cache` passes the number of slots in vLLM's own cache.

The head's KV cache uses the same slots as vLLM's: vLLM alone handles chunked prompts, shared
prefixes and preemption. With a `ChainBudget` the plug-in also keeps the acceptance rates of each
request, and the positions that the head reads later. See docs/vllm.md and docs/load.md.
"""

import functools
import importlib
import inspect
import os
import time
from typing import Any

import torch
from jaxtyping import Int
from numpy import ndarray
from torch import Tensor

from specheads.core.drafter import Head, Memory
from specheads.core.errors import InputError
from specheads.core.features import Committed, Features
from specheads.decoding.chain_budget import ChainBudget
from specheads.decoding.noise import likeliest
from specheads.decoding.trees.tuned import Machine
from specheads.export.layouts.vllm import HEAD_VARIABLE
from specheads.export.vllm_adapter import (
    RequestSpan,
    SharedSlots,
    UnreadStates,
    load_budget,
    load_served_head,
    slots_of,
)

RUNNER = "vllm.v1.worker.gpu_model_runner"


def register() -> None:
    """Prepare vLLM's model runner; the entry point `specheads` of `vllm.general_plugins`.

    Does nothing if `SPECHEADS_HEAD` is not set.
    """
    if HEAD_VARIABLE in os.environ:
        prepare_runner()


@functools.cache
def prepare_runner() -> None:
    """Wrap the methods of vLLM's runner once per process. Its CPU runner inherits them."""
    # imported here, because vLLM is optional
    runner_class = importlib.import_module(RUNNER).GPUModelRunner
    propose, fits = runner_class.propose_draft_token_ids, runner_class._input_fits_in_drafter
    initialize, signature = runner_class.initialize_kv_cache, inspect.signature(propose)
    set_up = runner_class._setup_eagle3_aux_hidden_state_outputs

    @functools.wraps(propose)
    def propose_draft_token_ids(runner: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(runner.drafter, Proposer):
            arguments = signature.bind(runner, *args, **kwargs).arguments
            runner.drafter.observe_forward(runner.input_batch, arguments)
        return propose(runner, *args, **kwargs)

    @functools.wraps(fits)
    def input_fits_in_drafter(runner: Any, metadata: Any) -> bool:
        return isinstance(runner.drafter, Proposer) or fits(runner, metadata)

    @functools.wraps(initialize)
    def initialize_kv_cache(runner: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        initialize(runner, config, *args, **kwargs)
        if isinstance(drafter := getattr(runner, "drafter", None), Proposer):
            drafter.cache = SharedSlots.allocate(drafter.head, drafter.config, config)

    @functools.wraps(set_up)
    def set_up_aux_outputs(runner: Any) -> None:
        set_up(runner)
        if isinstance(getattr(runner, "drafter", None), Proposer):
            runner.use_aux_hidden_state_outputs = bool(runner.drafter.head.aux_layers)

    runner_class._setup_eagle3_aux_hidden_state_outputs = set_up_aux_outputs
    runner_class.propose_draft_token_ids = propose_draft_token_ids
    runner_class._input_fits_in_drafter = input_fits_in_drafter
    runner_class.initialize_kv_cache = initialize_kv_cache


class Proposer:
    """Proposer for vLLM's `custom_class`; `SPECHEADS_HEAD` is the head's folder or Hub id."""

    def __init__(self, vllm_config: Any) -> None:
        if not prepare_runner.cache_info().currsize:
            raise InputError(
                f"{HEAD_VARIABLE} must name a head, got {os.environ.get(HEAD_VARIABLE)!r}; set it, "
                "and leave specheads in VLLM_PLUGINS where that is set"
            )
        self.config = vllm_config
        self.depth: int = vllm_config.speculative_config.num_speculative_tokens
        self.head: Head
        self.machine: Machine
        self.budget: ChainBudget | None = None
        """None drafts `depth` tokens for every request."""
        self.cache: SharedSlots | None = None
        """None for a head without a memory between steps."""
        self.unread = UnreadStates()
        self._spans: list[RequestSpan] = []
        """Positions of the last forward."""
        self._is_decoding = False
        """Whether the last forward read no prompt, so that its time is that of a decoding step."""
        self._end_time = 0.0
        """When the last `propose` returned; zero at first."""

    def load_model(self, target_model: Any) -> None:
        """Load the head and bind it to the base's tensors."""
        model_config = self.config.model_config
        self.head = load_served_head(target_model, model_config, self.depth)
        device = next(self.head.parameters()).device
        self.machine = Machine.of(device, model_config.dtype)
        self.budget = load_budget(self.head, self.machine, self.depth)

    def observe_forward(self, batch: Any, arguments: dict[str, Any]) -> None:
        """Store the positions and hidden states of the forward, for the `propose` that follows.

        `batch` is the runner's `input_batch`; `arguments` are those of its
        `propose_draft_token_ids`.
        """
        output = arguments["scheduler_output"]
        num_scheduled = output.num_scheduled_tokens
        metadata, sampled = arguments["spec_decode_metadata"], arguments["sampled_token_ids"]
        num_drafted = [0] * len(sampled) if metadata is None else metadata.num_draft_tokens
        first = offset = len(self.unread)
        self._spans = []
        for row, (request, tokens) in enumerate(zip(batch.req_ids, sampled, strict=True)):
            # the sampled tokens are the accepted drafts and one new token, which is not read yet
            num_rejected = num_drafted[row] - max(len(tokens) - 1, 0)
            start, length = int(batch.num_computed_tokens_cpu[row]), num_scheduled[request]
            state_rows = range(offset, offset + length - num_rejected)
            self._spans.append(RequestSpan(row, request, start, state_rows, bool(tokens)))
            offset += length
        self._table = batch.block_table[self.cache.group if self.cache else 0]
        aux = arguments["aux_hidden_states"] if self.head.aux_layers else []
        self.unread.forwards.append([arguments["hidden_states"], *aux])
        self.unread.drop(output.finished_req_ids)
        if self.budget:
            self.budget.observe(batch.req_ids, sampled)
            # steps that also read prompts take longer, and their cost is not followed
            num_tokens = offset - first
            self._is_decoding = bool(all(sampled) and num_tokens == sum(num_drafted) + len(sampled))
            if self._end_time and self._is_decoding:
                seconds = time.perf_counter() - self._end_time
                num_positions = sum(span.end for span in self._spans)
                self.budget.follow_verify(num_drafted, num_positions, seconds)

    @torch.inference_mode()
    def propose(
        self,
        sampled_token_ids: list[list[int]],
        _lengths: ndarray,
        token_ids_cpu: ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return a chain for each request that has a new token, and an empty list for the others.

        `token_ids_cpu` has one text per row, including the new tokens. Without a budget all chains
        have `depth` tokens.
        """
        del slot_mappings
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        texts = torch.from_numpy(token_ids_cpu)
        drafting = [span for span in self._spans if span.is_drafting]
        num_positions = sum(span.end for span in drafting)
        starts = bool(drafting and self.depth)
        if self.budget and starts:
            starts = self.budget.should_draft(len(drafting))
        unread, drafting = self._batches(starts)
        for spans in unread:
            self.head.store_committed(*self._committed(spans, texts))
        start_time = time.perf_counter()
        if drafting:
            for span, chain in zip(drafting, self._draft(drafting, texts), strict=True):
                drafts[span.row] = chain
        if self.budget and drafting:
            levels = max(map(len, drafts))
            drafts = self.budget.cut_chains(drafts, num_positions)
            if self._is_decoding:
                seconds = time.perf_counter() - start_time
                self.budget.follow_draft(len(drafting), levels, num_positions, seconds)
        # a head without a memory reads only the last position, so nothing waits to be read
        requests_read = {span.request for spans in [*unread, drafting] for span in spans}
        self.unread.retain(self._spans if self.cache else [], requests_read)
        self._end_time = time.perf_counter()
        return drafts

    def _batches(self, starts: bool) -> tuple[list[list[RequestSpan]], list[RequestSpan]]:
        """Return batches of positions that are only stored, and the batch that drafts.

        All requests draft in one batch. Of many positions it has the last one.
        """
        max_count, together, drafting = self.depth + 1, list[RequestSpan](), list[RequestSpan]()
        # each prompt is a batch of its own: shorter rows would be mostly padding
        prompts = list[list[RequestSpan]]()
        for span in self._spans:
            drafts = starts and span.is_drafting
            if self.cache is None:
                if drafts:
                    drafting.append(span.split(span.count - 1)[1])
                continue
            is_short = span.is_drafting and span.count <= max_count
            size = self.cache.block_size
            if self.budget and is_short and not drafts and span.end // size == span.start // size:
                # many positions at once take little longer; others may share a full block
                continue
            span = self.unread.with_unread(span)
            num_before = span.count - drafts if span.count > max_count or not drafts else 0
            before, last = span.split(num_before)
            if drafts:
                drafting.append(last)
            if num_before and is_short:
                together.append(before)
            elif num_before:
                prompts.append([before])
        return [*prompts, together] if together else prompts, drafting

    def _committed(
        self, spans: list[RequestSpan], texts: Int[Tensor, "row slot"]
    ) -> tuple[Committed, Memory | None]:
        """Return these positions, and the memory of their rows."""
        sizes = torch.tensor([(span.row, span.start, span.count) for span in spans]).T
        row, start, count = sizes
        # padding repeats a row's last position
        steps = torch.minimum(torch.arange(int(count.max())), count[:, None] - 1)
        states = self.unread.all()
        device, extent = states[0].device, int(start.max()) + steps.shape[1]
        tokens = texts[row[:, None], start[:, None] + steps + 1].long().to(device)
        padded = [
            [*span.state_rows, *[span.state_rows[-1]] * (steps.shape[1] - span.count)]
            for span in spans
        ]
        state_rows = torch.tensor(padded).to(device)
        hidden, *aux = (layer_states[state_rows] for layer_states in states)
        features = Features(hidden, torch.cat(aux, dim=-1) if aux else None)
        row, start, count = sizes.to(device)
        memory = None
        if self.cache is not None:
            slots = slots_of(self._table, len(self._spans), row, start + count, extent)
            memory = self.cache.memory.scatter(slots, start)
        return Committed(features, tokens, count), memory

    def _draft(self, spans: list[RequestSpan], texts: Int[Tensor, "row slot"]) -> list[list[int]]:
        """Store these positions, and return a chain after each of them."""
        logits, state = self.head.begin(*self._committed(spans, texts))
        num_positions = sum(span.end for span in spans)
        rows, levels = [span.row for span in spans], list[Tensor]()
        while True:
            levels.append(likeliest(logits))
            if self.budget:
                self.budget.update_level(rows, len(levels) - 1, logits)
            if len(levels) == self.depth or (
                self.budget and not self.budget.should_draft_level(rows, len(levels), num_positions)
            ):
                return self.head.to_tokens(torch.cat(levels, dim=1)).tolist()
            tokens = self.head.to_tokens(levels[-1])
            logits, state = self.head.extend(state, tokens, torch.zeros_like(tokens))

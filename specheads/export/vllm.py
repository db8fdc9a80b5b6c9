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
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from numpy import ndarray
from torch import Tensor

from specheads.base.fingerprint import tables_fingerprint
from specheads.base.projection import projection_of
from specheads.core.drafter import Head, Memory
from specheads.core.errors import InputError
from specheads.core.features import Committed, Features
from specheads.core.files import from_json, read_json
from specheads.core.ranges import NonNegativeFloat
from specheads.core.weight_layout import for_few_rows
from specheads.decoding.chain_budget import ChainBudget
from specheads.decoding.cost import StepCost
from specheads.decoding.noise import likeliest
from specheads.decoding.trees.tuned import Machine
from specheads.export.layouts.vllm import FORCE_VARIABLE, HEAD_VARIABLE
from specheads.heads.load import load_head, refuse_misfit

LOGGER = logging.getLogger(__name__)
RUNNER = "vllm.v1.worker.gpu_model_runner"
CACHE = "vllm.v1.kv_cache_interface"
EMBEDDING = "vllm.model_executor.layers.vocab_parallel_embedding"
PARALLEL = "vllm.distributed"
NULL_SLOT = 0
"""A slot that belongs to no request: vLLM reserves block 0."""
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


def register() -> None:
    """Prepare vLLM's model runner; the entry point `specheads` of `vllm.general_plugins`.

    Does nothing if `SPECHEADS_HEAD` is not set.
    """
    if HEAD_VARIABLE in os.environ:
        _prepare_runner()


@functools.cache
def _prepare_runner() -> None:
    """Wrap the methods of vLLM's runner once per process. Its CPU runner inherits them."""
    # imported here, because vLLM is optional
    kind = importlib.import_module(RUNNER).GPUModelRunner
    propose, fits = kind.propose_draft_token_ids, kind._input_fits_in_drafter
    initialize, signature = kind.initialize_kv_cache, inspect.signature(propose)
    set_up = kind._setup_eagle3_aux_hidden_state_outputs

    @functools.wraps(propose)
    def propose_draft_token_ids(runner: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(runner.drafter, Proposer):
            given = signature.bind(runner, *args, **kwargs).arguments
            runner.drafter.watch(runner.input_batch, given)
        return propose(runner, *args, **kwargs)

    @functools.wraps(fits)
    def input_fits_in_drafter(runner: Any, metadata: Any) -> bool:
        return isinstance(runner.drafter, Proposer) or fits(runner, metadata)

    @functools.wraps(initialize)
    def initialize_kv_cache(runner: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        initialize(runner, config, *args, **kwargs)
        if isinstance(getattr(runner, "drafter", None), Proposer):
            runner.drafter.allocate(config)

    @functools.wraps(set_up)
    def set_up_aux_outputs(runner: Any) -> None:
        set_up(runner)
        if isinstance(getattr(runner, "drafter", None), Proposer):
            runner.use_aux_hidden_state_outputs = bool(runner.drafter.head.aux_layers)

    kind._setup_eagle3_aux_hidden_state_outputs = set_up_aux_outputs
    kind.propose_draft_token_ids = propose_draft_token_ids
    kind._input_fits_in_drafter = input_fits_in_drafter
    kind.initialize_kv_cache = initialize_kv_cache


@dataclass(frozen=True, slots=True)
class RequestSpan:
    """Positions of one request that the head reads, without rejected drafts."""

    index: int
    """Row of the request in vLLM's batch."""
    request: str
    start: int
    """Number of positions of its text before these."""
    places: Sequence[int]
    """Where `Proposer` has the hidden state of each position."""
    drafts: bool
    """Whether to draft: false until the whole prompt is read."""

    @property
    def count(self) -> int:
        """Number of positions."""
        return len(self.places)

    @property
    def end(self) -> int:
        """Number of positions of its text up to the last of these."""
        return self.start + self.count


class Proposer:
    """Proposer for vLLM's `custom_class`; `SPECHEADS_HEAD` is the head's folder or Hub id."""

    def __init__(self, vllm_config: Any) -> None:
        if not _prepare_runner.cache_info().currsize:
            raise InputError(
                f"{HEAD_VARIABLE} must name a head, got {os.environ.get(HEAD_VARIABLE)!r}; set it, "
                "and leave specheads in VLLM_PLUGINS where that is set"
            )
        self.config = vllm_config
        self.depth: int = vllm_config.speculative_config.num_speculative_tokens
        self.head: Head
        self.budget: ChainBudget | None = None
        """None drafts `depth` tokens for every request."""
        self._memory: Memory | None = None
        self._group, self._block_size, self._ended = 0, 0, 0.0
        self._states: list[list[Tensor]] = []
        """Hidden states, then auxiliary ones, of unread positions and of the last forward's."""
        self._unread: dict[str, RequestSpan] = {}
        """Positions of requests that earlier forwards read and the head did not."""

    def load_model(self, target_model: Any) -> None:
        """Load the head and bind it to the base's tensors."""
        head = load_head(os.environ[HEAD_VARIABLE])
        embedding, projection, bias = _borrowed(target_model)
        if head.num_anchors:
            raise InputError(
                f"the plug-in serves heads that draft token by token, and {head.kind} drafts "
                "blocks; export it with engine=speculators, which vLLM loads itself"
            )
        if type(target_model).__name__ in UNNORMED:
            raise InputError(
                "a head reads states after the base's final norm, and vLLM gives those before it "
                f"for {type(target_model).__name__}; serve another base"
            )
        if head.aux_layers:
            if not hasattr(target_model, "set_aux_hidden_state_layers"):
                raise InputError(
                    f"{head.kind} reads earlier layers, which vLLM does not return for "
                    f"{type(target_model).__name__}; use a head without aux_layers"
                )
            target_model.set_aux_hidden_state_layers(head.aux_layers)
        if self.depth > head.depth:
            raise InputError(
                f"num_speculative_tokens must be at most {head.depth}, the head's depth, got "
                f"{self.depth}"
            )
        # only these two tables: the engine fuses and shards the layers between them
        forced = os.environ.get(FORCE_VARIABLE) == "true"
        refuse_misfit(head, embedding, "" if forced else tables_fingerprint(embedding, projection))
        head.to(embedding.device, self.config.model_config.dtype)
        for_few_rows(head)
        own = projection_of(self.config.model_config.hf_text_config, projection, bias)
        head.bind(embedding, own.scaled_weight, own.scaled_bias)
        self.head = head
        self.machine = Machine.of(embedding.device, self.config.model_config.dtype)
        self.budget = self._budget()

    def _budget(self) -> ChainBudget | None:
        """Return the budget of a calibrated head whose cost was measured on this machine."""
        file, tuned = Path(os.environ[HEAD_VARIABLE]) / COST_FILE, self.head.tuned
        if not file.is_file() or tuned is None or not tuned.acceptance.curves:
            return None
        served = from_json(ServingCost, read_json(file), str(file))
        if served.machine != self.machine:
            LOGGER.warning(
                "%s was measured on %s and this is %s: every request gets %d drafts; measure again "
                "with specheads tune engine=vllm",
                *(file, served.machine, self.machine, self.depth),
            )
            return None
        known = tuned.acceptance
        return ChainBudget(served.cost, known.per_depth, known.curves, served.ragged)

    def allocate(self, cache: Any) -> None:
        """Allocate the head's KV cache with as many slots as vLLM's cache.

        `cache` is a `KVCacheConfig`. It must hold all positions in this process.
        """
        if self.head.memory(1, 1) is None:
            return
        full = importlib.import_module(CACHE).FullAttentionSpec
        groups = [isinstance(group.kv_cache_spec, full) for group in cache.kv_cache_groups]
        split = self.config.parallel_config.decode_context_parallel_size > 1
        if self.config.kv_transfer_config is not None or split or not any(groups):
            raise InputError(
                f"{self.head.kind} needs a KV cache of full attention in vLLM that is not "
                "transferred or split among devices; use another kind of head"
            )
        self._group = groups.index(True)
        self._block_size = cache.kv_cache_groups[self._group].kv_cache_spec.block_size
        self._memory = self.head.memory(1, cache.num_blocks * self._block_size)

    def watch(self, batch: Any, given: dict[str, Any]) -> None:
        """Store the positions and hidden states of the forward, for the `propose` that follows.

        `batch` is the runner's `input_batch`; `given` are the arguments of its
        `propose_draft_token_ids`.
        """
        output = given["scheduler_output"]
        scheduled = output.num_scheduled_tokens
        metadata, texts = given["spec_decode_metadata"], given["sampled_token_ids"]
        drafted = [0] * len(texts) if metadata is None else metadata.num_draft_tokens
        self._rows, offset = [], sum(len(states[0]) for states in self._states)
        first = offset
        for index, (request, sampled) in enumerate(zip(batch.req_ids, texts, strict=True)):
            # the sampled tokens are the accepted drafts and one new token, which is not read yet
            rejected = drafted[index] - max(len(sampled) - 1, 0)
            start, length = int(batch.num_computed_tokens_cpu[index]), scheduled[request]
            places = range(offset, offset + length - rejected)
            self._rows.append(RequestSpan(index, request, start, places, bool(sampled)))
            offset += length
        self._table = batch.block_table[self._group]
        aux = given["aux_hidden_states"] if self.head.aux_layers else []
        self._states.append([given["hidden_states"], *aux])
        for request in output.finished_req_ids:
            self._unread.pop(request, None)
        if self.budget:
            self.budget.observe(batch.req_ids, texts)
            # steps that also read prompts take longer, and their cost is not followed
            tokens = offset - first
            self._decodes = bool(all(texts) and tokens == sum(drafted) + len(texts))
            if self._ended and self._decodes:
                positions = sum(row.end for row in self._rows)
                seconds = time.perf_counter() - self._ended
                if len(set(drafted)) > 1:
                    seconds = max(seconds - self.budget.ragged * len(drafted), 0.0)
                self.budget.verify.note(tokens, positions, seconds)

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
        drafting = [row for row in self._rows if row.drafts]
        positions = sum(row.end for row in drafting)
        starts = bool(drafting and self.depth)
        if self.budget and starts:
            starts = self.budget.starts(len(drafting))
        began = time.perf_counter()
        batches = self._batches(starts)
        if batches and len(self._states) > 1:
            self._states = [[torch.cat(parts) for parts in zip(*self._states, strict=True)]]
        for rows in batches:
            chains = self._draft(rows, texts, starts and rows[0].drafts)
            for row, chain in zip(rows, chains, strict=True):
                drafts[row.index] = chain
        self._leave_unread({row.request for rows in batches for row in rows})
        if self.budget and starts:
            if self._decodes:
                seconds = (time.perf_counter() - began) / max(map(len, drafts))
                self.budget.draft.note(len(drafting), positions, seconds)
            drafts = self.budget.cut(drafts, positions)
        self._ended = time.perf_counter()
        return drafts

    def _batches(self, starts: bool) -> list[list[RequestSpan]]:
        """Return groups of rows of similar length; each group is one batch of the head."""
        drafting = [row for row in self._rows if row.drafts]
        if self._memory is None:
            # such a head reads only the last position
            ends = [replace(row, start=row.end - 1, places=row.places[-1:]) for row in drafting]
            return [ends] if ends and starts else []
        # each prompt is a batch of its own: shorter rows would be mostly padding
        most = self.depth + 1
        short = [row for row in drafting if row.count <= most]
        long = [[row] for row in self._rows if row.count > most or not row.drafts]
        if self.budget and not starts:
            # many positions at once take little longer; other requests may share a full block
            size = self._block_size
            short = [row for row in short if row.end // size > row.start // size]
        return [[self._with_unread(row) for row in rows] for rows in [*long, short] if rows]

    def _with_unread(self, row: RequestSpan) -> RequestSpan:
        """Return a row with the unread positions before it."""
        unread = self._unread.get(row.request)
        # a request that was preempted starts at an earlier position
        if unread is None or unread.end != row.start:
            return row
        return replace(row, start=unread.start, places=[*unread.places, *row.places])

    def _leave_unread(self, read: set[str]) -> None:
        """Keep the states of positions of other requests, if the head has a memory."""
        rows = self._rows if self._memory is not None else []
        left = {row.request: self._with_unread(row) for row in rows if row.request not in read}
        here = {row.request for row in self._rows}
        left |= {name: row for name, row in self._unread.items() if name not in here}
        if read and left:
            places, end = [one for row in left.values() for one in row.places], 0
            for name, row in left.items():
                left[name] = replace(row, places=range(end, end + row.count))
                end += row.count
            (states,) = self._states
            self._states = [[one[torch.tensor(places).to(one.device)] for one in states]]
        elif left:
            # the engine may write the next states to the same memory
            self._states[-1] = [one.clone() for one in self._states[-1]]
        else:
            self._states = []
        self._unread = left

    def _draft(
        self, rows: list[RequestSpan], texts: Int[Tensor, "row slot"], starts: bool
    ) -> list[list[int]]:
        """Update the head's KV cache with these rows, and draft if `starts`."""
        numbers = torch.tensor([(row.index, row.start, row.count) for row in rows]).T
        index, start, count = numbers
        # padding repeats a row's last position
        steps = torch.minimum(torch.arange(int(count.max())), count[:, None] - 1)
        (states,) = self._states
        device, extent = states[0].device, int(start.max()) + steps.shape[1]
        tokens = texts[index[:, None], start[:, None] + steps + 1].long().to(device)
        places = [torch.tensor(row.places)[step] for row, step in zip(rows, steps, strict=True)]
        hidden, *aux = (one[torch.stack(places).to(device)] for one in states)
        features = Features(hidden, torch.cat(aux, dim=-1) if aux else None)
        index, start, count = numbers.to(device)
        memory = self._memory
        if memory is not None:
            memory = memory.scatter(self._slots(index, start + count, extent), start)
        committed = Committed(features, tokens, count)
        if not starts:
            self.head.store_committed(committed, memory)
            return [[] for _ in rows]
        logits, state = self.head.begin(committed, memory)
        positions = sum(row.end for row in rows)
        drafting, guesses = [row.index for row in rows], list[Tensor]()
        while True:
            guesses.append(likeliest(logits))
            if self.budget:
                self.budget.note(drafting, len(guesses) - 1, logits)
            if len(guesses) == self.depth or (
                self.budget and not self.budget.continues(drafting, len(guesses), positions)
            ):
                return self.head.to_tokens(torch.cat(guesses, dim=1)).tolist()
            tokens = self.head.to_tokens(guesses[-1])
            logits, state = self.head.extend(state, tokens, torch.zeros_like(tokens))

    def _slots(self, index: Tensor, lengths: Tensor, extent: int) -> Tensor:
        """Return the slots of each row's first `extent` positions; `NULL_SLOT` after its end."""
        blocks = self._table.get_device_tensor(len(self._rows))[index].long()
        positions = torch.arange(extent, device=index.device)
        # padding may exceed the maximum length of a text
        block = (positions // self._table.block_size).clamp(max=blocks.shape[1] - 1)
        slots = blocks[:, block] * self._table.block_size + positions % self._table.block_size
        return slots.where(positions < lengths[:, None], NULL_SLOT)


def _borrowed(target: torch.nn.Module) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gather the input embedding, the vocabulary projection and its bias from all devices."""
    kinds = importlib.import_module(EMBEDDING)
    gather = importlib.import_module(PARALLEL).tensor_model_parallel_all_gather
    tables = [one for one in target.modules() if isinstance(one, kinds.VocabParallelEmbedding)]
    inputs = [one for one in tables if not isinstance(one, kinds.ParallelLMHead)]
    if not inputs:
        raise InputError(
            "a head needs its base's input embedding on the device that samples; serve without "
            "pipeline parallelism"
        )
    # a base with tied embeddings has no ParallelLMHead
    outputs = [one for one in tables if one not in inputs] or inputs
    layers = inputs[0], outputs[0]
    stored = [getattr(layer, "weight", torch.empty(0, dtype=torch.uint8)) for layer in layers]
    if any(weight.dtype.itemsize < 2 for weight in stored):
        raise InputError(
            "a head needs its base's embedding and lm_head in 16 or 32 bits, and this base has a "
            "quantised one; serve a base that keeps both"
        )
    embedding, projection = (
        gather(weight.data, 0)[: layer.org_vocab_size]
        for weight, layer in zip(stored, layers, strict=True)
    )
    if (bias := getattr(outputs[0], "bias", None)) is not None:
        bias = gather(bias.data, 0)[: len(projection)]
    return embedding, projection, bias

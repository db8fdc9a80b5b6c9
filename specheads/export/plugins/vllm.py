"""vLLM's plug-in: any head that reads the last hidden state proposes, as a chain, in batches.

vLLM lets a class of ours propose (`custom_class`), with token ids and no features. So `register`,
which vLLM calls in each of its processes, wraps three methods of its model runner:

- `propose_draft_token_ids` shows the proposer what the forward has read;
- `_input_fits_in_drafter` shows it every forward: a request near the end of its context would
  otherwise hide those of the whole batch (the scheduler cuts drafts that do not fit);
- `initialize_kv_cache` tells it how many slots vLLM's own cache has.

What a head keeps between steps lies in the same slots as vLLM's keys and values. So no request has
to be followed: chunked prompts, shared prefixes and preemption are vLLM's business, and the head
can hold no state that disagrees with it. See docs/vllm.md.
"""

import functools
import importlib
import inspect
import os
from dataclasses import dataclass
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
from specheads.core.weight_layout import for_few_rows
from specheads.decoding.trees import policies
from specheads.export.layouts.vllm import FORCE_VARIABLE, HEAD_VARIABLE
from specheads.heads.load import load_head, refuse_misfit

RUNNER = "vllm.v1.worker.gpu_model_runner"
CACHE = "vllm.v1.kv_cache_interface"
EMBEDDING = "vllm.model_executor.layers.vocab_parallel_embedding"
PARALLEL = "vllm.distributed"

NULL_SLOT = 0
"""A slot that no request is given: vLLM's block 0 stands for no block."""


def register() -> None:
    """Prepare vLLM's model runner; the entry point `specheads` of `vllm.general_plugins`.

    Does nothing in a process that is to serve no head.
    """
    if HEAD_VARIABLE in os.environ:
        _prepare_runner()


@functools.cache
def _prepare_runner() -> None:
    """Wrap the methods of vLLM's runner, which that of its CPU build inherits, once a process."""
    # imported here, because most processes with this package in reach serve nothing with it
    kind = importlib.import_module(RUNNER).GPUModelRunner
    propose, fits = kind.propose_draft_token_ids, kind._input_fits_in_drafter
    initialize, signature = kind.initialize_kv_cache, inspect.signature(propose)

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

    kind.propose_draft_token_ids = propose_draft_token_ids
    kind._input_fits_in_drafter = input_fits_in_drafter
    kind.initialize_kv_cache = initialize_kv_cache


@dataclass(frozen=True, slots=True)
class Row:
    """What one forward has read of one request's text, as far as it stays."""

    index: int
    """The request's place in vLLM's batch."""
    offset: int
    """Where its first position lies among those of the forward."""
    start: int
    """Positions of its text that were read before."""
    count: int
    """Positions read now: of drafts the accepted ones only."""
    wanted: bool
    """Whether a draft is asked for: not before its prompt is read to the end."""


class Proposer:
    """What vLLM's `custom_class` is set to; `SPECHEADS_HEAD` names the head's folder or Hub id."""

    def __init__(self, vllm_config: Any) -> None:
        if not _prepare_runner.cache_info().currsize:
            raise InputError(
                f"{HEAD_VARIABLE} must name a head, got {os.environ.get(HEAD_VARIABLE)!r}; set it, "
                "and leave specheads in VLLM_PLUGINS where that is set"
            )
        self.config = vllm_config
        self.policy = policies.chain(vllm_config.speculative_config.num_speculative_tokens)
        self.head: Head
        self._memory: Memory | None = None
        self._group = 0

    def load_model(self, target_model: torch.nn.Module) -> None:
        """Load the head, and lend it the base's tensors."""
        head = load_head(os.environ[HEAD_VARIABLE])
        embedding, projection = _borrowed(target_model)
        if head.aux_layers:
            raise InputError(
                f"the plug-in shows heads the last hidden state only, and {head.kind} reads "
                "earlier layers; export it with engine=vllm, which has a layout of vLLM's own for "
                "it"
            )
        if self.policy.depth > head.depth:
            raise InputError(
                f"num_speculative_tokens must be at most {head.depth}, the head's depth, got "
                f"{self.policy.depth}"
            )
        # the two tables only: the engine fuses and splits the layers between
        forced = os.environ.get(FORCE_VARIABLE) == "true"
        refuse_misfit(head, embedding, "" if forced else tables_fingerprint(embedding, projection))
        head.to(embedding.device, self.config.model_config.dtype)
        for_few_rows(head)
        own = projection_of(self.config.model_config.hf_text_config, projection)
        head.bind(embedding, own.scaled_weight)
        self.head = head

    def allocate(self, cache: Any) -> None:
        """Make room for what the head remembers of as many positions as vLLM's cache holds.

        That is a `KVCacheConfig`; one that does not keep all positions here is refused.
        """
        if self.head.memory(1, 1) is None:
            return
        full = importlib.import_module(CACHE).FullAttentionSpec
        groups = [isinstance(group.kv_cache_spec, full) for group in cache.kv_cache_groups]
        split = self.config.parallel_config.decode_context_parallel_size > 1
        if self.config.kv_transfer_config is not None or split or not any(groups):
            raise InputError(
                f"{self.head.kind} remembers each position where vLLM has its keys and values: it "
                "needs full attention somewhere, in a cache that is neither transferred nor split "
                "among devices; take another kind of head"
            )
        self._group = groups.index(True)
        block_size = cache.kv_cache_groups[self._group].kv_cache_spec.block_size
        self._memory = self.head.memory(1, cache.num_blocks * block_size)

    def watch(self, batch: Any, given: dict[str, Any]) -> None:
        """Note what the forward has read; `propose` is called next.

        The runner gives its `input_batch`, and the arguments of its `propose_draft_token_ids`.
        """
        scheduled = given["scheduler_output"].num_scheduled_tokens
        metadata, texts = given["spec_decode_metadata"], given["sampled_token_ids"]
        drafted = [0] * len(texts) if metadata is None else metadata.num_draft_tokens
        self._rows, offset = [], 0
        for index, (request, sampled) in enumerate(zip(batch.req_ids, texts, strict=True)):
            # what was sampled is the accepted drafts and one token more, which is not read yet
            rejected = drafted[index] - max(len(sampled) - 1, 0)
            start, length = int(batch.num_computed_tokens_cpu[index]), scheduled[request]
            self._rows.append(Row(index, offset, start, length - rejected, bool(sampled)))
            offset += length
        self._hidden, self._table = given["hidden_states"], batch.block_table[self._group]

    @torch.inference_mode()
    def propose(
        self,
        sampled_token_ids: list[list[int]],
        _lengths: ndarray,
        token_ids_cpu: ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return a chain for each request that has just got a token, and none for the others.

        The texts, one a row, include the tokens that were just sampled.
        """
        del slot_mappings
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        for rows in self._batches():
            chains = self._draft(rows, torch.from_numpy(token_ids_cpu))
            for row, chain in zip(rows, chains, strict=True):
                drafts[row.index] = chain
        return drafts

    def _batches(self) -> list[list[Row]]:
        """Return the rows that are drafted together, of about as many positions each."""
        wanted = [row for row in self._rows if row.wanted]
        if self._memory is None:
            # each one's last position alone
            ends = [
                Row(row.index, row.offset + row.count - 1, row.start + row.count - 1, 1, row.wanted)
                for row in wanted
            ]
            return [ends] if ends else []
        # prompts go one by one: beside them, all other rows would be padding
        most = self.policy.num_nodes
        short = [row for row in wanted if row.count <= most]
        long = [[row] for row in self._rows if row.count > most or not row.wanted]
        return [*long, short] if short else long

    def _draft(self, rows: list[Row], texts: Int[Tensor, "row slot"]) -> list[list[int]]:
        """Have the head read these rows, and draft where that is asked for."""
        numbers = torch.tensor([(row.index, row.offset, row.start, row.count) for row in rows]).T
        index, offset, start, count = numbers
        # padding repeats a row's last position
        steps = torch.minimum(torch.arange(int(count.max())), count[:, None] - 1)
        device, extent = self._hidden.device, int(start.max()) + steps.shape[1]
        tokens = texts[index[:, None], start[:, None] + steps + 1].long().to(device)
        features = Features(self._hidden[(offset[:, None] + steps).to(device)])
        index, _, start, count = numbers.to(device)
        memory = self._memory
        if memory is not None:
            places = self._places(index, start + count, extent)
            memory = memory.scatter(places, start)
        committed = Committed(features, tokens, count)
        if not rows[0].wanted:
            self.head.begin(committed, memory)
            return [[] for _ in rows]
        return self.policy.grow(self.head, committed, memory).tokens[:, 1:].tolist()

    def _places(self, index: Tensor, lengths: Tensor, extent: int) -> Tensor:
        """Return the slots of each row's first `extent` positions, `NULL_SLOT` behind its end."""
        blocks = self._table.get_device_tensor(len(self._rows))[index].long()
        positions = torch.arange(extent, device=index.device)
        # padding may reach behind the longest text there can be
        block = (positions // self._table.block_size).clamp(max=blocks.shape[1] - 1)
        slots = blocks[:, block] * self._table.block_size + positions % self._table.block_size
        return slots.where(positions < lengths[:, None], NULL_SLOT)


def _borrowed(target: torch.nn.Module) -> tuple[Tensor, Tensor]:
    """Return the base's input embedding and vocabulary projection, from all devices."""
    layers = importlib.import_module(EMBEDDING)
    gather = importlib.import_module(PARALLEL).tensor_model_parallel_all_gather
    tables = [one for one in target.modules() if isinstance(one, layers.VocabParallelEmbedding)]
    inputs = [one for one in tables if not isinstance(one, layers.ParallelLMHead)]
    if not inputs:
        raise InputError(
            "a head needs its base's input embedding on the device that samples; serve without "
            "pipeline parallelism"
        )
    # where both are one table, only the embedding is there
    outputs = [one for one in tables if one not in inputs] or inputs
    inputs, outputs = (
        gather(layer.weight.data, 0)[: layer.org_vocab_size] for layer in (inputs[0], outputs[0])
    )
    return inputs, outputs

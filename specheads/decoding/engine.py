"""Continuous batching: requests enter and leave between steps, each with its own rules.

See docs/serve.md.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from specheads.base.cache import CHAINS_ONLY, RowCache
from specheads.base.compile import MAX_BYTES, WARMUP_CALLS, padded_rows
from specheads.base.model import FrozenBase
from specheads.base.paged import BlockPool, PagedKVCache, PoolFullError
from specheads.core.drafter import Drafter, Head
from specheads.core.errors import InputError, require_integer
from specheads.core.machine import device_bytes, process_bytes
from specheads.decoding import accept
from specheads.decoding.cost import RequestRates, RowLoad, StepLoad
from specheads.decoding.detokenize import TextStream
from specheads.decoding.loop import NO_LEDGER, DecodingState, DecodingStep, StepLedger, start, step
from specheads.decoding.processors import largest_token
from specheads.decoding.request import Request, group_by_length, split_stop
from specheads.decoding.suffix_decoding import SuffixAutomaton
from specheads.decoding.trees import policies
from specheads.decoding.trees.tuned import Tuned

RECORDED_BYTES = 2 * MAX_BYTES
"""Memory that is left free for recordings: those of a cache, and those of drafts."""


def can_verify(base: FrozenBase, tree: policies.TreePolicy) -> bool:
    """Return whether a base can verify the trees of a policy: one with states verifies chains."""
    return tree.is_chain or not base.has_states


def default_tree(drafter: Drafter, base: FrozenBase) -> policies.TreePolicy:
    """Return the head's tuned trees if they were measured on the same device type, else a chain.

    A base with states gets a chain if a tuned tree has branches.
    "Do not draft" is only used on the same device name and dtype: drafting may pay on another one.
    """
    tuned = drafter.tuned
    if isinstance(tuned, Tuned) and tuned.machine.device == base.device.type:
        policy = tuned.policy()
        pays = policy.depth or tuned.fits(base.device, base.dtype)
        if pays and can_verify(base, policy):
            return policy
    return policies.chain(drafter.depth)


def resolve_tree(
    drafter: Drafter | None, tree: policies.TreePolicy | None, base: FrozenBase
) -> tuple[Drafter | None, policies.TreePolicy]:
    """Return the drafter and the tree policy; refuse a tree that the drafter cannot draft.

    A tree of copied text or without a draft, the best one for some tuned heads, needs no drafter,
    so that none has to store the text.
    """
    if tree is None:
        policy = default_tree(drafter, base) if drafter else policies.NOTHING
    else:
        policy = tree
    if not isinstance(policy, policies.TreePolicy):
        raise InputError(f"a tree is a TreePolicy, such as policies.chain(3), got {tree!r:.80}")
    if not can_verify(base, policy):
        raise InputError(f"{CHAINS_ONLY}, not {policy.name}")
    if not policy.draft_depth:
        return None, policy
    if drafter is None or policy.draft_depth > drafter.depth:
        raise InputError(
            f"the tree has {policy.draft_depth} levels but the head drafts "
            f"{drafter.depth if drafter else 0}; choose a shallower tree"
        )
    if 0 < drafter.drafted_size < policy.num_guesses:
        raise InputError(
            f"the tree takes {policy.num_guesses} guesses after a node, and the drafter knows "
            f"{drafter.drafted_size} tokens; lower its ranks or branches"
        )
    return drafter, policy


FinishReason = Literal["eos", "stop", "length", "context", "cancelled", "failed"]
"""An end-of-text token, a stop string, the request's limit, a full context, `cancel`, or an error
in a step of this request."""


class Stream:
    """Output of one request. Iterating over it steps the engine, for all requests.

    `limit` is the number of new tokens that request and context allow, `num_blocks` the number of
    blocks of the pool that it may need.
    """

    def __init__(self, request: Request, engine: "Engine", limit: int, num_blocks: int) -> None:
        self.request, self.num_blocks, self._engine = request, num_blocks, engine
        self.rates = RequestRates()
        """Acceptance rates that the engine's tree policy follows."""
        self.steps: list[DecodingStep] = []
        """Steps of this request, without the prefill."""
        self.finish_reason: FinishReason | None = None
        """None while it is not done."""
        self._limit, base = limit, engine.base
        self._stop, special = split_stop(request.stop, base.tokenizer)
        self.eos_ids = {*(base.eos_ids if request.eos_ids is None else request.eos_ids), *special}
        self._text: TextStream | None = None
        self._tokens: list[int] = []
        self._yielded = 0, 0
        self._limit_reason: FinishReason = (
            "length" if limit == request.max_new_tokens else "context"
        )
        if not limit:
            self.finish_reason = self._limit_reason

    @property
    def tokens(self) -> list[int]:
        """Final new tokens, with an end-of-text token and without any part of a stop string."""
        # only a stop string can remove tokens
        text = self._decode_text() if self._stop else None
        if text is None or self.finish_reason not in (None, "stop"):
            return self._tokens.copy()
        return self._tokens[: text.count_final()[0]]

    @property
    def load(self) -> RowLoad:
        """What tree policies know of this request; a stop string may still remove tokens."""
        num_tokens = len(self._tokens)
        context = len(self.request.prompt) + num_tokens
        return RowLoad(context, self._limit - num_tokens, self.rates)

    @property
    def text(self) -> str:
        """Final text, without a stop string; empty if the base has no tokenizer."""
        text = self._decode_text()
        return "" if text is None else text.written[: text.count_final()[1]]

    def cancel(self) -> None:
        """Remove the request from the engine and release its memory."""
        self._engine.cancel(self)

    def __iter__(self) -> Iterator[tuple[list[int], str]]:
        """Yield new final tokens and their text, each once, after as many steps as needed."""
        while True:
            num_tokens, num_characters = self._yielded
            tokens, text = self.tokens[num_tokens:], self.text[num_characters:]
            if tokens or text:
                self._yielded = num_tokens + len(tokens), num_characters + len(text)
                yield tokens, text
            elif self.finish_reason is not None:
                return
            else:
                self._engine.step()

    def add_step(self, step: DecodingStep) -> None:
        """Append the tokens of a step, and observe how much of its draft was accepted."""
        self.steps.append(step)
        self.rates.observe(step.num_drafted, step.num_accepted, step.tokens)
        self.append_tokens(step.tokens)

    def append_tokens(self, tokens: list[int]) -> None:
        """Append decoded tokens up to the end of the request."""
        for token in tokens:
            self._tokens.append(token)
            if token in self.eos_ids:
                self.finish_reason = "eos"
            elif self._stop and (text := self._decode_text()) and text.is_over:
                self.finish_reason = "stop"
            elif len(self._tokens) == self._limit:
                self.finish_reason = self._limit_reason
            if self.finish_reason is not None:
                break

    def _decode_text(self) -> TextStream | None:
        """Return the text of all tokens except an end-of-text token."""
        tokenizer = self._engine.base.tokenizer
        if tokenizer is None:
            return None
        if self._text is None:
            self._text = TextStream(tokenizer, self.request.prompt, self._stop)
        end = len(self._tokens) - (self.finish_reason == "eos")
        for token in self._tokens[self._text.num_tokens : end]:
            self._text.push(token)
        if self.finish_reason is not None:
            self._text.close()
        return self._text


class Engine:
    """Decodes any number of requests in batches; each gets the output it would get alone.

    It is not thread-safe: `step`, and iterating over a stream, decode for all requests.

    Args:
        base, drafter, tree, acceptance, coupled: As in `generate`. A head's tuned trees follow the
            batch and the context of each step.
        max_batch: Rows decoded together, as far as they fit into memory; further requests wait.
        max_length: Limit of prompt and new tokens together; None is the base's context length.
            Without a pool every row, and the drafter's memory, has this length from the start.
        pool: Blocks for keys and values, for this engine only; None uses contiguous rows. A request
            waits until the pool has all blocks that it may need.
        ledger: Adds up the seconds of the parts of all steps: see `StepLedger`.
        memory: Text of earlier requests, which trees with copied text may copy too; requests of
            this engine are added. None copies from a request's own text only.

    Raises:
        ValueError: The drafter cannot draft the tree, a setting is out of range, or the head's
            dtype or device differs from the base's.
    """

    def __init__(
        self,
        base: FrozenBase,
        drafter: Drafter | None = None,
        *,
        tree: policies.TreePolicy | None = None,
        acceptance: str | accept.AcceptanceRule = "match",
        max_batch: int = 16,
        max_length: int | None = None,
        pool: BlockPool | None = None,
        coupled: bool = True,
        ledger: StepLedger = NO_LEDGER,
        memory: SuffixAutomaton | None = None,
    ) -> None:
        weight = next(drafter.parameters(), None) if isinstance(drafter, Head) else None
        if weight is not None and (weight.dtype, weight.device) != (base.dtype, base.device):
            raise InputError(
                f"a head needs its base's dtype and device: {weight.dtype} on {weight.device} for "
                f"a base in {base.dtype} on {base.device}; load it with load_head(path, base)"
            )
        self.base, self.pool, self.ledger, self.memory = base, pool, ledger, memory
        self.max_batch = require_integer(max_batch, "max_batch", 1)
        self.acceptance = accept.acceptance_rule(acceptance)
        self.drafter, self.tree = resolve_tree(drafter, tree, base)
        # typical acceptance samples nothing: it wants the likeliest guesses
        self.coupled = coupled and self.acceptance is not accept.typical_rule
        context = base.max_length
        length = context if max_length is None else require_integer(max_length, "max_length")
        self.max_length = min(length, context)
        # a row may exceed its limit by one draft, and its last step needs slots for a tree
        self._capacity = self.max_length + 2 * self.tree.num_nodes
        self.max_batch = max(1, min(self.max_batch, self._num_fitting_rows()))
        self.waiting: list[Stream] = []
        """Requests that wait, in order of submission."""
        self.running: list[Stream] = []
        """The requests of the rows of the batch, in order of the rows."""
        self._state: DecodingState | None = None

    def _num_fitting_rows(self) -> int:
        """Return how many rows fit into the memory of the device."""
        base, num_nodes = self.base, self.tree.num_nodes
        # rows that join are copied: memory briefly has all of them twice
        cache_bytes = 0 if self.pool is not None else 2 * self._capacity * base.slot_bytes
        # mask, ancestors, and logits of base and drafter of each node
        logits = base.vocab_size + (self.drafter.drafted_size if self.drafter else 0)
        node_bytes = (self.max_length + num_nodes + logits) * base.dtype.itemsize + num_nodes
        row_bytes = cache_bytes + base.state_bytes + num_nodes * node_bytes
        return int((device_bytes(base.device) - RECORDED_BYTES * base.static) / row_bytes)

    def submit(self, request: Request) -> Stream:
        """Append a request to the queue; raise a ValueError if it can never be decoded."""
        length, vocab = len(request.prompt), len(self.base.embedding)
        if (largest := max(request.prompt)) >= vocab:
            raise InputError(
                f"token ids must be below {vocab}, got {largest}; use this base's own tokenizer"
            )
        if (largest := largest_token(request.sampling)) >= vocab:
            raise InputError(
                f"tokens of logit_bias and bad_words must be below {vocab}, got {largest}; use "
                "this base's own tokenizer"
            )
        if media := self.base.media_ids.keys() & {*request.prompt}:
            token = min(media)
            raise InputError(
                f"a prompt must be text, and token {token} stands for a picture or a sound "
                f"({self.base.media_ids[token]} of config.json); leave it out"
            )
        if length > self.max_length:
            raise InputError(
                f"a prompt must fit {self.max_length} tokens of context, got {length}; shorten it"
            )
        if request.stop and self.base.tokenizer is None:
            raise InputError(
                f"stop strings need a base with a tokenizer, got {self.base.name!r}; name eos_ids"
            )
        limit = min(request.max_new_tokens, self.max_length - length)
        draft_context = self.drafter.max_length if self.drafter else None
        if draft_context is not None and length + limit > draft_context:
            raise InputError(
                f"prompt and new tokens must fit the context of the draft model: {length} + "
                f"{limit} exceed {draft_context}; choose another draft model, or ask for less"
            )
        size, num_nodes, num_blocks = length + limit, self.tree.num_nodes, 0
        if self.pool is not None:
            num_blocks = self.pool.blocks_for(size + num_nodes)
            if num_blocks > self.pool.num_blocks:
                raise InputError(
                    f"a request must fit the pool: {size} tokens and a tree of {num_nodes} need "
                    f"{num_blocks} blocks of {self.pool.num_blocks}; ask for less or allocate more"
                )
        stream = Stream(request, self, limit, num_blocks)
        if stream.finish_reason is None:
            self.waiting.append(stream)
        return stream

    def record_steps(
        self, prompt_tokens: int = 1, progress: Callable[[Any], Iterable[int]] = iter
    ) -> list[int]:
        """Record the greedy steps of all batch sizes, which the first requests would do otherwise.

        Requests of `prompt_tokens` tokens are decoded and cancelled, the largest batch first. Sizes
        are powers of two and `max_batch`, as far as `RECORDED_BYTES` are enough; they are returned.
        The engine must be idle. `progress` may show a bar: `rich.progress.track`.
        """
        device, sizes, num_bytes = self.base.device, list[int](), 0
        # a draft after the prompt has another shape, and acceptance reads recorded logits
        num_steps = 2 * WARMUP_CALLS + 1
        limit = (num_steps + 1) * (self.tree.depth + 1)
        request = Request(prompt=[0] * prompt_tokens, max_new_tokens=limit, eos_ids=())
        for power in progress(range(padded_rows(self.max_batch).bit_length())[::-1]):
            if num_bytes < RECORDED_BYTES:
                sizes.append(min(2**power, self.max_batch))
                streams = [self.submit(request) for _ in range(sizes[-1])]
                self.step()
                # without the memory of the rows
                before = process_bytes(device)
                for _ in range(num_steps):
                    self.step()
                num_bytes += process_bytes(device) - before
                for stream in streams:
                    stream.cancel()
        return sizes

    def run(self) -> None:
        """Decode until all requests are done."""
        while self.step():
            pass

    def step(self) -> bool:
        """Admit waiting requests and decode one step; return whether any request is left.

        After an error the requests of the step end as failed, and the others continue.
        """
        self._admit()
        if (state := self._state) is not None:
            tree = self.tree.choose_policy(StepLoad([stream.load for stream in self.running]))
            with self._end_on_error(self.running, state.cache):
                steps = step(
                    self.base, self.drafter, tree, self.acceptance, state, ledger=self.ledger
                )
                for stream, decoded in zip(self.running, steps, strict=True):
                    stream.add_step(decoded)
            self._release_finished()
            self.ledger.end_part("host")
        return bool(self.running or self.waiting)

    def cancel(self, stream: Stream) -> None:
        """Cancel a waiting or running request and release its memory; ignore one that is done."""
        if stream.finish_reason is None:
            stream.finish_reason = "cancelled"
            if stream in self.waiting:
                self.waiting.remove(stream)
            self._release_finished()

    def _admit(self) -> None:
        """Move waiting requests that fit into the batch."""
        newcomers: list[Stream] = []
        for stream in self.waiting:
            batch = [*self.running, *newcomers]
            if len(batch) == self.max_batch or not self._has_blocks([*batch, stream]):
                break
            newcomers.append(stream)
        if self.waiting and not self.running and not newcomers:
            raise PoolFullError("others hold the pool's blocks; give an engine its own pool")
        for group in group_by_length([len(stream.request.prompt) for stream in newcomers]):
            self._start_rows([newcomers[index] for index in group])
        self._release_finished()

    def _start_rows(self, streams: list[Stream]) -> None:
        """Read the prompts of these waiting requests, decode their first tokens, and join them."""
        for stream in streams:
            self.waiting.remove(stream)
        prompts = [stream.request.prompt for stream in streams]
        sampling = [stream.request.sampling for stream in streams]
        with self._end_on_error(streams):
            cache = self._make_cache(len(streams))
        with self._end_on_error(streams, cache):
            state, first = start(
                self.base,
                self.drafter,
                prompts,
                self._capacity,
                sampling,
                cache,
                self.coupled,
                [sorted(stream.eos_ids) for stream in streams],
                self.memory,
            )
            for stream, token, text in zip(streams, first, state.texts, strict=True):
                stream.append_tokens([token])
                stream.rates = self.tree.start_rates(text)
        self.running += streams
        if self._state is None:
            self._state = state
            return
        with self._end_on_error(self.running, self._state.cache):
            self._state.join(state)

    def _make_cache(self, batch: int) -> RowCache:
        """Return an empty cache with `batch` rows."""
        if self.pool is not None:
            return PagedKVCache(self.pool, batch)
        cache = self.base.cache(batch, self._capacity)
        # otherwise every join would copy all rows
        cache.room = self.max_batch
        return cache

    @contextmanager
    def _end_on_error(self, streams: list[Stream], cache: RowCache | None = None) -> Iterator[None]:
        """If the block raises, end these requests as failed and release their memory.

        A failed step cannot be repeated: the drafter may already have read the committed tokens.
        """
        try:
            yield
        except BaseException:
            for stream in streams:
                stream.finish_reason = stream.finish_reason or "failed"
            if cache is not None:
                cache.keep_rows([])
            self._release_finished()
            raise

    def _has_blocks(self, streams: list[Stream]) -> bool:
        """Return whether the pool has enough blocks for all of these."""
        if self.pool is None:
            return True
        cache = self._state.cache if self._state else None
        num_used = sum(map(len, cache.blocks)) if isinstance(cache, PagedKVCache) else 0
        return sum(stream.num_blocks for stream in streams) <= self.pool.num_free + num_used

    def _release_finished(self) -> None:
        """Drop finished rows and release their memory."""
        if (state := self._state) is None:
            return
        rows = [row for row, stream in enumerate(self.running) if stream.finish_reason is None]
        if not rows:
            state.cache.keep_rows([])
            self._state, self.running = None, []
        elif len(rows) < len(self.running):
            # in the order that moves the fewest rows: the last ones fill the gaps
            unfinished, last = {*rows}, iter([row for row in rows if row >= len(rows)])
            rows = [row if row in unfinished else next(last) for row in range(len(rows))]
            with self._end_on_error(self.running, state.cache):
                state.keep(rows)
            self.running = [self.running[row] for row in rows]

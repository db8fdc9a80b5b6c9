"""Continuous batching: requests enter and leave between steps, each with its own rules.

See docs/serve.md.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from specheads.base.cache import RowCache
from specheads.base.model import FrozenBase
from specheads.base.paged import BlockPool, PagedKVCache, PoolFullError
from specheads.core.drafter import Drafter, Head
from specheads.core.errors import InputError, require_integer
from specheads.core.machine import device_bytes
from specheads.decoding import accept
from specheads.decoding.loop import DecodingState, start, step
from specheads.decoding.request import Request, Stream, alike
from specheads.decoding.trees import policies
from specheads.decoding.trees.tuned import Tuned


def default_tree(drafter: Drafter, base: FrozenBase) -> policies.TreePolicy:
    """Return the head's tuned trees if they were measured on the same device type, else a chain.

    "Do not draft" is only used on the same device name and dtype: drafting may pay on another one.
    """
    tuned = drafter.tuned if isinstance(drafter, Head) else None
    if isinstance(tuned, Tuned) and tuned.machine.device == base.device.type:
        policy = tuned.policy()
        if policy.depth or tuned.fits(base.device, base.dtype):
            return policy
    return policies.chain(drafter.depth)


def drafted_by(
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
    if not policy.own_depth:
        return None, policy
    if drafter is None or policy.own_depth > drafter.depth:
        raise InputError(
            f"the tree has {policy.own_depth} levels but the head drafts "
            f"{drafter.depth if drafter else 0}; choose a shallower tree"
        )
    if 0 < drafter.drafted_size < policy.num_guesses:
        raise InputError(
            f"the tree takes {policy.num_guesses} guesses after a node, and the drafter knows "
            f"{drafter.drafted_size} tokens; lower its ranks or branches"
        )
    return drafter, policy


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
        timed: Whether steps synchronise so that their times are exact: see `loop.step`.

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
        timed: bool = False,
    ) -> None:
        weight = next(drafter.parameters(), None) if isinstance(drafter, Head) else None
        if weight is not None and (weight.dtype, weight.device) != (base.dtype, base.device):
            raise InputError(
                f"a head needs its base's dtype and device: {weight.dtype} on {weight.device} for "
                f"a base in {base.dtype} on {base.device}; load it with load_head(path, base)"
            )
        self.base, self.pool, self.timed = base, pool, timed
        self.max_batch = require_integer(max_batch, "max_batch", 1)
        self.acceptance = accept.acceptance_rule(acceptance)
        self.drafter, self.tree = drafted_by(drafter, tree, base)
        # typical acceptance samples nothing: it wants the likeliest guesses
        self.coupled = coupled and self.acceptance is not accept.typical_rule
        context = base.max_length
        length = context if max_length is None else require_integer(max_length, "max_length")
        self.max_length = min(length, context)
        # a row may exceed its limit by one draft, and its last step needs slots for a tree
        self._capacity = self.max_length + 2 * self.tree.num_nodes
        self.max_batch = max(1, min(self.max_batch, self._fitting()))
        self.waiting: list[Stream] = []
        """Requests that wait, in order of submission."""
        self.running: list[Stream] = []
        """The requests of the rows of the batch, in order of the rows."""
        self._state: DecodingState | None = None

    def _fitting(self) -> int:
        """Return how many rows fit into the memory of the device."""
        base, tree, number = self.base, self.tree, self.base.dtype.itemsize
        # rows that join are copied: memory briefly has all of them twice
        row = 0 if self.pool is not None else 2 * self._capacity * base.slot_bytes
        # mask, ancestors, and logits of base and drafter of each node
        logits = base.vocab_size + (self.drafter.drafted_size if self.drafter else 0)
        node = (self.max_length + tree.num_nodes + logits) * number + tree.num_nodes
        return int(device_bytes(base.device) / (row + tree.num_nodes * node))

    def submit(self, request: Request) -> Stream:
        """Append a request to the queue; raise a ValueError if it can never be decoded."""
        length, vocab = len(request.prompt), len(self.base.embedding)
        if (largest := max(request.prompt)) >= vocab:
            raise InputError(
                f"token ids must be below {vocab}, got {largest}; use this base's own tokenizer"
            )
        if pictured := self.base.media_ids.keys() & {*request.prompt}:
            token = min(pictured)
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
        drafted = self.drafter.max_length if self.drafter else None
        if drafted is not None and length + limit > drafted:
            raise InputError(
                f"prompt and new tokens must fit the context of the draft model: {length} + "
                f"{limit} exceed {drafted}; choose another draft model, or ask for less"
            )
        size, nodes, needed = length + limit, self.tree.num_nodes, 0
        if self.pool is not None:
            needed = self.pool.blocks_for(size + nodes)
            if needed > self.pool.num_blocks:
                raise InputError(
                    f"a request must fit the pool: {size} tokens and a tree of {nodes} need "
                    f"{needed} blocks of {self.pool.num_blocks}; ask for less or allocate more"
                )
        stream = Stream(request, self, limit, needed)
        if stream.finish_reason is None:
            self.waiting.append(stream)
        return stream

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
            tree = self.tree.of_step(self.running)
            with self._failing(self.running, state.cache):
                steps = step(
                    self.base, self.drafter, tree, self.acceptance, state, timed=self.timed
                )
                for stream, taken in zip(self.running, steps, strict=True):
                    stream.steps.append(taken)
                    stream.take(taken.tokens)
            self._let_go()
        return bool(self.running or self.waiting)

    def cancel(self, stream: Stream) -> None:
        """Cancel a waiting or running request and release its memory; ignore one that is done."""
        if stream.finish_reason is None:
            stream.finish_reason = "cancelled"
            if stream in self.waiting:
                self.waiting.remove(stream)
            self._let_go()

    def _admit(self) -> None:
        """Move waiting requests that fit into the batch."""
        newcomers: list[Stream] = []
        for stream in self.waiting:
            served = [*self.running, *newcomers]
            if len(served) == self.max_batch or not self._has_blocks([*served, stream]):
                break
            newcomers.append(stream)
        if self.waiting and not self.running and not newcomers:
            raise PoolFullError("others hold the pool's blocks; give an engine its own pool")
        for places in alike([len(stream.request.prompt) for stream in newcomers]):
            self._start([newcomers[place] for place in places])
        self._let_go()

    def _start(self, streams: list[Stream]) -> None:
        """Read the prompts of these waiting requests, decode their first tokens, and join them."""
        for stream in streams:
            self.waiting.remove(stream)
        prompts = [stream.request.prompt for stream in streams]
        sampling = [stream.request.sampling for stream in streams]
        with self._failing(streams):
            cache = self._cache(len(streams))
        with self._failing(streams, cache):
            state, first = start(
                self.base, self.drafter, prompts, self._capacity, sampling, cache, self.coupled
            )
            for stream, token in zip(streams, first, strict=True):
                stream.take([token])
        self.running += streams
        if self._state is None:
            self._state = state
            return
        with self._failing(self.running, self._state.cache):
            self._state.join(state)

    def _cache(self, batch: int) -> RowCache:
        """Return an empty cache with `batch` rows."""
        if self.pool is not None:
            return PagedKVCache(self.pool, batch)
        cache = self.base.cache(batch, self._capacity)
        # otherwise every join would copy all rows
        cache.room = self.max_batch
        return cache

    @contextmanager
    def _failing(self, streams: list[Stream], cache: RowCache | None = None) -> Iterator[None]:
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
            self._let_go()
            raise

    def _has_blocks(self, served: list[Stream]) -> bool:
        """Return whether the pool has enough blocks for all of these."""
        if self.pool is None:
            return True
        cache = self._state.cache if self._state else None
        held = sum(map(len, cache.blocks)) if isinstance(cache, PagedKVCache) else 0
        return sum(stream.num_blocks for stream in served) <= self.pool.num_free + held

    def _let_go(self) -> None:
        """Drop finished rows and release their memory."""
        if (state := self._state) is None:
            return
        kept = [row for row, one in enumerate(self.running) if one.finish_reason is None]
        if not kept:
            state.cache.keep_rows([])
            self._state, self.running = None, []
        elif len(kept) < len(self.running):
            # in the order that moves the fewest rows: the last ones fill the gaps
            stay, last = {*kept}, iter([row for row in kept if row >= len(kept)])
            kept = [row if row in stay else next(last) for row in range(len(kept))]
            with self._failing(self.running, state.cache):
                state.keep(kept)
            self.running = [self.running[row] for row in kept]

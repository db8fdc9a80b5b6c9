"""Continuous batching: requests enter and leave between steps, each with its own rules.

See docs/serve.md.
"""

import itertools
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from specheads.base.cache import RowCache
from specheads.base.model import FrozenBase
from specheads.base.paged import BlockPool, PagedKVCache, PoolFullError
from specheads.core.bounds import device_bytes, refuse_bytes, whole
from specheads.core.drafter import Drafter, Head
from specheads.core.errors import InputError
from specheads.decoding import accept
from specheads.decoding.loop import DecodingState, start, step
from specheads.decoding.request import Request, Stream, alike, refuse_unknown
from specheads.decoding.trees import policies
from specheads.decoding.trees.hybrid import Hybrid, beside_lookup
from specheads.decoding.trees.tuned import Tuned


def refuse_elsewhere(head: Head, base: FrozenBase) -> None:
    """Refuse a head that lies on another device than its base, or computes in another dtype."""
    parameter = next(head.parameters(), None)
    if parameter is not None and (parameter.dtype, parameter.device) != (base.dtype, base.device):
        raise InputError(
            f"a head decodes in its base's dtype and on its device, got {parameter.dtype} on "
            f"{parameter.device} beside {base.dtype} on {base.device}; load it with "
            "load_head(path, base)"
        )


def default_tree(drafter: Drafter, base: FrozenBase) -> policies.TreePolicy:
    """Return the head's tuned trees where they were measured on such a device, or a chain.

    Another processor or precision may pay for what did not pay there: none is no answer here.
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
    """Return who drafts and how drafts grow, but for a tree deeper or wider than can be drafted.

    A tree with copied text has prompt lookup beside the drafter; one that drafts nothing, as is
    best for some tuned heads, has no drafter, which then need not remember the text either.
    """
    if drafter is None:
        return None, policies.NOTHING
    policy = default_tree(drafter, base) if tree is None else tree
    if not isinstance(policy, policies.TreePolicy):
        raise InputError(f"a tree is a TreePolicy, such as policies.chain(3), got {tree!r:.80}")
    if not policy.depth:
        return None, policy
    drafter = beside_lookup(drafter, policy, base)
    held = [(policy.depth, drafter)]
    if policy.copied and isinstance(drafter, Hybrid):
        held.append((policy.own_depth, drafter.head))
    for levels, by in held:
        if levels > by.depth:
            raise InputError(
                f"the tree has {levels} levels but the head drafts {by.depth}; "
                "choose a shallower tree"
            )
    if 0 < drafter.drafted_size < policy.num_guesses:
        raise InputError(
            f"the tree takes {policy.num_guesses} guesses after a node, and the drafter knows "
            f"{drafter.drafted_size} tokens; lower its ranks or branches"
        )
    return drafter, policy


def refuse_larger(
    base: FrozenBase,
    drafter: Drafter | None,
    tree: policies.TreePolicy,
    batch: int,
    length: int,
    slots: int,
) -> None:
    """Refuse what one step of so many rows, and their cache of so many slots, cannot fit."""
    nodes, number = tree.num_nodes, base.dtype.itemsize
    # of each node its mask, its logits and whom it has above; of the drafter one level's logits
    step = nodes * ((length + nodes) * number + base.vocab_size * number + nodes)
    step += tree.num_answers * (drafter.drafted_size if drafter else 0) * number
    refuse_bytes(
        batch * step + slots * base.slot_bytes,
        base.device,
        f"a batch of {batch:.4g} rows of {length:.4g} tokens with trees of {nodes} nodes",
        "lower max_batch, max_length (or max_new_tokens) or the tree's nodes, or take a pool",
    )


@dataclass(slots=True)
class _Batch:
    """Rows that are decoded together."""

    state: DecodingState
    streams: list[Stream]


class Engine:
    """Decodes any number of requests, some at a time, each as if it were alone.

    Not for several threads: whoever steps it, or iterates over a stream, drives it for all.

    Base, drafter, tree and acceptance are as for `generate`. A head's tuned trees follow batch and
    context from step to step.

    Args:
        max_batch: Rows decoded together; further requests wait. Contiguous rows are fewer where
            memory holds no more.
        max_length: Longest text, prompt and new tokens together; None is the base's context.
            Contiguous rows and a drafter's memory are as long from the start.
        pool: Where keys and values lie, this engine's own; None is contiguous rows. A request is
            admitted once the pool can hold all that it may come to need, and waits until then.
        coupled: Whether drafts see the noise that the base draws with: see `generate`.
        timed: Whether steps wait for the device so that their times are true: see `loop.step`.

    Raises:
        ValueError: The tree is deeper or wider than the drafter drafts, a setting is out of range,
            what a step needs exceeds the memory, or a head computes in another dtype or on another
            device than the base.
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
        max_batch = whole(max_batch, "max_batch", 1)
        if isinstance(drafter, Head):
            refuse_elsewhere(drafter, base)
        self.base, self.max_batch, self.pool = base, max_batch, pool
        self.acceptance = (
            accept.acceptance_rule(acceptance) if isinstance(acceptance, str) else acceptance
        )
        self.drafter, self.tree = drafted_by(drafter, tree, base)
        self.timed = timed
        # what draws nothing keeps the likeliest guesses, not those that noise favours
        self.coupled = coupled and self.acceptance is not accept.typical_rule
        context = base.max_length
        asked = context if max_length is None else whole(max_length, "max_length")
        self.max_length = min(asked, context)
        # a row may overshoot its limit by one draft, and the tree of its last step needs slots too
        self._capacity = self.max_length + 2 * self.tree.num_nodes
        # rows as long as the whole context are counted as they come: seldom are there as many
        rows = 1 if max_length is None else max_batch
        slots = 0 if pool is not None else rows * self._capacity
        refuse_larger(base, self.drafter, self.tree, rows, self.max_length, slots)
        if pool is None:
            # rows that join are copied: for a moment memory holds all of them twice
            fitting = device_bytes(base.device) / (2 * self._capacity * base.slot_bytes)
            self.max_batch = max(1, int(min(max_batch, fitting)))
        self._numbers = itertools.count()
        self._waiting: deque[Stream] = deque()
        self._batch: _Batch | None = None

    @property
    def running(self) -> list[Stream]:
        """Requests that are being decoded."""
        streams = self._batch.streams if self._batch else []
        return sorted(streams, key=lambda stream: stream.number)

    @property
    def waiting(self) -> list[Stream]:
        """Requests that are not yet, first come first."""
        return list(self._waiting)

    def submit(self, request: Request) -> Stream:
        """Put a request at the end of the queue; it is decoded by the steps that follow.

        Raises:
            ValueError: It can never be decoded: its prompt is longer than the context or has ids
                beyond the vocabulary, it needs more blocks than the pool has, or it names stop
                strings to a base without a tokenizer. The engine is as it was.
        """
        if not isinstance(request, Request):
            raise InputError(f"submit takes a Request(prompt=...), got {request!r:.80}")
        refuse_unknown(self.base, request.prompt, "its prompt")
        length = len(request.prompt)
        if length > self.max_length:
            raise InputError(
                f"a prompt must fit the context: {length} tokens exceed {self.max_length}; "
                "shorten it"
            )
        if request.stop and self.base.tokenizer is None:
            raise InputError(
                f"stop strings need a base with a tokenizer, and {self.base.name!r} has none; "
                "name eos_ids instead"
            )
        limit = min(request.max_new_tokens, self.max_length - length)
        needed = self._blocks(length + limit)
        stream = Stream(
            request,
            self.base,
            next(self._numbers),
            limit,
            needed,
            advance=self.step,
            leave=self.cancel,
        )
        if stream.finish_reason is None:
            self._waiting.append(stream)
        return stream

    def _blocks(self, length: int) -> int:
        """Return how many blocks a text of this length needs, the tree of its last step too."""
        if self.pool is None:
            return 0
        needed = self.pool.blocks_for(length + self.tree.num_nodes)
        if needed > self.pool.num_blocks:
            raise InputError(
                f"a request must fit the pool: {length} tokens and a tree of "
                f"{self.tree.num_nodes} need {needed} blocks of {self.pool.num_blocks}; ask for "
                "fewer tokens or allocate more blocks"
            )
        return needed

    def run(self) -> None:
        """Decode until no request is left."""
        while self.step():
            pass

    def step(self) -> bool:
        """Admit who fits, decode one step for everybody; return whether any request is left.

        What base, drafter or tokenizer raise goes to the caller; the requests it was raised for
        end as failed and give back what they hold, and the others go on with the next step.
        """
        self._admit()
        if (batch := self._batch) is not None:
            tree, rule, state = self.tree.of_step(batch.streams), self.acceptance, batch.state
            with self._failing(batch.streams, state.cache):
                steps = step(self.base, self.drafter, tree, rule, state, timed=self.timed)
                for stream, taken in zip(batch.streams, steps, strict=True):
                    stream.steps.append(taken)
                    stream.take(taken.tokens)
            self._let_go()
        return bool(self._batch or self._waiting)

    def cancel(self, stream: Stream) -> None:
        """Let go of a request, whether it is waiting or running; nothing where it is done."""
        if stream.finish_reason is None:
            stream.finish_reason = "cancelled"
            if stream in self._waiting:
                self._waiting.remove(stream)
            self._let_go()

    def _admit(self) -> None:
        """Read the prompts of those who are next and fit."""
        if not self._waiting:
            return
        served, newcomers = self.running, []
        for stream in self._waiting:
            if len(served) + len(newcomers) == self.max_batch:
                break
            if not self._has_blocks([*served, *newcomers, stream]):
                break
            newcomers.append(stream)
        if not served and not newcomers:
            raise PoolFullError("others hold the pool's blocks; give an engine its own pool")
        for places in alike([len(stream.request.prompt) for stream in newcomers]):
            self._start([newcomers[place] for place in places])
        self._let_go()

    def _start(self, streams: list[Stream]) -> None:
        """Read the prompts of these, who were waiting, and give each its first token."""
        for stream in streams:
            self._waiting.remove(stream)
        prompts = [stream.request.prompt for stream in streams]
        sampling = [stream.request.sampling for stream in streams]
        numbers = [stream.number for stream in streams]
        with self._failing(streams):
            cache = self._cache(len(streams))
        with self._failing(streams, cache):
            state, first = start(
                self.base,
                self.drafter,
                prompts,
                self._capacity,
                sampling,
                cache,
                numbers,
                coupled=self.coupled,
            )
            for stream, token in zip(streams, first, strict=True):
                stream.take([token])
        self._join(_Batch(state, streams))

    def _cache(self, batch: int) -> RowCache:
        """Return an empty cache of so many newcomers."""
        if self.pool is not None:
            return PagedKVCache(self.pool, batch)
        cache = self.base.cache(batch, self._capacity)
        # or every batch that joins would copy all that are there
        cache.room = self.max_batch
        return cache

    def _join(self, newcomers: _Batch) -> None:
        """Decode these rows with the others from now on."""
        if (batch := self._batch) is None:
            self._batch = newcomers
            return
        batch.streams += newcomers.streams
        with self._failing(batch.streams, batch.state.cache):
            batch.state.join(newcomers.state)

    @contextmanager
    def _failing(self, streams: list[Stream], cache: RowCache | None = None) -> Iterator[None]:
        """End these requests, and give back what they hold, where what is done for them raises.

        A step that was not taken to its end cannot be taken again: the drafter may have read
        what was committed already.
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
        """Return whether the pool has what all of these may come to need."""
        if self.pool is None:
            return True
        cache = self._batch.state.cache if self._batch else None
        held = sum(map(len, cache.blocks)) if isinstance(cache, PagedKVCache) else 0
        return sum(stream.num_blocks for stream in served) <= self.pool.num_free + held

    def _let_go(self) -> None:
        """Forget the rows that are done; give back what they held."""
        if (batch := self._batch) is None:
            return
        kept = [row for row, one in enumerate(batch.streams) if one.finish_reason is None]
        if not kept:
            batch.state.cache.keep_rows([])
            self._batch = None
        elif len(kept) < len(batch.streams):
            kept = _closed_up(kept)
            with self._failing(batch.streams, batch.state.cache):
                batch.state.keep(kept)
            batch.streams = [batch.streams[row] for row in kept]


def _closed_up(rows: list[int]) -> list[int]:
    """Return rows in the order in which as few as can be move: the last take the places left."""
    stay = set(rows)
    last = iter([row for row in rows if row >= len(rows)])
    return [place if place in stay else next(last) for place in range(len(rows))]

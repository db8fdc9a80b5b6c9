"""This package's own decoding: continuous batching, drafting with a head where there is one."""

from collections.abc import Callable, Iterator

from specheads.base.model import FrozenBase
from specheads.base.paged import BlockPool
from specheads.core.drafter import Head
from specheads.decoding.engine import Engine
from specheads.decoding.request import Request, Stream
from specheads.training.distill.engine import Answer, Ask, Writing

REFILL = 8
"""New texts wait until this share of the batch is free (an eighth): reading their prompts together
costs little more than reading one."""

POOLED_TOKENS = 1024
"""Tokens a text for which a pool has room, where texts may be longer than rows of their own."""


def build(how: Writing) -> "Local":
    """Return an engine around the base that is loaded."""
    assert how.base is not None
    return Local(how.base, how.head, how.batch_size, how.max_length)


class Local:
    """Has the base write here.

    What it writes follows from each ask alone, up to ties in rounding: neither the batch nor the
    head decides it, since acceptance is `match`.

    Args:
        base: Author.
        head: Drafter; None decodes with the base alone.
        batch_size: Texts decoded together.
        max_length: Tokens of the longest text, for which every row then has room; where it is zero
            they are not known, and rows take blocks of a pool as they grow.
    """

    def __init__(
        self, base: FrozenBase, head: Head | None, batch_size: int, max_length: int = 0
    ) -> None:
        self._base, self._head, self._batch_size = base, head, batch_size
        self._max_length = min(max_length or base.max_length, base.max_length)
        self._rows = bool(max_length)

    def answers(self, pull: Callable[[], Ask | None]) -> Iterator[Answer]:
        """Yield answers as they come, until nothing is asked and nothing in flight."""
        pool = None if self._rows else self._pool()
        engine = Engine(
            self._base,
            self._head,
            max_batch=self._batch_size,
            max_length=self._max_length,
            pool=pool,
        )
        running: dict[Stream, Ask] = {}
        refill = max(1, self._batch_size // REFILL)
        try:
            while True:
                if not running or self._batch_size - len(running) >= refill:
                    while len(running) < self._batch_size and (ask := pull()) is not None:
                        request = Request(
                            prompt=ask.tokens, max_new_tokens=ask.new_tokens, sampling=ask.sampling
                        )
                        running[engine.submit(request)] = ask
                if not running:
                    return
                engine.step()
                for stream in [one for one in running if one.finish_reason is not None]:
                    number = running.pop(stream).number
                    finish = "eos" if stream.finish_reason == "eos" else "length"
                    yield Answer(number, stream.tokens, finish)
        finally:
            for stream in running:
                stream.cancel()

    def _pool(self) -> BlockPool:
        """Return room for a batch of common texts, or for one that is as long as it may be."""
        common = min(self._max_length, POOLED_TOKENS)
        slots = max(self._batch_size * common, self._max_length) + 4096
        return self._base.pool(-(-slots // 16))

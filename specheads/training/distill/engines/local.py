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

COMMON_TOKENS = 1024
"""Tokens a text for which there is room where their lengths are not known: a row of its own on a
processor, as much of a pool elsewhere."""


def build(how: Writing) -> "Local":
    """Return an engine around the base that is loaded."""
    return Local(how.base, how.head, how.batch_size, how.max_length)


class Local:
    """Has the base write here.

    What it writes follows from each ask alone, up to ties in rounding: neither the batch nor the
    head decides it, since acceptance is `match`.

    Args:
        base: Author.
        head: Drafter; None decodes with the base alone.
        batch_size: Texts decoded together.
        max_length: Tokens of the longest text, for which every row then has room; zero where they
            are not known. Texts that may grow beyond their row take blocks of a pool.
    """

    def __init__(
        self, base: FrozenBase, head: Head | None, batch_size: int, max_length: int = 0
    ) -> None:
        self._base, self._head, self._batch_size = base, head, batch_size
        common = COMMON_TOKENS if base.device.type == "cpu" else 0
        self._row_tokens = min(max_length or common, base.max_length)

    def answers(self, pull: Callable[[], Ask | None]) -> Iterator[Answer]:
        """Yield answers as they come, until nothing is asked and nothing in flight."""
        engines: dict[bool, Engine] = {}
        running: dict[Stream, Ask] = {}
        refill = max(1, self._batch_size // REFILL)
        try:
            while True:
                if not running or self._batch_size - len(running) >= refill:
                    while len(running) < self._batch_size and (ask := pull()) is not None:
                        pooled = len(ask.tokens) + ask.new_tokens > self._row_tokens
                        if pooled not in engines:
                            engines[pooled] = self._engine(pooled)
                        request = Request(
                            prompt=ask.tokens, max_new_tokens=ask.new_tokens, sampling=ask.sampling
                        )
                        running[engines[pooled].submit(request)] = ask
                if not running:
                    return
                for engine in engines.values():
                    engine.step()
                for stream in [one for one in running if one.finish_reason is not None]:
                    number = running.pop(stream).number
                    finish = "eos" if stream.finish_reason == "eos" else "length"
                    yield Answer(number, stream.tokens, finish)
        finally:
            for stream in running:
                stream.cancel()

    def _engine(self, pooled: bool) -> Engine:
        """Return an engine of rows, or of blocks for what is longer than a row."""
        return Engine(
            self._base,
            self._head,
            max_batch=self._batch_size,
            max_length=self._base.max_length if pooled else self._row_tokens,
            pool=self._pool() if pooled else None,
        )

    def _pool(self) -> BlockPool:
        """Return room for a batch of common texts, or for one that is as long as it may be."""
        common = min(self._base.max_length, COMMON_TOKENS)
        slots = max(self._batch_size * common, self._base.max_length) + 4096
        return self._base.pool(-(-slots // 16))

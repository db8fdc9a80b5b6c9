"""Text engine of this package: continuous batching, with an optional drafter."""

from collections.abc import Callable, Iterator

from specheads.base.model import FrozenBase
from specheads.base.paged import BlockPool
from specheads.core.drafter import Head
from specheads.decoding.engine import Engine
from specheads.decoding.request import Request, Stream
from specheads.training.distill.engine import Answer, EngineOptions, GenerationRequest

REFILL = 8
"""New texts wait until an eighth of the batch is free, because a joint prefill is cheaper."""

COMMON_TOKENS = 1024
"""Tokens reserved per text of unknown length: as a row on a CPU, in the pool on a GPU."""


def build(options: EngineOptions) -> "Local":
    """Return an engine with the loaded base."""
    return Local(options.base, options.head, options.batch_size, options.max_length)


class Local:
    """Generates text with the loaded base.

    A text depends on its request only, up to ties in rounding: acceptance is `match`, so it
    does not depend on batch and head.

    Args:
        base: The base.
        head: Drafter; None decodes with the base alone.
        batch_size: Texts decoded together.
        max_length: Maximum tokens of a text, which sets the row length; zero if not known. Longer
            texts use blocks of a pool.
    """

    def __init__(
        self, base: FrozenBase, head: Head | None, batch_size: int, max_length: int = 0
    ) -> None:
        self._base, self._head, self._batch_size = base, head, batch_size
        common = COMMON_TOKENS if base.device.type == "cpu" else 0
        self._row_tokens = min(max_length or common, base.max_length)

    def answers(self, pull: Callable[[], GenerationRequest | None]) -> Iterator[Answer]:
        """Yield answers, as `TextEngine.answers`."""
        engines: dict[bool, Engine] = {}
        running: dict[Stream, GenerationRequest] = {}
        refill = max(1, self._batch_size // REFILL)
        try:
            while True:
                if not running or self._batch_size - len(running) >= refill:
                    while len(running) < self._batch_size and (request := pull()) is not None:
                        pooled = len(request.tokens) + request.new_tokens > self._row_tokens
                        if pooled not in engines:
                            engines[pooled] = self._engine(pooled)
                        own = Request(
                            prompt=request.tokens,
                            max_new_tokens=request.new_tokens,
                            sampling=request.sampling,
                        )
                        running[engines[pooled].submit(own)] = request
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
        """Return an engine with rows, or with a pool for longer texts."""
        return Engine(
            self._base,
            self._head,
            max_batch=self._batch_size,
            max_length=self._base.max_length if pooled else self._row_tokens,
            pool=self._pool() if pooled else None,
        )

    def _pool(self) -> BlockPool:
        """Return a pool for a batch of common texts, or for one of maximum length."""
        common = min(self._base.max_length, COMMON_TOKENS)
        slots = max(self._batch_size * common, self._base.max_length) + 4096
        return self._base.pool(-(-slots // 16))

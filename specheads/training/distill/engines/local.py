"""Text engine of this package: continuous batching, with an optional drafter."""

from collections.abc import Generator
from functools import partial

from specheads.base.model import FrozenBase
from specheads.core.drafter import Head
from specheads.decoding.engine import Engine
from specheads.decoding.request import Request, Stream
from specheads.training.distill.engines import Answer, GenerationRequest, Pull, TextEngine
from specheads.training.settings import Distill

REFILL = 8
"""New texts wait until an eighth of the batch is free, because a joint prefill is cheaper."""
COMMON_TOKENS = 1024
"""Tokens reserved for each text of unknown length, in a pool that all texts share."""


def build(
    settings: Distill, base: FrozenBase, head: Head | None = None, max_length: int = 0
) -> TextEngine:
    """Return an engine with the loaded base and an optional drafter.

    A text depends on its request only, up to ties in rounding: acceptance is `match`, so it does
    not depend on batch and head.
    """
    return partial(_answers, settings.batch_size, base, head, max_length)


def _answers(
    batch_size: int, base: FrozenBase, head: Head | None, max_length: int, pull: Pull
) -> Generator[Answer, None, None]:
    pool = None
    if not max_length:
        # enough for a batch of common texts, or for one of maximum length
        common = batch_size * min(base.max_length, COMMON_TOKENS)
        pool = base.pool(-(-max(common, base.max_length) // 16) + 256)
    length = min(max_length or base.max_length, base.max_length)
    engine = Engine(base, head, max_batch=batch_size, max_length=length, pool=pool)
    running: dict[Stream, GenerationRequest] = {}
    refill = max(1, batch_size // REFILL)
    try:
        while True:
            if not running or batch_size - len(running) >= refill:
                while len(running) < batch_size and (request := pull()) is not None:
                    own = Request(
                        prompt=request.tokens,
                        max_new_tokens=request.new_tokens,
                        sampling=request.sampling,
                    )
                    running[engine.submit(own)] = request
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

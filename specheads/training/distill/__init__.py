"""Text that the base of a head generates, for its distilled phases."""

from functools import partial

from specheads.base.ends import BaseEnds
from specheads.base.model import FrozenBase
from specheads.config.training import DistillSettings
from specheads.core.drafter import Head
from specheads.training.distill import engines


def build_engine(
    settings: DistillSettings, base: BaseEnds, head: Head | None = None, max_length: int = 0
) -> engines.TextEngine:
    """Build the engine of the settings.

    `head` drafts for the local engine. `max_length` is the maximum of tokens of prompt and answer;
    zero if only the context limits them.
    """
    if settings.engine == "openai":
        # loads the client of servers
        from specheads.training.distill.openai import CompletionsEngine

        return CompletionsEngine(settings, base).answers
    if settings.engine == "vllm":
        return engines.vllm_engine(settings.batch_size, base, max_length)
    assert isinstance(base, FrozenBase)
    return partial(engines.local_engine, settings.batch_size, base, head, max_length)

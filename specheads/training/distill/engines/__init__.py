"""Text engines: their requests and answers, and one module per engine with a function `build`."""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from importlib import import_module
from typing import Literal

from specheads.base.model import FrozenBase
from specheads.core.drafter import Head
from specheads.decoding.sampling import Sampling
from specheads.training.settings import Distill


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Request to continue one text."""

    number: int
    """Number of the request; the answer has the same."""
    tokens: list[int]
    """Token ids of the prompt."""
    new_tokens: int
    """Maximum number of new tokens, at least one; they fit the base's context."""
    sampling: Sampling
    """Sampling settings with the seed of this request."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Generated tokens."""

    number: int
    tokens: list[int]
    """New tokens, including an end-of-text token."""
    finish: Literal["eos", "length"]
    """eos if the base ended the text, length if it reached the limit."""


Pull = Callable[[], GenerationRequest | None]
"""Returns the next request, or None if no request is ready: it may depend on an answer that is
yielded first."""
TextEngine = Callable[[Pull], Generator[Answer, None, None]]
"""Yields answers in any order, until no request is left and none is in flight. Closing the
generator cancels the requests in flight."""


def build(
    settings: Distill, base: FrozenBase, head: Head | None = None, max_length: int = 0
) -> TextEngine:
    """Build the engine of the settings.

    Args:
        settings: Settings of generation.
        base: The loaded base.
        head: Drafter of the local engine.
        max_length: Maximum tokens of prompt and answer; zero if only the context limits
            them.
    """
    module = import_module(f"specheads.training.distill.engines.{settings.engine}")
    return module.build(settings, base, head, max_length)

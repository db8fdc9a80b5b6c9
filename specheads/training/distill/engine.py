"""Interface of the text engines: requests and answers."""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Literal

from specheads.decoding.sampling import Sampling


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

"""Interface of the text engines: requests, answers and options."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from specheads.base.model import FrozenBase
from specheads.core.drafter import Head
from specheads.decoding.sampling import Sampling

Finish = Literal["eos", "length"]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Request to continue one text."""

    number: int
    """Number of the request; the answer has the same."""
    tokens: list[int]
    """Token ids of the prompt."""
    new_tokens: int
    """Maximum number of new tokens."""
    sampling: Sampling
    """Sampling settings with the seed of this request."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Generated tokens."""

    number: int
    tokens: list[int]
    """New tokens, including an end-of-text token."""
    finish: Finish
    """eos if the base ended the text, length if it reached the limit."""


@runtime_checkable
class TextEngine(Protocol):
    """Generates several texts at a time."""

    def answers(self, pull: Callable[[], GenerationRequest | None]) -> Iterator[Answer]:
        """Yield answers in any order, until no request is left and none is in flight.

        `pull` returns the next request, or None if no request is ready: the next request may depend
        on an answer that is yielded first. Closing the iterator
        cancels the requests in flight.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options of all engines; each engine uses some of them."""

    model: str
    """Folder or id of the model that the engine loads or requests."""
    base: FrozenBase
    """The same model, loaded here."""
    head: Head | None = None
    """Drafter of the local engine."""
    batch_size: int = 64
    """Number of texts in flight."""
    url: str = ""
    """URL of a server, such as http://127.0.0.1:8000/v1."""
    api_key_env: str = ""
    """Environment variable with the server's API key; empty sends none."""
    timeout_seconds: float = 120.0
    """Timeout of one request to a server."""
    retries: int = 5
    """Number of retries of a failed request."""
    max_length: int = 0
    """Maximum tokens of prompt and answer; zero is the base's context."""
    dtype: str = "auto"
    """Dtype of the weights, if the engine loads them."""

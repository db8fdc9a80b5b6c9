"""The contract between what is asked of the base and whoever has it answer."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from specheads.base.model import FrozenBase
from specheads.core.drafter import Head
from specheads.decoding.sampling import Sampling

Finish = Literal["eos", "length"]


@dataclass(frozen=True, slots=True)
class Ask:
    """One text to continue."""

    number: int
    """Its place among all that are asked; an answer carries it back."""
    tokens: list[int]
    """What the base has read."""
    new_tokens: int
    """Most tokens that it may write."""
    sampling: Sampling
    """How they are chosen, with a seed of this ask's own."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the base wrote."""

    number: int
    tokens: list[int]
    """Its tokens, one that ends the text included."""
    finish: Finish
    """eos where it ended the text itself, length where the limit did."""


@runtime_checkable
class Engine(Protocol):
    """Has the base write, several texts at a time."""

    def answers(self, pull: Callable[[], Ask | None]) -> Iterator[Answer]:
        """Yield answers as they come, in any order, until nothing is asked and nothing in flight.

        `pull` is called whenever there is room for another ask, and gives None where there is none
        just now: what is asked next may depend on an answer that is yielded first. Closing the
        iterator lets go of what is in flight.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """What an engine may need to have a base write; each takes what it has a use for."""

    model: str
    """Folder or id that the engine loads or asks for."""
    base: FrozenBase
    """The same, loaded here; of engines with weights of their own it says what they write with."""
    head: Head | None = None
    """Drafter for the engine that can use one."""
    batch_size: int = 64
    """Texts in flight at once."""
    url: str = ""
    """Address of a server, such as http://127.0.0.1:8000/v1."""
    api_key_env: str = ""
    """Environment variable that holds the server's key; empty sends none."""
    timeout_seconds: float = 120.0
    """Longest wait for one answer of a server."""
    retries: int = 5
    """Times that a server is asked again, ever later, before the text is given up."""
    max_length: int = 0
    """Longest text, what is read and what is written together; zero is the base's context."""
    dtype: str = "auto"
    """Precision of the weights, where the engine loads them."""

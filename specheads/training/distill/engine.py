"""The contract between what is asked of the base and whoever has it answer."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from specheads.decoding.acceptance.sampling import Sampling

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


class Engine(Protocol):
    """Has the base write, several texts at a time."""

    def answers(self, pull: Callable[[], Ask | None]) -> Iterator[Answer]:
        """Yield answers as they come, in any order, until nothing is asked and nothing in flight.

        `pull` is called whenever there is room for another ask, and gives None where there is none
        just now: what is asked next may depend on an answer that is yielded first. Closing the
        iterator lets go of what is in flight.
        """
        ...

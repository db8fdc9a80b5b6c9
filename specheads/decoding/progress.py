"""What a choice for each step may know of the requests that it is taken for."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Row(Protocol):
    """A request that a step is to be taken for."""

    @property
    def length(self) -> int:
        """Tokens of its text so far, prompt included."""
        ...

    @property
    def room(self) -> int:
        """New tokens that it still takes."""
        ...


@runtime_checkable
class Progress(Row, Protocol):
    """A request and what was decoded of it."""

    @property
    def all_tokens(self) -> list[int]:
        """Its text so far."""
        ...

    @property
    def steps(self) -> Sequence[Any]:
        """Its `loop.Step`s so far."""
        ...

"""What drafters keep between steps: rows that stay, join, or lie scattered in an engine's cache."""

from typing import Any, NoReturn, Protocol, runtime_checkable

from jaxtyping import Int
from torch import Tensor

from specheads.core.errors import InputError


@runtime_checkable
class Memory(Protocol):
    """What a drafter keeps between steps (EAGLE's keys and values).

    It says itself how its rows stay, join and lie scattered: there is no default, since rows
    that silently stay what they were would draft from somebody else's text.
    """

    def keep(self, rows: Int[Tensor, " kept"]) -> "Memory":
        """Return the memory of these rows: finished requests leave the batch."""
        ...

    def join(self, other: Any) -> "Memory":
        """Return the memory of both batches' rows, those of `other` last: new requests join.

        Both come from `Drafter.memory` with the same capacity, and neither is used any more.
        """
        ...

    def scatter(
        self, places: Int[Tensor, "batch slot"], lengths: Int[Tensor, " batch"]
    ) -> "Memory":
        """Return rows whose positions lie anywhere in the only row of this memory.

        For engines that give each position of a text a slot of one large cache: what `begin`
        remembers of a scattered row is written there, and serves that one `begin` and what
        follows from it.

        Args:
            places: Slot in which each position lies.
            lengths: Number of positions of each row that are remembered already.

        Raises:
            ValueError: This memory cannot lie scattered.
        """
        ...


def refuse_scattering(
    memory: object, places: Int[Tensor, "batch slot"], lengths: Int[Tensor, " batch"]
) -> NoReturn:
    """Serve as `scatter` of a memory that needs rows of its own.

    Raises:
        ValueError: Always.
    """
    del places, lengths
    raise InputError(
        f"a {type(memory).__name__} keeps each row's text in a row of its own and cannot lie "
        "scattered in another engine's cache; draft with a head there"
    )

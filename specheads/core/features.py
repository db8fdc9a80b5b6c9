"""What the frozen base hands to a drafter."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn import functional as F  # noqa: N812


@dataclass(frozen=True, slots=True)
class Features:
    """What the frozen base computed at some positions: `hidden[:, t]` has read `tokens[:, t]`."""

    hidden: Float[Tensor, "batch time width"]
    """After the base's final norm, as its vocabulary projection receives it."""

    aux: Float[Tensor, "batch time aux"] | None = None
    """The residual streams a head names, concatenated (EAGLE-3)."""

    tokens: Int[Tensor, "batch time"] | None = None
    """What the base read there, for drafters that read text and not features."""

    def at(self, rows: Int[Tensor, "batch path"]) -> "Features":
        """Return the features of positions `rows[b]` of each row b."""

        def pick(values: Tensor) -> Tensor:
            return values.gather(1, rows[..., None].expand(-1, -1, values.shape[-1]))

        return Features(
            pick(self.hidden),
            None if self.aux is None else pick(self.aux),
            None if self.tokens is None else self.tokens.gather(1, rows),
        )

    def rows(self, index: Int[Tensor, " kept"]) -> "Features":
        """Return the features of these rows of the batch."""
        return Features(
            self.hidden[index],
            None if self.aux is None else self.aux[index],
            None if self.tokens is None else self.tokens[index],
        )

    @classmethod
    def consecutive(cls, pieces: Sequence["Features"]) -> "Features":
        """Return the features of consecutive positions of the same rows as one."""

        def join(values: list[Tensor | None]) -> Tensor | None:
            present = [value for value in values if value is not None]
            return torch.cat(present, dim=1) if present else None

        hidden = torch.cat([piece.hidden for piece in pieces], dim=1)
        aux, tokens = [piece.aux for piece in pieces], [piece.tokens for piece in pieces]
        return cls(hidden, join(aux), join(tokens))

    def join(self, other: "Features") -> "Features":
        """Return both batches as one, the own rows first; the shorter is padded on the right."""

        def both(own: Tensor | None, new: Tensor | None) -> Tensor | None:
            return None if own is None or new is None else stack_rows(own, new)

        hidden = stack_rows(self.hidden, other.hidden)
        return Features(hidden, both(self.aux, other.aux), both(self.tokens, other.tokens))


def stack_rows(
    own: Shaped[Tensor, "batch time *rest"], new: Shaped[Tensor, "row path *rest"]
) -> Shaped[Tensor, "slot level *rest"]:
    """Return the rows of both, the shorter ones padded on the right with zeros."""
    time = max(own.shape[1], new.shape[1])

    def padded(values: Tensor) -> Tensor:
        behind = [0, 0] * (values.ndim - 2) + [0, time - values.shape[1]]
        return F.pad(values, behind)

    return torch.cat([padded(own), padded(new)])

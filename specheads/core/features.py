"""Features: what the frozen base gives a drafter."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad

from specheads.core.machine import to_device


class Documents(NamedTuple):
    """The documents of packed rows, row by row, as attention within each of them reads them."""

    lengths: list[int]
    """Number of tokens of each document."""
    bounds: Int[Tensor, " bound"]
    """First position of each document and the end of the last one, on the device, in int32."""

    @classmethod
    def of(cls, places: Int[Tensor, "row time"]) -> "Documents":
        """Return the documents of rows, by the place of each position; this synchronises once.

        On the meta device a row is a document.
        """
        batch, time = places.shape
        lengths = [time] * batch if places.is_meta else document_lengths(places)
        bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return cls(lengths, to_device(bounds, places.device))


@dataclass(frozen=True, slots=True)
class Features:
    """Outputs of the frozen base at some positions: `hidden[:, t]` has read `tokens[:, t]`."""

    hidden: Float[Tensor, "batch time width"]
    """Final hidden states, after the base's final norm."""
    aux: Float[Tensor, "batch time aux"] | None = None
    """Residual streams after the layers that a head reads, concatenated (EAGLE-3)."""
    tokens: Int[Tensor, "batch time"] | None = None
    """Tokens at these positions, for drafters that read text instead of features."""
    document_ids: Int[Tensor, "batch time"] | None = None
    """Index of the document of each position within its row; None: each row is one text."""
    documents: Documents | None = None
    """The documents, if they are known already."""

    def places(self) -> Int[Tensor, "row time"]:
        """Return the position within its document of every position; one row if all are equal."""
        if self.document_ids is not None:
            return document_places(self.document_ids)
        return torch.arange(self.hidden.shape[1], device=self.hidden.device)[None]

    def visible(self) -> Bool[Tensor, "row time time"]:
        """Return which positions each position may attend to: its document up to itself."""
        if self.document_ids is not None:
            return within_documents(self.document_ids)
        places = self.places()
        return places[:, :, None] >= places[:, None]

    def at(self, rows: Int[Tensor, "batch path"]) -> "Features":
        """Return the features of positions `rows[b]` of each row b."""
        return self._picked((torch.arange(len(rows), device=rows.device)[:, None], rows))

    def rows(self, index: Int[Tensor, " kept"]) -> "Features":
        """Return the features of these rows of the batch."""
        return self._picked(index)

    def _picked(self, index: Tensor | tuple[Tensor, ...]) -> "Features":
        return Features.merged([self], lambda values: values[0][index])

    @classmethod
    def merged(
        cls, pieces: Sequence["Features"], merge: Callable[[list[Tensor]], Tensor]
    ) -> "Features":
        """Merge the tensors of several features; a tensor that any of them lacks is left out."""
        columns = ([getattr(one, name) for one in pieces] for name in ("hidden", "aux", "tokens"))
        found: list[Any] = [
            None if any(one is None for one in each) else merge(each) for each in columns
        ]
        return cls(*found)

    @classmethod
    def consecutive(cls, pieces: Sequence["Features"]) -> "Features":
        """Return the features of consecutive positions of the same rows as one."""
        return cls.merged(pieces, lambda values: torch.cat(values, dim=1))

    def join(self, other: "Features") -> "Features":
        """Concatenate two batches; shorter rows are padded on the right."""
        return Features.merged([self, other], lambda values: stack_rows(*values))


@dataclass(frozen=True, slots=True)
class Committed:
    """The positions that the last step added to each row, from which a draft starts."""

    features: Features
    """Features of the committed positions; rows are padded on the right."""
    next_tokens: Int[Tensor, "batch time"]
    """`next_tokens[:, t]` follows position t. The last one within `counts` is the root: the base
    chose this token and has not read it yet."""
    counts: Int[Tensor, " batch"]
    """Number of committed positions in each row, at least one; the rest is padding."""

    def root(self) -> Int[Tensor, "batch 1"]:
        """Return the token that every draft continues."""
        return self.last(self.next_tokens)

    def last(self, values: Shaped[Tensor, "batch time *rest"]) -> Shaped[Tensor, "batch 1 *rest"]:
        """Return the values at the last committed position of each row."""
        if values.shape[1] == 1:
            return values
        index = (self.counts - 1).view(-1, *[1] * (values.ndim - 1))
        return values.gather(1, index.expand(-1, 1, *values.shape[2:]))

    def hidden(self) -> Float[Tensor, "batch 1 width"]:
        """Return the hidden state at the last committed position of each row."""
        return self.last(self.features.hidden)

    def ending(self) -> "Committed":
        """Return only the last committed position of each row."""
        features = self.features.at(self.counts[:, None] - 1)
        return Committed(features, self.root(), torch.ones_like(self.counts))

    def then(self, later: "Committed") -> "Committed":
        """Append later positions to the earlier ones of each row."""
        width = self.next_tokens.shape[1]
        total = width + later.next_tokens.shape[1]
        slots = torch.arange(total, device=self.counts.device).expand(len(self.counts), -1)
        own = self.counts[:, None]
        places = torch.where(slots < own, slots, width + slots - own).clamp(max=total - 1)
        tokens = torch.cat([self.next_tokens, later.next_tokens], dim=1)
        return Committed(
            Features.consecutive([self.features, later.features]).at(places),
            tokens.gather(1, places),
            self.counts + later.counts,
        )

    def keep(self, rows: Int[Tensor, " kept"]) -> "Committed":
        """Return these rows only."""
        return Committed(self.features.rows(rows), self.next_tokens[rows], self.counts[rows])

    def join(self, other: "Committed") -> "Committed":
        """Concatenate two batches; shorter rows are padded on the right."""
        return Committed(
            self.features.join(other.features),
            stack_rows(self.next_tokens, other.next_tokens),
            torch.cat([self.counts, other.counts]),
        )


def document_places(document_ids: Int[Tensor, "batch time"]) -> Int[Tensor, "batch time"]:
    """Return the position within its document of each position of packed rows."""
    index = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(document_ids)
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    begins[:, 1:] = document_ids.diff(dim=1) != 0
    return index - index.where(begins, 0).cummax(1).values


def document_lengths(places: Int[Tensor, "row time"]) -> list[int]:
    """Return the length of each document of packed rows, given the positions within them."""
    begins = (places == 0).flatten().nonzero()[:, 0]
    return begins.diff(append=begins.new_tensor([places.numel()])).tolist()


def within_documents(document_ids: Int[Tensor, "batch time"]) -> Bool[Tensor, "batch time time"]:
    """Return the causal mask of packed rows: each position sees its document up to itself."""
    return (document_ids[:, :, None] == document_ids[:, None]).tril()


def stack_rows(
    own: Shaped[Tensor, "batch time *rest"], new: Shaped[Tensor, "row path *rest"]
) -> Shaped[Tensor, "slot level *rest"]:
    """Concatenate rows; the shorter ones are padded on the right with zeros."""
    width = max(own.shape[1], new.shape[1])
    rest = (0, 0) * (own.ndim - 2)
    return torch.cat([pad(one, (*rest, 0, width - one.shape[1])) for one in (own, new)])

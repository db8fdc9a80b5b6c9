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


class PackedDocuments(NamedTuple):
    """The documents of packed rows, row by row, as attention within each of them reads them."""

    lengths: list[int]
    """Number of tokens of each document."""
    bounds: Int[Tensor, " bound"]
    """First position of each document and the end of the last one, on the device, in int32."""

    @classmethod
    def of(cls, positions: Int[Tensor, "row time"]) -> "PackedDocuments":
        """Return the documents of rows, given positions within them; this synchronises once.

        On the meta device a row is a document.
        """
        batch, time = positions.shape
        lengths = [time] * batch if positions.is_meta else document_lengths(positions)
        bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return cls(lengths, to_device(bounds, positions.device))


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
    documents: PackedDocuments | None = None
    """The documents, if they are known already."""

    def positions(self) -> Int[Tensor, "row time"]:
        """Return the position within its document of every position; one row if all are equal."""
        if self.document_ids is not None:
            return document_positions(self.document_ids)
        return torch.arange(self.hidden.shape[1], device=self.hidden.device)[None]

    def causal_mask(self) -> Bool[Tensor, "row time time"]:
        """Return which positions each position may attend to: its document up to itself."""
        if self.document_ids is not None:
            return within_documents(self.document_ids)
        positions = self.positions()
        return positions[:, :, None] >= positions[:, None]

    def gather(self, positions: Int[Tensor, "batch path"]) -> "Features":
        """Return the features of positions `positions[b]` of each row b."""
        rows = torch.arange(len(positions), device=positions.device)
        return self.select((rows[:, None], positions))

    def is_finite(self) -> Bool[Tensor, ""]:
        """Return whether all hidden states and residual streams are finite."""
        is_finite = self.hidden.isfinite().all()
        return is_finite if self.aux is None else is_finite & self.aux.isfinite().all()

    def select_positions(self, mask: Bool[Tensor, "batch time"]) -> "Features":
        """Return the features of the positions in a mask, as one row."""
        return self.select(tuple(index[None] for index in mask.nonzero(as_tuple=True)))

    def select(self, index: Tensor | tuple[Tensor, ...]) -> "Features":
        """Return the features at an index of rows, or of rows and positions."""
        return Features.merge([self], lambda tensors: tensors[0][index])

    @classmethod
    def merge(
        cls, pieces: Sequence["Features"], merge_tensors: Callable[[list[Tensor]], Tensor]
    ) -> "Features":
        """Merge several features, tensor by tensor; one that any of them lacks is left out."""

        def merge_field(name: str) -> Any:
            tensors = [getattr(piece, name) for piece in pieces]
            return None if any(tensor is None for tensor in tensors) else merge_tensors(tensors)

        return cls(*map(merge_field, ("hidden", "aux", "tokens")))

    @classmethod
    def concatenate(cls, pieces: Sequence["Features"]) -> "Features":
        """Return the features of consecutive positions of the same rows as one."""
        return cls.merge(pieces, lambda tensors: torch.cat(tensors, dim=1))

    def join(self, other: "Features") -> "Features":
        """Concatenate two batches; shorter rows are padded on the right."""
        return Features.merge([self, other], lambda tensors: stack_rows(*tensors))


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
        return self.gather_last(self.next_tokens)

    def gather_last(
        self, values: Shaped[Tensor, "batch time *rest"]
    ) -> Shaped[Tensor, "batch 1 *rest"]:
        """Return the values at the last committed position of each row."""
        if values.shape[1] == 1:
            return values
        index = (self.counts - 1).view(-1, *[1] * (values.ndim - 1))
        return values.gather(1, index.expand(-1, 1, *values.shape[2:]))

    def last_hidden(self) -> Float[Tensor, "batch 1 width"]:
        """Return the hidden state at the last committed position of each row."""
        return self.gather_last(self.features.hidden)

    def last_positions(self) -> "Committed":
        """Return only the last committed position of each row."""
        features = self.features.gather(self.counts[:, None] - 1)
        return Committed(features, self.root(), torch.ones_like(self.counts))

    def append(self, later: "Committed") -> "Committed":
        """Append later positions to the earlier ones of each row."""
        width = self.next_tokens.shape[1]
        total = width + later.next_tokens.shape[1]
        columns = torch.arange(total, device=self.counts.device).expand(len(self.counts), -1)
        counts = self.counts[:, None]
        columns = torch.where(columns < counts, columns, width + columns - counts)
        columns = columns.clamp(max=total - 1)
        features = Features.concatenate([self.features, later.features]).gather(columns)
        tokens = torch.cat([self.next_tokens, later.next_tokens], dim=1).gather(1, columns)
        return Committed(features, tokens, self.counts + later.counts)

    def keep(self, rows: Int[Tensor, " kept"]) -> "Committed":
        """Return these rows only."""
        return Committed(self.features.select(rows), self.next_tokens[rows], self.counts[rows])

    def join(self, other: "Committed") -> "Committed":
        """Concatenate two batches; shorter rows are padded on the right."""
        tokens = stack_rows(self.next_tokens, other.next_tokens)
        counts = torch.cat([self.counts, other.counts])
        return Committed(self.features.join(other.features), tokens, counts)


def document_positions(document_ids: Int[Tensor, "batch time"]) -> Int[Tensor, "batch time"]:
    """Return the position within its document of each position of packed rows."""
    index = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(document_ids)
    is_start = torch.ones_like(document_ids, dtype=torch.bool)
    is_start[:, 1:] = document_ids.diff(dim=1) != 0
    return index - index.where(is_start, 0).cummax(1).values


def document_lengths(positions: Int[Tensor, "row time"]) -> list[int]:
    """Return the length of each document of packed rows, given the positions within them."""
    starts = (positions == 0).flatten().nonzero()[:, 0]
    return starts.diff(append=starts.new_tensor([positions.numel()])).tolist()


def within_documents(document_ids: Int[Tensor, "batch time"]) -> Bool[Tensor, "batch time time"]:
    """Return the causal mask of packed rows: each position sees its document up to itself."""
    return (document_ids[:, :, None] == document_ids[:, None]).tril()


def stack_rows(
    first: Shaped[Tensor, "batch time *rest"], second: Shaped[Tensor, "row path *rest"]
) -> Shaped[Tensor, "slot level *rest"]:
    """Concatenate rows; the shorter ones are padded on the right with zeros."""
    width = max(first.shape[1], second.shape[1])
    unpadded = (0, 0) * (first.ndim - 2)
    batches = (first, second)
    return torch.cat([pad(rows, (*unpadded, 0, width - rows.shape[1])) for rows in batches])

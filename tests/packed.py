"""The same documents packed and alone."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specheads.data.packing import TokenBatch
from tests import tiny

LENGTHS = (9, 22, 6, 15, 12, 7)
"""Longer and shorter than the sliding windows of tiny bases."""


def texts(seed: int = 11, lengths: Sequence[int] = LENGTHS) -> list[Tensor]:
    """Return documents of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(tiny.VOCAB, (length,), generator=generator) for length in lengths]


def counted_in(text: Tensor) -> Tensor:
    """Return the loss mask of a document: all tokens but every fifth."""
    return torch.arange(len(text)) % 5 != 4


def rows(packs: Sequence[Sequence[Tensor]], length: int = 40) -> TokenBatch:
    """Return one row per pack of documents, padded to a length."""
    tokens = torch.full((len(packs), length), 3)
    loss_mask = torch.zeros_like(tokens, dtype=torch.bool)
    document_ids = torch.zeros_like(tokens)
    for row, pack in enumerate(packs):
        whole = torch.cat(list(pack))
        tokens[row, : len(whole)] = whole
        loss_mask[row, : len(whole)] = torch.cat([counted_in(text) for text in pack])
        document_ids[row] = len(pack)
        document_ids[row, : len(whole)] = torch.repeat_interleave(
            torch.tensor([len(text) for text in pack])
        )
    return TokenBatch(tokens, loss_mask, document_ids)


def packed(documents: Sequence[Tensor]) -> TokenBatch:
    """Return six documents in two rows."""
    return rows([documents[:3], documents[3:]])


def alone(documents: Sequence[Tensor]) -> TokenBatch:
    """Return each document in a row of its own, without a mask."""
    found = rows([[text] for text in documents])
    return TokenBatch(found.tokens, found.loss_mask)


def chains_of(batch: TokenBatch, rows: Tensor, first: Tensor, depth: int) -> Tensor:
    """Return the labels of chains, token by token; -100 after the loss mask or document ends."""
    found = torch.full((len(rows), depth), -100)
    ids = torch.zeros_like(batch.tokens) if batch.document_ids is None else batch.document_ids
    for chain, (row, start) in enumerate(zip(rows.tolist(), first.tolist(), strict=True)):
        for place in range(start, min(start + depth, batch.tokens.shape[1])):
            if not batch.loss_mask[row, place] or ids[row, place] != ids[row, start]:
                break
            found[chain, place - start] = batch.tokens[row, place]
    return found


def pieces(values: Tensor, batch: TokenBatch) -> list[Tensor]:
    """Split values of a packed batch into those of each document, without the padding."""
    assert batch.document_ids is not None
    return [
        value[own == number]
        for value, own in zip(values, batch.document_ids, strict=True)
        for number in range(int(own.max()))
    ]

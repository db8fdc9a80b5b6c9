"""Packing: documents end to end, cut into rows of equal length, resumable to the bit."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from datasets import Dataset
from jaxtyping import Bool, Int
from torch import Tensor
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

Cursor = dict[str, int]

GROUP = 64
"""Documents tokenised at a time: enough to keep a fast tokenizer's threads busy."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Rows of text to train on. `counted[b, t]`: token t is a label the loss counts."""

    tokens: Int[Tensor, "batch time"]
    counted: Bool[Tensor, "batch time"]


@runtime_checkable
class Text(Protocol):
    """Where batches come from: corpus and self-distilled text alike."""

    def batches(
        self, cursor: dict[str, Any] | None = None
    ) -> Iterator[tuple[TokenBatch, dict[str, Any]]]:
        """Yield batches for ever, each with the cursor from which the next one follows."""
        ...


class PackedText:
    """An endless stream of batches from a corpus, of which every token counts.

    Documents are tokenised, each is ended by the end-of-text token, they are laid end to end and
    cut. Every epoch has its own order, and nothing is dropped where one epoch meets the next.
    No more than a few documents are held at a time.

    Args:
        documents: A dataset with a column `text`, as `load_corpus` returns.
        tokenizer: The base's own.
        sequence_length: Tokens per row.
        batch_size: Rows per batch, per process.
        seed: Of the epochs' orders.
        rank: This process; it reads documents rank, rank + world_size, ... of each epoch.
        world_size: How many processes share the corpus.

    Raises:
        ValueError: The corpus is too short for one batch on every process, or the tokenizer has
            no end-of-text token.
    """

    def __init__(
        self,
        documents: Dataset,
        tokenizer: PreTrainedTokenizerBase,
        *,
        sequence_length: int,
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if tokenizer.eos_token_id is None:
            raise ValueError(
                "packing needs a tokenizer with an end-of-text token, this one has none; set its "
                "eos_token"
            )
        self._documents, self._tokenizer = documents, tokenizer
        self._end: Any = tokenizer.eos_token_id
        self._shape = (batch_size, sequence_length)
        self._seed, self._rank, self._world_size = seed, rank, world_size
        self._refuse_too_short()

    def batches(self, cursor: Cursor | None = None) -> Iterator[tuple[TokenBatch, Cursor]]:
        """Yield batches for ever, each with the cursor from which the next one continues.

        Args:
            cursor: What came with the last batch that was used; None begins the first epoch. A
                few integers, fit for JSON: the epoch, the document in this process's order of
                it, and the tokens of that document already used. It is meant for the same
                corpus, tokenizer, seed and number of processes.
        """
        place = cursor or {"epoch": 0, "document": 0, "offset": 0}
        stream = self._tokenised(place["epoch"], place["document"])
        epoch, document, ids = next(stream)
        offset = place["offset"]
        needed = self._shape[0] * self._shape[1]
        while True:
            flat: list[int] = []
            while len(flat) < needed:
                if offset >= len(ids):
                    (epoch, document, ids), offset = next(stream), 0
                piece = ids[offset : offset + needed - len(flat)]
                offset += len(piece)
                flat += piece
            tokens = torch.tensor(flat).view(self._shape)
            batch = TokenBatch(tokens, torch.ones_like(tokens, dtype=torch.bool))
            yield batch, {"epoch": epoch, "document": document, "offset": offset}

    def _tokenised(self, epoch: int, document: int) -> Iterator[tuple[int, int, list[int]]]:
        """Yield (epoch, document, its tokens) from this document on, epoch after epoch."""
        while True:
            order = np.random.default_rng((self._seed, epoch)).permutation(len(self._documents))
            mine = order[self._rank :: self._world_size]
            for start in range(document, len(mine), GROUP):
                group = self._tokenise(mine[start : start + GROUP])
                for place, ids in enumerate(group, start=start):
                    yield epoch, place, ids
            epoch, document = epoch + 1, 0

    def _tokenise(self, rows: Any) -> list[list[int]]:
        texts = list(self._documents[rows]["text"])
        # verbose: documents longer than the base's context are what packing is for
        reading: Any = self._tokenizer(texts, return_attention_mask=False, verbose=False)
        # some tokenizers end every text themselves
        return [
            ids if ids and ids[-1] == self._end else [*ids, self._end] for ids in reading.input_ids
        ]

    def _refuse_too_short(self) -> None:
        # the verdict is over the whole corpus, so that every process comes to the same one
        batch, length = self._shape
        needed, found = batch * length * self._world_size, 0
        for start in range(0, len(self._documents), GROUP):
            rows = range(start, min(start + GROUP, len(self._documents)))
            found += sum(map(len, self._tokenise(rows)))
            if found >= needed:
                break
        if found < needed or len(self._documents) < self._world_size:
            raise ValueError(
                f"a batch of {batch} x {length} tokens on each of {self._world_size} processes "
                f"needs {needed} tokens and a document for each process, the corpus has {found} "
                f"tokens in {len(self._documents)} documents; give more text, or lower the batch "
                "size or the sequence length"
            )

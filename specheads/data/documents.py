"""Documents as token ids, with which of them the loss counts: what packing and training read."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa


class Documents:
    """Tokenised documents, in memory or mapped from files; picked by number, in any order.

    Args:
        table: A row is a document: `tokens` (int32), and maybe `loss_mask` (uint8), a list
            of the same length, one where the loss covers the token; without it all are covered.
        fingerprint: Names what decided the documents and their order.
    """

    _order: np.ndarray | None = None

    def __init__(self, table: pa.Table, fingerprint: str = "") -> None:
        self.fingerprint = fingerprint
        columns = [name for name in ("tokens", "loss_mask") if name in table.column_names]
        # not combined: that would copy what is mapped
        chunks = table.select(columns).to_batches()
        self._chunks = [{name: _flat(batch.column(name)) for name in columns} for batch in chunks]
        self._first = np.cumsum([0, *(len(batch) for batch in chunks)])

    @classmethod
    def joined(
        cls, parts: "Sequence[Documents]", order: np.ndarray, fingerprint: str = ""
    ) -> "Documents":
        """Return documents of several at once, which stay where they are.

        `order` numbers them through all the parts, in any order; some may come often or never.
        """
        out = cls(pa.table({}), fingerprint)
        out._chunks = [chunk for part in parts for chunk in part._chunks]
        sizes = [size for part in parts for size in np.diff(part._first)]
        out._first = np.cumsum([0, *sizes])
        out._order = order
        return out

    def whole(self) -> "Documents":
        """Return the same documents, every token of them covered by the loss."""
        out = Documents(pa.table({}), self.fingerprint)
        out._chunks = [{"tokens": chunk["tokens"]} for chunk in self._chunks]
        out._first, out._order = self._first, self._order
        return out

    def __len__(self) -> int:
        return int(self._first[-1]) if self._order is None else len(self._order)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each document."""
        parts = [np.diff(chunk["tokens"][1]) for chunk in self._chunks]
        lengths = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        return lengths if self._order is None else lengths[self._order]

    def tokens(self, number: int) -> np.ndarray:
        """Return the token ids of a document: (time,) int32, not to be written to."""
        tokens = self._piece(number, "tokens")
        assert tokens is not None
        return tokens

    def loss_mask(self, number: int) -> np.ndarray:
        """Return which tokens of a document the loss covers: (time,) bool."""
        if (loss_mask := self._piece(number, "loss_mask")) is None:
            return np.ones(self.lengths[number], np.bool_)
        return loss_mask.astype(np.bool_)

    def _piece(self, number: int, name: str) -> np.ndarray | None:
        if self._order is not None:
            number = int(self._order[number])
        place = int(np.searchsorted(self._first, number, side="right")) - 1
        if name not in self._chunks[place]:
            return None
        values, ends = self._chunks[place][name]
        row = number - self._first[place]
        return values[ends[row] : ends[row + 1]]


def _flat(column: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return the values of a column of lists, and where each list begins and the last ends."""
    ends = column.offsets.to_numpy()
    return column.values.to_numpy(), ends

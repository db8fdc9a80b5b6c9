"""Which pieces of which documents make up a row: best fit, end to end, or one a row.

See docs/data.md.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

PACKINGS = ("best_fit", "stream", "none")


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of equal length, each of pieces of documents; row r has those `ends[r] : ends[r + 1]`.

    The four arrays are one number a piece, and one more than a row.
    """

    documents: np.ndarray
    """Number of the document that each piece is of."""
    starts: np.ndarray
    """First token of the piece in its document."""
    lengths: np.ndarray
    """Tokens of the piece."""
    ends: np.ndarray

    def __len__(self) -> int:
        return len(self.ends) - 1

    def pieces(self, row: int) -> Iterator[tuple[int, int, int]]:
        """Yield (document, first token, last token but one) of each piece of a row."""
        for at in range(self.ends[row], self.ends[row + 1]):
            start = int(self.starts[at])
            yield int(self.documents[at]), start, start + int(self.lengths[at])


@dataclass(frozen=True, slots=True)
class Waste:
    """What packing costs."""

    documents: int
    rows: int
    length: int
    """Tokens of a row."""
    padding: float
    """Share of the rows' tokens that are none of any document."""
    cut: float
    """Share of documents that no row holds in one piece."""
    left_out: float
    """Share of the documents' tokens that no row holds."""

    def __str__(self) -> str:
        return (
            f"{self.documents:,} documents in {self.rows:,} rows of {self.length:,} tokens, "
            f"{self.padding:.1%} padding, {self.cut:.1%} of documents cut, "
            f"{self.left_out:.1%} of tokens left out"
        )


def waste(rows: Rows, lengths: np.ndarray, length: int) -> Waste:
    """Return what it costs to pack documents of these lengths into these rows."""
    held, room, total = int(rows.lengths.sum()), len(rows) * length, int(lengths.sum())
    whole = np.count_nonzero(rows.lengths == lengths[rows.documents])
    found = np.count_nonzero(lengths)
    return Waste(
        documents=len(lengths),
        rows=len(rows),
        length=length,
        padding=1 - held / max(room, 1),
        cut=1 - whole / max(found, 1),
        left_out=1 - held / max(total, 1),
    )


def one_a_row(lengths: np.ndarray, length: int) -> Rows:
    """Give each document a row of its own; what is longer than the row is left out."""
    (documents,) = np.nonzero(lengths)
    kept = np.minimum(lengths[documents], length)
    return Rows(documents, np.zeros_like(kept), kept, np.arange(len(documents) + 1))


def end_to_end(lengths: np.ndarray, length: int, order: np.ndarray) -> Rows:
    """Lay documents end to end in an order and cut them into rows; the last, too short, is lost."""
    bounds = np.concatenate([[0], np.cumsum(lengths[order], dtype=np.int64)])
    num_rows = int(bounds[-1]) // length
    cuts = np.arange(num_rows + 1, dtype=np.int64) * length
    edges = np.union1d(bounds[bounds <= cuts[-1]], cuts)
    starts, sizes = edges[:-1], np.diff(edges)
    # empty documents lie between others and begin where the next one does
    at = np.searchsorted(bounds, starts, side="right") - 1
    return Rows(order[at], starts - bounds[at], sizes, np.searchsorted(starts, cuts))


def best_fit(lengths: np.ndarray, length: int) -> Rows:
    """Put each document into the fullest row that has room for it, the longest ones first.

    What is longer than a row is cut into full rows first, and the rest of it is packed. Documents
    of one length are placed together, so that a million take about a second.

    Source: Ding et al. 2024, arXiv:2404.10830.
    """
    full, rest = np.divmod(lengths.astype(np.int64), length)
    num_full = int(full.sum())
    cut = np.repeat(np.arange(len(lengths)), full)
    nth = np.arange(num_full) - np.repeat(np.cumsum(full) - full, full)
    (short,) = np.nonzero(rest)
    short = short[np.argsort(-rest[short], kind="stable")]
    row = num_full + _fit(rest[short], length)
    rows = np.concatenate([np.arange(num_full), row])
    by_row = np.argsort(rows, kind="stable")
    counts = np.bincount(rows, minlength=int(rows.max(initial=-1)) + 1)
    return Rows(
        np.concatenate([cut, short])[by_row],
        np.concatenate([nth * length, full[short] * length])[by_row],
        np.concatenate([np.full(num_full, length), rest[short]])[by_row],
        np.concatenate([[0], np.cumsum(counts)]),
    )


def _fit(lengths: np.ndarray, length: int) -> np.ndarray:
    """Return the row of each piece; their lengths fall, and lie between 1 and that of a row."""
    found = np.empty(len(lengths), np.int64)
    rooms: list[int] = []
    """Room left in the rows that have some, in increasing order, each once."""
    by_room: defaultdict[int, list[np.ndarray]] = defaultdict(list)
    num_rows = at = 0
    sizes, counts = np.unique(lengths, return_counts=True)
    for size, count in zip(sizes[::-1].tolist(), counts[::-1].tolist(), strict=True):
        left = count
        while left:
            place = bisect_left(rooms, size)
            room = rooms[place] if place < len(rooms) else length
            # the fullest row takes as many as it can hold: with each it becomes fuller
            each = room // size
            if place < len(rooms):
                rows = by_room[room].pop()
                if not by_room[room]:
                    rooms.pop(place)
            else:
                rows = np.arange(num_rows, num_rows + -(-left // each))
                num_rows += len(rows)
            whole = min(len(rows), left // each)
            parts = [(rows[:whole], each)]
            if whole < len(rows) and (some := left - whole * each) and some < each:
                parts.append((rows[whole : whole + 1], some))
            for taken, times in parts:
                placed = len(taken) * times
                found[at : at + placed] = np.repeat(taken, times)
                at, left = at + placed, left - placed
                _keep(rooms, by_room, room - times * size, taken)
            _keep(rooms, by_room, room, rows[sum(len(taken) for taken, _ in parts) :])
    return found


def _keep(
    rooms: list[int], by_room: defaultdict[int, list[np.ndarray]], room: int, rows: np.ndarray
) -> None:
    """Remember rows that have this much room left."""
    if room and len(rows):
        if not by_room[room]:
            insort(rooms, room)
        by_room[room].append(rows)

"""What memory a C library takes for blocks that come and go: on CPUs torch has none of its own."""

from bisect import bisect_left, insort

LEAST_MAPPED, MOST_MAPPED = 2**17, 2**25
"""Bytes from which on a block is mapped by itself: at first, and at most."""

ALIGNED, SPARE = 64, 96
"""Torch's own alignment on CPUs, and what a hole must have beyond a block that is so aligned: the
hole that a block leaves has no room for the next of its size."""


class Heap:
    """The blocks of glibc's malloc: best fit, neighbours joined, what is large mapped by itself.

    Mapped blocks go back when they are freed, and from then on smaller ones are not mapped any
    more: they leave holes, in which what follows may not fit. This is most of what a process on a
    CPU holds beyond its tensors. All of a block is taken to be written to.

    Source: `man 3 mallopt`, M_MMAP_THRESHOLD and M_TRIM_THRESHOLD.
    """

    def __init__(self) -> None:
        self.resident = 0
        """Bytes that are taken from the system, holes included."""
        self._mapped_from, self._top = LEAST_MAPPED, 0
        self._holes: list[tuple[int, int]] = []  # (size, start), in order
        self._starts: dict[int, int] = {}  # size of each hole, by its start
        self._ends: dict[int, int] = {}  # start of each hole, by its end

    def take(self, size: int) -> tuple[int, int]:
        """Return a block: its start, -1 where it is mapped, and its size."""
        size = -(-(size + 16) // ALIGNED) * ALIGNED
        if size >= self._mapped_from:
            self.resident += size
            return -1, size
        at = bisect_left(self._holes, (size + SPARE, -1))
        if at < len(self._holes):
            whole, start = self._holes[at]
            self._close(start, whole)
            if whole > size:
                self._open(start + size, whole - size)
            return start, size
        # the hole at the end grows, where there is one
        start = self._ends.get(self._top, self._top)
        self.resident += size - (self._top - start)
        if start < self._top:
            self._close(start, self._top - start)
        self._top = start + size
        return start, size

    def give(self, block: tuple[int, int]) -> None:
        """Free a block."""
        start, size = block
        if start < 0:
            self.resident -= size
            if size <= MOST_MAPPED:
                self._mapped_from = max(self._mapped_from, size)
            return
        if (before := self._ends.get(start)) is not None:
            self._close(before, start - before)
            start, size = before, size + start - before
        if after := self._starts.get(start + size):
            self._close(start + size, after)
            size += after
        if start + size == self._top and size > 2 * self._mapped_from:
            self.resident -= size
            self._top = start
        else:
            self._open(start, size)

    def _open(self, start: int, size: int) -> None:
        insort(self._holes, (size, start))
        self._starts[start], self._ends[start + size] = size, start

    def _close(self, start: int, size: int) -> None:
        del self._holes[bisect_left(self._holes, (size, start))]
        del self._starts[start], self._ends[start + size]

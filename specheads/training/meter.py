"""What training takes: time, time spent waiting for text, memory."""

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from specheads.base.model import FrozenBase
from specheads.measure.speed import peak_gib
from specheads.training.schedule import Progressed

Item = TypeVar("Item")


class Meter:
    """Reads the clock for a phase, and adds what it says to `at.seconds`.

    Between `pause` and `go_on` it stands still: measuring is no training.
    """

    def __init__(self, at: Progressed, base: FrozenBase) -> None:
        self.at, self.base = at, base
        self.tokens, self.waited, self.since, self.read = 0, 0.0, at.seconds, time.perf_counter()

    def waiting(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield the same items, and count the time until each comes."""
        source = iter(items)
        while True:
            began = time.perf_counter()
            try:
                item = next(source)
            except StopIteration:
                return
            self.waited += time.perf_counter() - began
            yield item

    def step(self, tokens: int) -> None:
        """Count one step of so many tokens, over all processes."""
        self.tokens += tokens
        self.pause()

    def pause(self) -> None:
        """Add the time that has gone by."""
        now = time.perf_counter()
        self.at.seconds += now - self.read
        self.read = now

    def row(self) -> dict[str, float]:
        """Return the figures since the last row, under the names of metrics.jsonl."""
        self.pause()
        seconds = self.at.seconds - self.since
        return {
            "tokens_per_second": self.tokens / seconds,
            "hours": self.at.seconds / 3600,
            "data_wait_share": min(self.waited / seconds, 1.0),
            "peak_gib": peak_gib(self.base),
        }

    def go_on(self) -> None:
        """Begin a row: what has gone by since the last pause was no training."""
        self.tokens, self.waited, self.since, self.read = (
            *(0, 0.0),
            *(self.at.seconds, time.perf_counter()),
        )

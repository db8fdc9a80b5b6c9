"""The next batches, made in the background while the device computes."""

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")

AHEAD = 2
"""Items that wait: one to take, and one that is made meanwhile."""


def prefetched(items: Iterator[Item], ahead: int = AHEAD) -> Generator[Item, None, None]:
    """Yield the same items; a thread makes at most `ahead` of them in advance.

    What goes wrong there is raised where its item would have come. Closing waits for the item at
    hand and makes no other.
    """
    over = object()
    worker = ThreadPoolExecutor(1, "text")
    try:
        waiting = deque(worker.submit(next, items, over) for _ in range(ahead))
        while (item := waiting.popleft().result()) is not over:
            waiting.append(worker.submit(next, items, over))
            yield item  # pyright: ignore[reportReturnType]
    finally:
        worker.shutdown(cancel_futures=True)

"""Prefetching changes only the time at which items are prepared."""

import threading
from collections.abc import Iterator

import pytest

from specheads.training.trainer import prefetched


def test_items_are_prefetched_in_order_by_one_thread():
    before, threads, ready = threading.active_count(), set[int](), threading.Semaphore(0)

    def numbers() -> Iterator[int]:
        for number in range(1000):
            threads.add(threading.get_ident())
            ready.release()
            yield number

    items = prefetched(numbers(), ahead=2)
    assert [next(items) for _ in range(5)] == [0, 1, 2, 3, 4]
    assert all(ready.acquire(timeout=60) for _ in range(7))
    items.close()
    assert not ready.acquire(blocking=False)
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    assert threading.active_count() == before


def test_error_is_raised_in_place_of_its_item():
    items = prefetched(1 // number for number in (1, 1, 0))
    assert [next(items), next(items)] == [1, 1]
    with pytest.raises(ZeroDivisionError):
        next(items)

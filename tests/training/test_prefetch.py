"""Prefetching changes only the time at which items are prepared."""

import threading
from collections.abc import Iterator

import pytest

from specheads.training.trainer import prefetched


class Made:
    """Counts prepared numbers and records their thread."""

    def __init__(self, fail_at: int = -1) -> None:
        self.count, self.fail_at, self.closed = 0, fail_at, False
        self.threads: set[int] = set()
        self.changed = threading.Condition()

    def numbers(self) -> Iterator[int]:
        while True:
            if self.count == self.fail_at:
                raise ValueError("text is at its end")
            with self.changed:
                self.threads.add(threading.get_ident())
                self.count += 1
                self.changed.notify_all()
            yield self.count - 1

    def wait_for(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.count >= count, timeout=60)


def test_items_are_prefetched_in_order():
    made = Made()
    items = prefetched(made.numbers(), ahead=2)
    assert [next(items) for _ in range(5)] == [0, 1, 2, 3, 4]
    made.wait_for(7)
    items.close()
    assert made.count == 7
    assert len(made.threads) == 1
    assert threading.get_ident() not in made.threads


def test_a_finite_stream_ends():
    assert list(prefetched(iter("abc"))) == ["a", "b", "c"]
    assert list(prefetched(iter(""))) == []


def test_error_is_raised_in_place_of_its_item():
    items = prefetched(Made(fail_at=3).numbers())
    assert [next(items) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="text is at its end"):
        next(items)


def test_closing_leaves_no_thread():
    before = threading.active_count()
    items = prefetched(Made().numbers())
    next(items)
    assert threading.active_count() == before + 1
    items.close()
    assert threading.active_count() == before

"""Blocks come and go as glibc has them."""

from specheads.training.plan.heap import LEAST_MAPPED, SPARE, Heap

MIB = 2**20


def test_a_large_block_goes_back_and_the_next_of_its_size_is_not_mapped_any_more():
    heap = Heap()
    heap.give(heap.take(MIB))
    assert heap.resident == 0
    start, _ = heap.take(MIB // 2)
    assert start >= 0


def test_a_hole_serves_what_is_smaller_and_not_what_is_as_large():
    heap = Heap()
    first, _ = heap.take(LEAST_MAPPED // 2), heap.take(64)
    before = heap.resident
    heap.give(first)
    heap.take(LEAST_MAPPED // 2 - SPARE)
    assert heap.resident == before
    heap = Heap()
    first, _ = heap.take(LEAST_MAPPED // 2), heap.take(64)
    heap.give(first)
    heap.take(LEAST_MAPPED // 2)
    assert heap.resident > before


def test_neighbouring_holes_become_one():
    heap = Heap()
    blocks = [heap.take(30_000) for _ in range(4)]
    before = heap.resident
    for block in blocks[:3]:
        heap.give(block)
    heap.take(80_000)
    assert heap.resident == before

"""Trees of the best value: Sequoia's dynamic programme, and best-first over measured paths."""

import heapq
from collections.abc import Callable, Mapping, Sequence
from functools import cache

from specheads.measure.replay import Path

Whole = Callable[[int, int], tuple[float, tuple[int, ...]]]
"""(nodes, levels) -> the best tree's value, and how many nodes each of its children owns."""


def best_first(rates: Sequence[float], size: int, depth: int) -> list[Path]:
    """Return the rank paths of the best tree of a size, root included, at positional rates.

    Rates do not increase with the rank, so a path is worth no more than its beginning, and taking
    the best path that is left is optimal: it equals the dynamic programme.
    """

    def value(path: Path) -> float:
        worth = 1.0
        for rank in path:
            worth *= rates[rank]
        return worth

    return _grown(value, size, depth, len(rates))


def follow(
    shares: Mapping[Path, float], rates: Sequence[float], size: int, depth: int
) -> list[Path]:
    """Return the paths that a text follows most; those that it never does by positional rates.

    Joint shares in place of products: products are too low where difficulty comes in bursts.

    Source: Cai et al. 2024, arXiv:2401.10774, section 2.3.3.
    """

    def value(path: Path) -> float:
        worth = 1e-9
        for rank in path:
            worth *= rates[rank]
        return shares.get(path, 0.0) + worth

    return _grown(value, size, depth, len(rates))


def _grown(value: Callable[[Path], float], size: int, depth: int, width: int) -> list[Path]:
    """Take the best path next to those that were taken, until the tree has its size."""
    pending: list[tuple[float, int, Path]] = []
    paths: list[Path] = []

    def offer(path: Path) -> None:
        heapq.heappush(pending, (-value(path), len(path), path))

    if depth:
        for rank in range(width):
            offer((rank,))
    while pending and len(paths) < size - 1:
        path = heapq.heappop(pending)[2]
        paths.append(path)
        if len(path) < depth:
            for rank in range(width):
                offer((*path, rank))
    return paths


def sequoia(rates: Sequence[float], size: int, levels: int) -> tuple[float, list[Path]]:
    """Return the best tree's expected tokens a forward, and its rank paths.

    Args:
        rates: Chance that the guess of each rank is right, the same after every node, in any order.
        size: Nodes, root included; fewer where the levels hold no more.
        levels: Levels of nodes, the root's included.

    Source: Chen et al. 2024, arXiv:2402.12374, section 4.1: the child of rank b owns y nodes, and
    T(m, l, b) = max over y of T(m - y, l, b - 1) + p_b max over b' of T(y, l - 1, b').
    """

    @cache
    def whole(nodes: int, left: int) -> tuple[float, tuple[int, ...]]:
        """Return the best value of exactly so many nodes, and how many each child owns."""
        found = ((first(nodes, left, count), count) for count in range(len(rates) + 1))
        (value, _), count = max(found, key=lambda one: one[0][0])
        owned = []
        while count:
            taken = first(nodes, left, count)[1]
            owned.append(taken)
            nodes, count = nodes - taken, count - 1
        return value, tuple(reversed(owned))

    @cache
    def first(nodes: int, left: int, count: int) -> tuple[float, int]:
        """Return the best value where children have the first ranks, and what the last one owns."""
        if nodes < 1 or left < 1:
            return float("-inf"), 0
        if count == 0:
            return (1.0 if nodes == 1 else float("-inf")), 0
        found = [(first(nodes, left, count - 1)[0], 0)]
        if left > 1:
            found += [
                (
                    first(nodes - taken, left, count - 1)[0]
                    + rates[count - 1] * whole(taken, left - 1)[0],
                    taken,
                )
                for taken in range(1, nodes)
            ]
        return max(found)

    best = max(range(1, size + 1), key=lambda nodes: whole(nodes, levels)[0])
    return whole(best, levels)[0], _paths(whole, best, levels, ())


def _paths(whole: Whole, nodes: int, levels: int, above: Path) -> list[Path]:
    """Return the paths below a node that owns so many nodes, itself included."""
    out = []
    for rank, taken in enumerate(whole(nodes, levels)[1]):
        if taken:
            path = (*above, rank)
            out += [path, *_paths(whole, taken, levels - 1, path)]
    return out

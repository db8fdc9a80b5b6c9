"""The best tree of a size: the likeliest paths, Sequoia's values and exhaustive search agree."""

import random
from math import prod

import pytest

from specheads.measure.tune_trees import best_paths

RATES = (0.6, 0.2, 0.1, 0.05)


def expected_tokens(paths, rates):
    return 1.0 + sum(prod(rates[rank] for rank in path) for path in paths)


def is_closed(paths):
    nodes = {(), *paths}
    return len(nodes) == len(paths) + 1 and all(path[:-1] in nodes for path in paths)


def every_tree(size, depth, width):
    """Yield all rank trees of a size: sets of paths that contain every prefix."""
    trees = {frozenset()}
    for _ in range(size - 1):
        trees = {
            tree | {(*parent, rank)}
            for tree in trees
            for parent in [(), *tree]
            for rank in range(width)
            if len(parent) < depth and (*parent, rank) not in tree
        }
    return trees


@pytest.mark.parametrize(
    ("size", "levels", "value"),
    [(1, 3, 1.0), (2, 3, 1.6), (3, 3, 1.96), (4, 3, 2.16), (5, 3, 2.28), (8, 4, 2.716),
     (16, 5, 3.2748), (64, 10, 4.420118)],
)  # fmt: skip
def test_values_are_those_of_sequoias_dynamic_programme(size, levels, value):
    paths = best_paths({}, RATES, size, levels - 1)
    assert len(paths) == size - 1
    assert is_closed(paths)
    assert expected_tokens(paths, RATES) == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize("size", range(1, 8))
def test_best_tree_equals_exhaustive_search(size):
    generator = random.Random(size)
    for width, depth in ((2, 4), (3, 2)):
        # in any order
        rates = [generator.random() / width for _ in range(width)]
        trees = every_tree(size, depth, width)
        paths = best_paths({}, rates, size, depth)
        if trees:
            best = max(expected_tokens(tree, rates) for tree in trees)
            assert expected_tokens(paths, rates) == pytest.approx(best, rel=1e-12)
        assert is_closed(paths)


def test_followed_paths_precede_rates():
    shares = {(0,): 0.5, (1,): 0.1, (1, 1): 0.09}
    assert best_paths(shares, (0.6, 0.4), 4, 2) == [(0,), (1,), (1, 1)]
    paths = best_paths(shares, (0.6, 0.4), 7, 2)
    assert is_closed(paths)
    assert len(paths) == 6

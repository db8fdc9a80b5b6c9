"""The best tree of a size: the likeliest paths, Sequoia's values and exhaustive search agree."""

import random

import pytest

from specheads.measure.tune_trees import most_followed, sequoia

RATES = (0.6, 0.2, 0.1, 0.05)


def worth(paths, rates):
    total = 1.0
    for path in paths:
        value = 1.0
        for rank in path:
            value *= rates[rank]
        total += value
    return total


def closed(paths):
    known = {(), *paths}
    return len(known) == len(paths) + 1 and all(path[:-1] in known for path in paths)


def every_tree(size, depth, width):
    """Yield all rank trees of a size: sets of paths that contain every prefix."""
    seen, last = {frozenset()}, {frozenset()}
    for _ in range(size - 1):
        grown = set()
        for tree in last:
            for above in [(), *tree]:
                if len(above) < depth:
                    grown |= {tree | {(*above, rank)} for rank in range(width)} - {tree}
        last = {tree for tree in grown if tree not in seen}
        seen |= last
    return [tree for tree in last if len(tree) == size - 1]


@pytest.mark.parametrize(
    ("size", "levels", "value"),
    [(1, 3, 1.0), (2, 3, 1.6), (3, 3, 1.96), (4, 3, 2.16), (5, 3, 2.28), (8, 4, 2.716),
     (16, 5, 3.2748), (64, 10, 4.420118)],
)  # fmt: skip
def test_values_are_those_of_sequoias_dynamic_programme(size, levels, value):
    paths = sequoia(RATES, size, levels - 1)
    assert len(paths) == size - 1
    assert closed(paths)
    assert worth(paths, RATES) == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize("size", range(1, 8))
def test_best_tree_equals_exhaustive_search(size):
    generator = random.Random(size)
    for width, depth in ((2, 4), (3, 2)):
        # in any order
        rates = [generator.random() / width for _ in range(width)]
        trees = every_tree(size, depth, width)
        wanted = max((worth(tree, rates) for tree in trees), default=None)
        grown = sequoia(rates, size, depth)
        if wanted is not None:
            assert worth(grown, rates) == pytest.approx(wanted, rel=1e-12)
        assert closed(grown)


def test_followed_paths_precede_rates():
    shares = {(0,): 0.5, (1,): 0.1, (1, 1): 0.09}
    assert most_followed(shares, (0.6, 0.4), 4, 2) == [(0,), (1,), (1, 1)]
    grown = most_followed(shares, (0.6, 0.4), 7, 2)
    assert closed(grown)
    assert len(grown) == 6

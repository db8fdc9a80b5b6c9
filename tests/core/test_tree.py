import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from specheads.core.tree import TokenTree, from_paths


@st.composite
def parent_rows(draw: st.DrawFn) -> list[list[int]]:
    """A batch of random trees of one size, as parents."""
    batch, num_nodes = draw(st.integers(1, 3)), draw(st.integers(1, 20))
    nodes = range(1, num_nodes)
    return [[-1] + [draw(st.integers(0, node - 1)) for node in nodes] for _ in range(batch)]


def tree_of(parents: list[list[int]]) -> TokenTree:
    return TokenTree(
        torch.zeros(len(parents), len(parents[0]), dtype=torch.long), torch.tensor(parents)
    )


def lineage(parents: list[int], node: int) -> set[int]:
    """Walk up from a node, one edge at a time."""
    ancestors = set()
    while node >= 0:
        ancestors.add(node)
        node = parents[node]
    return ancestors


@given(parent_rows())
def test_ancestors_are_the_nodes_on_the_way_to_the_root(parents):
    ancestors = tree_of(parents).ancestors()
    for row, row_parents in zip(ancestors, parents, strict=True):
        for node, sees in enumerate(row):
            assert set(sees.nonzero().flatten().tolist()) == lineage(row_parents, node)


@st.composite
def rows_of_paths(draw: st.DrawFn) -> list[list[list[int]]]:
    batch, num_paths, length = (draw(st.integers(1, limit)) for limit in (3, 6, 4))
    tokens = st.lists(st.integers(0, 2), min_size=length - 1, max_size=length - 1)
    return [[[7, *draw(tokens)] for _ in range(num_paths)] for _ in range(batch)]


@given(rows_of_paths(), st.integers(1, 25))
def test_a_tree_of_paths_has_each_prefix_once_and_omits_the_last_ones(
    rows: list[list[list[int]]], num_nodes: int
):
    tree = from_paths(torch.tensor(rows), num_nodes)
    assert tree.tokens.shape == (len(rows), num_nodes)
    reach = tree.ancestors()
    for row, paths in enumerate(rows):
        beginnings = [tuple(path[:end]) for path in paths for end in range(1, len(path) + 1)]
        paths = [tuple(tree.tokens[row, line].tolist()) for line in reach[row]]
        expected = list(dict.fromkeys(beginnings))[:num_nodes]
        assert paths[: len(expected)] == expected
        # padding repeats no path and has no siblings
        assert len(set(paths)) == num_nodes
        assert all(
            end[:-1] == above for above, end in itertools.pairwise(paths[len(expected) - 1 :])
        )

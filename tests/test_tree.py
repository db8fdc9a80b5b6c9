import torch
from hypothesis import given
from hypothesis import strategies as st

from specheads.tree import TokenTree, chain


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
    seen = set()
    while node >= 0:
        seen.add(node)
        node = parents[node]
    return seen


def test_a_node_sees_itself_and_those_above_it():
    #      0
    #     / \
    #    1   2
    #   /   / \
    #  3   4   5
    #          |
    #          6
    tree = tree_of([[-1, 0, 0, 1, 2, 2, 5]])
    assert tree.ancestors()[0].int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 0, 0],
        [1, 0, 1, 0, 1, 0, 0],
        [1, 0, 1, 0, 0, 1, 0],
        [1, 0, 1, 0, 0, 1, 1],
    ]
    assert tree.depths().tolist() == [[0, 1, 1, 2, 2, 2, 3]]


@given(parent_rows())
def test_ancestors_are_those_met_on_the_way_to_the_root(parents):
    found = tree_of(parents).ancestors()
    for row, row_parents in zip(found, parents, strict=True):
        for node, sees in enumerate(row):
            assert set(sees.nonzero().flatten().tolist()) == lineage(row_parents, node)


def test_a_chain_sees_everything_before():
    tree = chain(torch.tensor([[5, 6, 7], [8, 9, 9]]))
    assert tree.parents.tolist() == [[-1, 0, 1]] * 2
    assert tree.ancestors().tolist() == torch.ones(2, 3, 3).tril().bool().tolist()


def test_ancestors_that_a_policy_knows_are_not_worked_out_again():
    known = torch.tensor([[[True, False], [True, True]]])
    parents = torch.tensor([[-1, 0]])
    assert TokenTree(parents, parents, known).ancestors() is known

"""What `tree.kind` stands for on the command line."""

import pytest

from specheads.config import Tree
from specheads.config.parts import TREES
from specheads.decoding.trees.named import fixed_policy


@pytest.mark.parametrize(
    ("tree", "num_nodes", "depth"),
    [
        (Tree(kind="chain"), 4, 3),
        (Tree(kind="chain", depth=2), 3, 2),
        (Tree(kind="static", paths=[[0], [1], [0, 0]]), 4, 2),
        (Tree(kind="best_first", num_nodes=9), 9, 3),
        (Tree(kind="beam", beam=5), 16, 3),
        (Tree(kind="product", branches=[3, 2], num_nodes=7), 7, 2),
    ],
    ids=lambda value: value.kind if isinstance(value, Tree) else None,
)
def test_every_kind_makes_its_policy(tree: Tree, num_nodes: int, depth: int):
    policy = fixed_policy(tree, 3)
    assert policy is not None
    assert (policy.num_nodes, policy.depth) == (num_nodes, depth)
    assert tree.kind in TREES


def test_a_tree_that_is_to_be_picked_has_no_policy_yet():
    assert fixed_policy(Tree(kind="tuned"), 3) is None


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (Tree(kind="bush"), "tree.kind must be one of tuned, chain.*'bush'"),
        (Tree(kind="beam", depth=4), "as deep as the head, 3 levels, got 4"),
        (Tree(kind="product", branches=[2, 1, 1, 1], num_nodes=3), "3 levels, got 4"),
        (Tree(kind="static", paths=[[0, 0]]), "distinct, non-empty rank paths"),
    ],
    ids=["unknown", "beam too deep", "product too deep", "no tree"],
)
def test_a_tree_that_cannot_be_grown_is_refused(tree: Tree, message: str):
    with pytest.raises(ValueError, match=message):
        fixed_policy(tree, 3)

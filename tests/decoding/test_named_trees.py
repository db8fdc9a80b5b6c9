"""What `tree.kind` stands for on the command line."""

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest

from specheads.config.compose import settings_of
from specheads.config.parts import TREES, Tree
from specheads.decoding.trees.named import fixed_policy
from specheads.decoding.trees.policies import Beam, Static, TreePolicy


def policy_of(tree: Tree, head_depth: int) -> TreePolicy | None:
    return fixed_policy(head_depth=head_depth, **asdict(tree))


GOLDEN = Path(__file__).parents[1] / "golden"


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
    policy = policy_of(tree, 3)
    assert policy is not None
    assert (policy.num_nodes, policy.depth) == (num_nodes, depth)
    assert tree.kind in TREES


PUBLISHED = {
    "medusa_mc_sim_7b_63": [10, 28, 23, 2],
    "medusa_vicuna_13b_stage1": [10, 29, 23, 1],
    "medusa_vicuna_13b_stage2": [10, 19, 25, 9],
    "medusa_vicuna_33b_stage1": [10, 34, 19],
    "medusa_vicuna_33b_stage2": [10, 24, 24, 5],
    "medusa_vicuna_7b_stage1": [10, 32, 20, 1],
    "medusa_vicuna_7b_stage1_ablation": [10, 21, 25, 7],
    "medusa_vicuna_7b_stage2": [10, 23, 23, 7],
    "medusa_zephyr_stage2": [10, 27, 23, 3],
    "sequoia_1_3b_33b": [6, 12, 16, 13, 16],
    "sequoia_68m_13b": [7, 10, 10, 9, 11, 7, 8, 1],
    "sequoia_68m_7b": [8, 16, 22, 17, 16, 14, 15, 9, 10],
    "redrafter_10x3": [10, 10, 10],
    "redrafter_45x4": [45] * 4,
    "redrafter_5x5": [5] * 5,
}
"""Nodes of each level as their projects publish them."""


def preset(name: str, depth: int) -> TreePolicy:
    """Return the policy of a file of configs/tree, for a head of some depth."""
    settings = settings_of("evaluate", [f"tree={name}"]).tree
    policy = policy_of(settings, depth)
    assert policy is not None
    return policy


def widths(policy: TreePolicy) -> list[int]:
    """Return how many nodes each level has."""
    if isinstance(policy, Static):
        count = Counter(map(len, policy.paths))
        return [count[length] for length in sorted(count)]
    assert isinstance(policy, Beam)
    return [policy.width] * policy.depth


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_tree_has_its_project_s_levels(name: str):
    policy = preset(name, 16)
    assert widths(policy) == PUBLISHED[name]
    assert policy.num_nodes == 1 + sum(PUBLISHED[name])
    assert policy.depth == len(PUBLISHED[name])


@pytest.mark.parametrize("name", ["mc_sim_7b_63", "vicuna_7b_stage2"])
def test_a_published_medusa_tree_is_its_project_s_list_of_choices(name: str):
    stored = GOLDEN / f"medusa_tree_{name}" / "config.json"
    choices = json.loads(stored.read_text())["choices"]
    policy = preset(f"medusa_{name}", 5)
    assert isinstance(policy, Static)
    assert {*policy.paths} == {*map(tuple, choices)}

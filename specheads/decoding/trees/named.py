"""The one place that knows every tree policy by name.

Settings (`tree.kind`), the trees of tuned.json and the candidates of `specheads tune` are built
here. See docs/tune.md.
"""

from collections.abc import Sequence
from typing import Any

from specheads.config.shared import TreeSettings
from specheads.core.errors import InputError
from specheads.decoding.trees import policies
from specheads.decoding.trees.early_stop import Estimate
from specheads.decoding.trees.hybrid import remove_lookup

TUNED_KINDS = ("none", "static", "best_first")
"""The kinds that tuned.json stores: all that `candidate_policies` and `tune` time."""


def build_policy(
    kind: str,
    *,
    depth: int,
    num_nodes: int = 8,
    beam: int = 4,
    branch: int = 0,
    branches: Sequence[int] = (),
    confidence: float = 0.0,
    stop: Estimate | None = None,
    paths: Sequence[Sequence[int]] = (),
    name: str = "static",
) -> policies.TreePolicy:
    """Return the tree policy of a kind; a `branch` of zero is `beam`."""
    match kind:
        case "none":
            return policies.NOTHING
        case "chain":
            return policies.chain(depth, confidence)
        case "static":
            return policies.Static(paths, name, confidence, stop)
        case "best_first":
            return policies.BestFirst(num_nodes, depth, beam, branch or beam)
        case "beam":
            return policies.Beam(beam, depth)
        case "product":
            return policies.Product(branches, num_nodes)
        case "sampled":
            return policies.Sampled(branches)
        case _:
            raise InputError(f"tree.kind must be a kind of tree, got {kind!r}; see docs/tune.md")


def policy_settings(policy: policies.TreePolicy) -> dict[str, Any]:
    """Return the arguments of `build_policy` for a policy of `TUNED_KINDS`."""
    sizes = {"num_nodes": policy.num_nodes, "depth": policy.depth}
    if isinstance(policy, policies.BestFirst):
        return sizes | {"kind": "best_first", "beam": policy.beam, "branch": policy.branch}
    assert isinstance(policy, policies.Static)
    return sizes | {
        "kind": "static" if policy.depth else "none",
        "paths": [list(path) for path in policy.paths],
        "confidence": policy.confidence,
        "stop": policy.estimate,
    }


def candidate_policies(
    head_depth: int, drafted_size: int, num_nodes: int, max_nodes: int
) -> list[policies.TreePolicy]:
    """Return the policies that `specheads tune` times, next to static trees, for a head.

    They have about `num_nodes` nodes, the number of the best static tree, and at most `max_nodes`.
    """
    branch = min(4, drafted_size or 4)
    if branch == 1:
        return []
    largest = min(max_nodes, 1 + branch + (head_depth - 1) * 4 * branch)
    num_nodes = min(max(num_nodes, head_depth + 3), largest)
    return [policies.BestFirst(num_nodes, head_depth, 4, branch)]


def fixed_policy(settings: TreeSettings, head_depth: int) -> policies.TreePolicy | None:
    """Return the tree policy of settings, for a head of this depth; None for a tuned tree."""
    if settings.kind == "tuned":
        return None
    depth = settings.depth or head_depth
    policy = build_policy(
        settings.kind,
        depth=depth,
        num_nodes=settings.num_nodes,
        beam=settings.beam,
        branches=settings.branches or [1] * depth,
        confidence=settings.confidence,
        paths=settings.paths,
    )
    if policy.depth > head_depth:
        raise InputError(
            f"a tree can be as deep as the head, {head_depth} levels, got {policy.depth}; lower "
            "tree.depth, or give shorter tree.paths or tree.branches"
        )
    return policy


def fixed_tree(policy: policies.TreePolicy) -> policies.Static | None:
    """Return the head's own tree if it is the same in every step, else None."""
    tree = remove_lookup(policy)
    return tree if isinstance(tree, policies.Static) and not tree.confidence else None

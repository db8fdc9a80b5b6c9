"""The tree policies that `tree.kind` names."""

from specheads.config import Tree
from specheads.config.parts import TREES
from specheads.core.errors import InputError
from specheads.decoding.trees import policies
from specheads.decoding.trees.policies import Product, Sampled


def fixed_policy(settings: Tree, head_depth: int) -> policies.TreePolicy | None:
    """Return the tree policy of these settings; None for a tuned tree."""
    depth = settings.depth or head_depth
    branches = settings.branches or [1] * depth
    match settings.kind:
        case "tuned":
            return None
        case "chain":
            policy = policies.chain(depth, settings.confidence)
        case "static":
            policy = policies.Static(settings.paths, confidence=settings.confidence)
        case "best_first":
            policy = policies.BestFirst(settings.num_nodes, depth, settings.beam, settings.branch)
        case "beam":
            policy = policies.Beam(settings.beam, depth)
        case "product":
            policy = Product(branches, settings.num_nodes)
        case "sampled":
            policy = Sampled(branches, settings.confidence)
        case _:
            raise InputError(f"tree.kind must be one of {', '.join(TREES)}, got {settings.kind!r}")
    if policy.depth > head_depth:
        raise InputError(
            f"a tree can be as deep as the head, {head_depth} levels, got {policy.depth}; lower "
            "tree.depth, or give shorter tree.paths or tree.branches"
        )
    return policy

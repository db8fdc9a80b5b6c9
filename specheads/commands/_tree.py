"""The tree policies that `tree.kind` names."""

from specheads import grow
from specheads.config import Tree
from specheads.product import Product
from specheads.sampled import Sampled

KINDS = ("tuned", "chain", "static", "best_first", "beam", "product", "sampled")


def fixed_policy(settings: Tree, head_depth: int) -> grow.Policy | None:
    """Return the policy that was asked for; None where it is to be picked by measurement.

    Args:
        settings: Of the tree.
        head_depth: Levels the head drafts.

    Raises:
        ValueError: The kind is unknown, the settings make no tree, or it is deeper than the head.
    """
    depth = settings.depth or head_depth
    branches = settings.branches or [1] * depth
    match settings.kind:
        case "tuned":
            return None
        case "chain":
            policy = grow.chain(depth, settings.confidence)
        case "static":
            policy = grow.Static(settings.paths, confidence=settings.confidence)
        case "best_first":
            policy = grow.BestFirst(settings.num_nodes, depth, settings.beam, settings.branch)
        case "beam":
            policy = grow.Beam(settings.beam, depth)
        case "product":
            policy = Product(branches, settings.num_nodes)
        case "sampled":
            policy = Sampled(branches, settings.confidence)
        case _:
            raise ValueError(f"tree.kind must be one of {', '.join(KINDS)}, got {settings.kind!r}")
    if policy.depth > head_depth:
        raise ValueError(
            f"a tree can be as deep as the head, {head_depth} levels, got {policy.depth}; lower "
            "tree.depth, or give shorter tree.paths or tree.branches"
        )
    return policy

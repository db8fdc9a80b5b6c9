"""The tree policies that `tree.kind` names."""

from collections.abc import Sequence

from specheads.core.errors import InputError
from specheads.decoding.trees import policies


def fixed_policy(
    kind: str,
    head_depth: int,
    *,
    depth: int = 0,
    num_nodes: int = 8,
    beam: int = 4,
    branches: Sequence[int] = (),
    confidence: float = 0.0,
    paths: Sequence[Sequence[int]] = (),
) -> policies.TreePolicy | None:
    """Return the tree policy of these settings; None for a tuned tree.

    The arguments are the settings `tree`; a depth of zero is the head's.
    """
    depth = depth or head_depth
    branches = branches or [1] * depth
    match kind:
        case "tuned":
            return None
        case "chain":
            policy = policies.chain(depth, confidence)
        case "static":
            policy = policies.Static(paths, confidence=confidence)
        case "best_first":
            policy = policies.BestFirst(num_nodes, depth, beam, beam)
        case "beam":
            policy = policies.Beam(beam, depth)
        case "product":
            policy = policies.Product(branches, num_nodes)
        case "sampled":
            policy = policies.Sampled(branches)
        case _:
            raise InputError(f"tree.kind must be a kind of tree, got {kind!r}; see docs/tune.md")
    if policy.depth > head_depth:
        raise InputError(
            f"a tree can be as deep as the head, {head_depth} levels, got {policy.depth}; lower "
            "tree.depth, or give shorter tree.paths or tree.branches"
        )
    return policy

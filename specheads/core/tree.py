"""Token trees: the data structure between drafting and verification."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specheads.core.errors import InputError, require_integer


@dataclass(frozen=True, slots=True)
class BranchSampling:
    """How a tree was sampled from the drafter's probs, for recursive rejection.

    Nodes are ordered level by level, and the children of a node in the order of sampling.
    """

    branches: tuple[int, ...]
    """Number of children of every node of each level, from the root on."""
    probs: Float[Tensor, "batch level vocab"]
    """Distribution of the first child of node i; later children are sampled without replacement.
    The last entry is that of the last node with children."""


@dataclass(frozen=True, slots=True)
class TokenTree:
    """A batch of token trees, one per row, in topological order.

    Node 0 is the root: the last token that the base chose itself. `parents[:, 0]` is -1 and
    `parents[:, i] < i`, so every parent comes before its children. A (parent, token) pair occurs
    once, so at most one path has the base's own choices. A later node whose parent is -1 is absent:
    it is padding, and no rule accepts it.
    """

    tokens: Int[Tensor, "batch node"]
    parents: Int[Tensor, "batch node"]
    ancestor_mask: Bool[Tensor, "batch node node"] | None = None
    """What `ancestors` returns, if the tree policy has computed it."""
    branch_sampling: BranchSampling | None = None
    """How children were sampled; None for a drafter's best guesses."""
    num_copied: int = 0
    """How many of the last nodes were copied from the text; the others were drafted."""

    def ancestors(self) -> Bool[Tensor, "batch node node"]:
        """Return `out[b, i, j]`: true if j is i itself or an ancestor of i."""
        if self.ancestor_mask is not None:
            return self.ancestor_mask
        num_nodes = self.parents.shape[1]
        nodes = torch.arange(num_nodes, device=self.parents.device)
        # float, because not every device has a batched product of booleans
        reach = (self.parents[:, :, None] == nodes).float() + torch.eye(
            num_nodes, device=self.parents.device
        )
        # k rounds of squaring find every path of up to 2**k edges
        for _ in range((num_nodes - 1).bit_length()):
            reach = (reach @ reach).clamp(max=1.0)
        return reach > 0

    def depths(self) -> Int[Tensor, "batch node"]:
        """Return the number of edges between each node and the root."""
        return self.ancestors().sum(-1) - 1


def from_paths(paths: Int[Tensor, "batch path level"], num_nodes: int | None = None) -> TokenTree:
    """Return the tree of all prefixes of some paths, each prefix once.

    All paths of a row begin with the same root. Nodes are in the order of the paths, so a tree with
    too few nodes leaves out the end of the last ones. A row with fewer prefixes than nodes is
    padded with a chain of its root's token. By default the largest row has all of its nodes.

    Source: Cheng et al. 2024, arXiv:2403.09919, section 3.3.
    """
    batch, num_paths, length = paths.shape
    shared = (paths[:, :, None] == paths[:, None]).cumprod(-1)
    # the first path with the same prefix; argmax returns the first of equal values
    owner = shared.transpose(2, 3).argmax(-1)
    is_first = (owner == torch.arange(num_paths, device=paths.device)[:, None]).flatten(1)
    node = (is_first.cumsum(-1) - 1).view(batch, num_paths, length)
    parent = torch.full_like(paths, -1)
    parent[..., 1:] = node[..., :-1].gather(1, owner[..., :-1])
    count = is_first.sum(-1, keepdim=True)
    num_nodes = int(count.max()) if num_nodes is None else num_nodes
    order = (~is_first).to(torch.uint8).argsort(dim=-1, stable=True)[:, :num_nodes]
    order = torch.nn.functional.pad(order, (0, num_nodes - order.shape[1]))
    nodes = torch.arange(num_nodes, device=paths.device)
    return TokenTree(
        torch.where(nodes < count, paths.flatten(1).gather(1, order), paths[:, 0, :1]),
        torch.where(nodes < count, parent.flatten(1).gather(1, order), nodes - 1),
    )


def chain(tokens: Int[Tensor, "batch node"]) -> TokenTree:
    """Return the tree without branches: each token is the child of the one before it."""
    batch, num_nodes = tokens.shape
    parents = torch.arange(-1, num_nodes - 1, device=tokens.device)
    return TokenTree(tokens, parents.expand(batch, num_nodes))


MAX_NODES = 4096
"""Most nodes of a tree, and most drafted nodes. One forward reads them all, the mask of each row is
their square, and beyond a few hundred nodes the time of a forward grows with each node."""


def refuse_nodes(num_nodes: int, setting: str) -> int:
    """Return a number of nodes, or refuse it and name the setting to lower."""
    if num_nodes > MAX_NODES:
        raise InputError(
            f"a tree may have at most {MAX_NODES} nodes, got {num_nodes:.4g}; lower {setting}"
        )
    return num_nodes


def level_sizes(branches: Sequence[int]) -> list[int]:
    """Return the number of nodes of each level, given the number of children at each level."""
    sizes, total = [1], 1
    for branch in branches:
        sizes.append(sizes[-1] * require_integer(branch, "a number of tree.branches", 1))
        total = refuse_nodes(total + sizes[-1], "tree.branches")
    return sizes

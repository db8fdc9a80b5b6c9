"""Token trees: the one shape that draft tokens take between drafting and verification."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Drawn:
    """How a tree was drawn from the drafter's probs: what recursive rejection has to know.

    Node order is level by level, and the children of a node stand in the order of drawing.
    """

    branches: tuple[int, ...]
    """Children of every node of each level, the root's first."""
    probs: Float[Tensor, "batch level vocab"]
    """What the first child of node i was drawn from; later ones without replacement.
    It ends with the last node that has children."""


@dataclass(frozen=True, slots=True)
class TokenTree:
    """A batch of token trees, one per row, in topological order.

    Node 0 is the root: the last token the base chose itself. `parents[:, 0]` is -1 and
    `parents[:, i] < i`, so one pass from left to right meets every parent before its children.
    A (parent, token) pair occurs once, so at most one path carries the base's own choices.
    A later node whose parent is -1 is absent: padding, of which no rule keeps anything.
    """

    tokens: Int[Tensor, "batch node"]
    parents: Int[Tensor, "batch node"]
    reach: Bool[Tensor, "batch node node"] | None = None
    """What `ancestors` returns, where a tree policy has worked it out before (static trees)."""
    drawn: Drawn | None = None
    """How children were drawn; None where a drafter's best guesses were taken."""
    num_copied: int = 0
    """How many of the last nodes were copied from the text, where the others were drafted."""

    def ancestors(self) -> Bool[Tensor, "batch node node"]:
        """Return `out[b, i, j]`: true when j is i itself or an ancestor of i.

        Reachability by squaring: after k rounds every path of up to 2**k edges is known, so a
        tree of n nodes takes log2(n) small products and no loop over nodes.
        """
        if self.reach is not None:
            return self.reach
        num_nodes = self.parents.shape[1]
        nodes = torch.arange(num_nodes, device=self.parents.device)
        # float, because a batched product of booleans does not exist on every device
        reach = (self.parents[:, :, None] == nodes).float() + torch.eye(
            num_nodes, device=self.parents.device
        )
        for _ in range((num_nodes - 1).bit_length()):
            reach = (reach @ reach).clamp(max=1.0)
        return reach > 0

    def depths(self) -> Int[Tensor, "batch node"]:
        """Return how many edges lie between each node and the root."""
        return self.ancestors().sum(-1) - 1


def from_paths(paths: Int[Tensor, "batch path level"], num_nodes: int | None = None) -> TokenTree:
    """Return the tree of all beginnings of some paths, each beginning once.

    Nodes stand in the order in which the paths meet them, so a tree that holds too few leaves
    out the end of the last paths. A row with fewer beginnings than the tree has nodes goes on
    with repetitions of its root's token, one below the other: they cost nothing but room. All
    paths of a row begin with the same root, the best path stands first, and without a number of
    nodes the tree takes as many as the richest row needs.

    Source: Cheng et al. 2024, arXiv:2403.09919, section 3.3.
    """
    batch, num_paths, length = paths.shape
    shared = (paths[:, :, None] == paths[:, None]).cumprod(-1)
    # the first path with the same beginning; argmax takes the first of equals
    owner = shared.transpose(2, 3).argmax(-1)
    is_first = (owner == torch.arange(num_paths, device=paths.device)[:, None]).flatten(1)
    place = (is_first.cumsum(-1) - 1).view(batch, num_paths, length)
    above = torch.full_like(paths, -1)
    above[..., 1:] = place[..., :-1].gather(1, owner[..., :-1])
    count = is_first.sum(-1, keepdim=True)
    num_nodes = int(count.max()) if num_nodes is None else num_nodes
    kept = (~is_first).to(torch.uint8).argsort(dim=-1, stable=True)[:, :num_nodes]
    kept = torch.nn.functional.pad(kept, (0, num_nodes - kept.shape[1]))
    nodes = torch.arange(num_nodes, device=paths.device)
    return TokenTree(
        torch.where(nodes < count, paths.flatten(1).gather(1, kept), paths[:, 0, :1]),
        torch.where(nodes < count, above.flatten(1).gather(1, kept), nodes - 1),
    )


def chain(tokens: Int[Tensor, "batch node"]) -> TokenTree:
    """Return the tree without branches: each token is the child of the one before it."""
    batch, num_nodes = tokens.shape
    parents = torch.arange(-1, num_nodes - 1, device=tokens.device)
    return TokenTree(tokens, parents.expand(batch, num_nodes))

"""Token trees: the one shape that draft tokens take between drafting and verification."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenTree:
    """A batch of token trees, one per row, in topological order.

    Node 0 is the root: the last token the base chose itself. `parents[:, 0]` is -1 and
    `parents[:, i] < i`, so one pass from left to right meets every parent before its children.
    A (parent, token) pair occurs once, so at most one path carries the base's own choices.
    """

    tokens: Int[Tensor, "batch node"]
    parents: Int[Tensor, "batch node"]
    reach: Bool[Tensor, "batch node node"] | None = None
    """What `ancestors` returns, where a policy has worked it out before (static trees)."""

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


def chain(tokens: Int[Tensor, "batch node"]) -> TokenTree:
    """Return the tree without branches: each token is the child of the one before it."""
    batch, num_nodes = tokens.shape
    parents = torch.arange(-1, num_nodes - 1, device=tokens.device)
    return TokenTree(tokens, parents.expand(batch, num_nodes))

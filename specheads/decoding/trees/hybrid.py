"""Trees with copied text: prompt lookup alone, or joined with a head's own tree."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from specheads.base.cache import upload
from specheads.core.drafter import Drafter
from specheads.core.features import Committed
from specheads.core.tree import TokenTree, refuse_nodes
from specheads.decoding.accept import accepted_nodes
from specheads.decoding.sampling import SamplingState
from specheads.decoding.suffix_decoding import LookupText
from specheads.decoding.trees.policies import NOTHING, TreePolicy


def join_copied(
    tree: TokenTree, copied: Int[Tensor, "batch copied"], size: int, *, trim: bool = False
) -> TokenTree:
    """Return the tree with a path of copied tokens added, sharing the tree's own nodes.

    Tokens that both propose count as drafted. Copied tokens are padded with -1. Every row gets
    `size` new nodes; those that its path does not need are absent. With `trim` only as many are
    added as the longest path needs, which synchronises.
    """
    batch, num_nodes = tree.tokens.shape
    device, length = copied.device, copied.shape[1]
    ancestors = tree.ancestors()
    depths = ancestors.sum(-1) - 1
    is_copied = tree.tokens == copied.gather(1, (depths - 1).clamp(0, length - 1))
    shared = accepted_nodes(tree, is_copied & (depths <= length), ancestors)
    # the shared nodes are one path, so the deepest node is its end
    end = (shared * depths).argmax(-1, keepdim=True)
    offsets = shared.sum(-1, keepdim=True) - 1 + torch.arange(size, device=device)
    tokens = copied.gather(1, offsets.clamp(max=length - 1))
    is_present = (tokens >= 0) & (offsets < length)
    if trim:
        size = int(is_present.sum(-1).max())
        tokens, is_present = tokens[:, :size], is_present[:, :size]
    nodes = torch.arange(num_nodes, num_nodes + size, device=device).expand(batch, -1)
    parents = torch.cat([end, nodes], dim=1)[:, :size].masked_fill(~is_present, -1)
    tokens = torch.cat([tree.tokens, tokens.clamp(min=0)], dim=1)
    parents = torch.cat([tree.parents, parents], dim=1)
    return TokenTree(tokens, parents, num_copied=tree.num_copied + size)


class HybridTree(TreePolicy):
    """A head's own tree joined with copied text, so that one forward verifies both.

    `head_tree` grows the head's tree, and up to `num_copied` nodes are added for copied tokens that
    the head does not draft too. If `head_tree` drafts nothing, the tree is copied text alone.
    `trim` leaves out added nodes that no row needs, which gives up a static shape; None trims on a
    CPU. At most `lookup_length` tokens are looked up; by default as many as fit.

    Source: Saxena 2023, prompt lookup, for what is copied; the union of drafts of several
    sources in one verified tree is that of Miao et al. 2023, SpecInfer, arXiv:2305.09781.
    """

    def __init__(
        self,
        head_tree: TreePolicy,
        num_copied: int,
        *,
        trim: bool | None = None,
        lookup_length: int | None = None,
    ) -> None:
        self.name = f"{head_tree.name}+lookup" if head_tree.depth else "lookup"
        self.head_tree, self.num_copied, self.trim = head_tree, num_copied, trim
        self.num_nodes = refuse_nodes(head_tree.num_nodes + num_copied, "copied_tokens")
        self.depth = head_tree.depth + num_copied
        self.lookup_length = self.depth if lookup_length is None else lookup_length
        self.num_guesses = head_tree.num_guesses

    @property
    def draft_depth(self) -> int:
        """Levels of the head's own tree."""
        return self.head_tree.draft_depth

    @property
    def is_chain(self) -> bool:
        """Whether it is copied text alone, which can branch off otherwise."""
        return not self.head_tree.depth

    def grow(
        self,
        drafter: Drafter | None,
        committed: Committed,
        memory: Any,
        sampling: SamplingState | None = None,
        texts: Sequence[LookupText] = (),
    ) -> TokenTree:
        """Draft with the head, copy, and join the two."""
        return self.add_copied(self.head_tree.grow(drafter, committed, memory, sampling), texts)

    def add_copied(self, tree: TokenTree, texts: Sequence[LookupText]) -> TokenTree:
        """Return the head's tree joined with copied text."""
        matches = [text.find(self.lookup_length)[1] for text in texts]
        if not (longest := max(map(len, matches))):
            return tree
        padded = [tokens + [-1] * (longest - len(tokens)) for tokens in matches]
        copied = upload(padded, tree.tokens.device)
        if not self.head_tree.depth:
            return join_copied(tree, copied, min(longest, self.num_copied))
        trim = copied.device.type == "cpu" if self.trim is None else self.trim
        return join_copied(tree, copied, self.num_copied, trim=trim)


def lookup_tree(size: int) -> HybridTree:
    """Return the policy that copies up to `size` tokens, as many as the batch's longest match."""
    return HybridTree(NOTHING, size)


def remove_lookup(policy: TreePolicy) -> TreePolicy:
    """Return the policy of the head's own tree, without copied text."""
    return policy.head_tree if isinstance(policy, HybridTree) else policy

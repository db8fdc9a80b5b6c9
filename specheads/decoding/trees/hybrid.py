"""Trees with copied text: prompt lookup alone, or joined with a head's own tree."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from specheads.base.model import FrozenBase
from specheads.core.drafter import Drafter, Memory, refuse_scattering
from specheads.core.features import Committed
from specheads.core.tree import TokenTree, refuse_nodes
from specheads.decoding.accept import kept
from specheads.decoding.prompt_lookup import CopyingDrafter, LookupText, PromptLookup
from specheads.decoding.sampling import SamplingState
from specheads.decoding.trees.policies import TreePolicy, root_only


def join_copied(
    tree: TokenTree, copied: Int[Tensor, "batch copied"], size: int, *, trim: bool = False
) -> TokenTree:
    """Return the tree with a path of copied tokens added, sharing the tree's own nodes.

    New nodes begin where the tree's nodes differ from the path, so a (parent, token) pair still
    occurs once, and tokens that both propose count as drafted. Copied tokens are padded with -1.
    Every row gets `size` new nodes; those that its path does not need are absent. With `trim` only
    as many are added as the longest path needs, which synchronises.
    """
    batch, num_nodes = tree.tokens.shape
    device, length = copied.device, copied.shape[1]
    ancestors = tree.ancestors()
    depths = ancestors.sum(-1) - 1
    right = tree.tokens == copied.gather(1, (depths - 1).clamp(0, length - 1))
    shared = kept(tree, right & (depths <= length), ancestors)
    # the shared nodes are one path, so the deepest node is its end
    end = (shared * depths).argmax(-1, keepdim=True)
    places = shared.sum(-1, keepdim=True) - 1 + torch.arange(size, device=device)
    tokens = copied.gather(1, places.clamp(max=length - 1))
    present = (tokens >= 0) & (places < length)
    if trim:
        size = int(present.sum(-1).max())
        tokens, present = tokens[:, :size], present[:, :size]
    below = torch.arange(num_nodes, num_nodes + size, device=device).expand(batch, -1)
    parents = torch.cat([end, below], dim=1)[:, :size].masked_fill(~present, -1)
    # each new node sees the ancestors of the end, and the new nodes down to itself
    seen = ancestors.gather(1, end[..., None].expand(-1, -1, num_nodes)).expand(-1, size, -1)
    own = torch.ones(size, size, dtype=torch.bool, device=device).tril().expand(batch, -1, -1)
    unseen = ancestors.new_zeros(batch, num_nodes, size)
    reach = torch.cat([torch.cat([ancestors, unseen], dim=2), torch.cat([seen, own], dim=2)], dim=1)
    return TokenTree(
        torch.cat([tree.tokens, tokens.clamp(min=0)], dim=1),
        torch.cat([tree.parents, parents], dim=1),
        reach,
        num_copied=tree.num_copied + size,
    )


class Lookup(TreePolicy):
    """A chain of copied tokens, as long as the longest match of the batch.

    Without any match the tree is the root alone, and a step costs as much as the base's. It copies
    at most `depth` tokens, and at most the drafter's own limit.
    """

    def __init__(self, depth: int) -> None:
        self.num_nodes = refuse_nodes(depth + 1, "copied_tokens")
        self.name, self.depth = "lookup", depth

    def grow(
        self, drafter: Drafter, committed: Committed, memory: Any, rows: SamplingState | None = None
    ) -> TokenTree:
        """Copy a chain of tokens."""
        del rows
        assert isinstance(drafter, PromptLookup)
        copied = drafter.copy(committed, memory)
        return join_copied(root_only(committed), copied, self.depth, trim=True)


@dataclass(frozen=True, slots=True)
class HybridMemory:
    """The memories of a head and of prompt lookup."""

    head: Memory | None
    text: LookupText

    def keep(self, rows: Int[Tensor, " kept"]) -> "HybridMemory":
        """Return the memories of these rows."""
        head = None if self.head is None else self.head.keep(rows)
        return HybridMemory(head, self.text.keep(rows))

    def join(self, other: "HybridMemory") -> "HybridMemory":
        """Return the memories of both batches' rows."""
        head = self.head
        if head is not None and other.head is not None:
            head = head.join(other.head)
        return HybridMemory(head, self.text.join(other.text))

    scatter = refuse_scattering


class Hybrid(CopyingDrafter):
    """A head and prompt lookup together; `HybridTree` joins their drafts into one tree."""

    def __init__(self, head: Drafter, lookup: PromptLookup) -> None:
        self.head, self.lookup = head, lookup
        self.depth, self.aux_layers = head.depth + lookup.depth, head.aux_layers
        self.drafted_size = head.drafted_size
        self.most_unread = min(head.most_unread, lookup.most_unread)

    def memory(self, batch: int, capacity: int) -> HybridMemory:
        """Return the memories of both."""
        return HybridMemory(self.head.memory(batch, capacity), self.lookup.memory(batch, capacity))

    def read(self, committed: Committed, memory: HybridMemory) -> None:
        """Let both read the committed tokens."""
        self.head.read(committed, memory.head)
        self.lookup.read(committed, memory.text)


class HybridTree(TreePolicy):
    """A head's own tree joined with copied text, so that one forward verifies both.

    `inner` grows the head's tree, and up to `size` nodes are added for copied tokens. A copied
    token that the head drafts too needs no node and leaves room for another one. With a size of
    zero the text is only stored. If `inner` drafts nothing, the tree is copied text alone, and the
    head reads nothing. `trim` leaves out added nodes that no row needs, which saves time if a
    forward's time grows with its nodes but gives up a static shape. None trims on a CPU.

    Source: Saxena 2023, prompt lookup, for what is copied; the union of drafts of several
    sources in one verified tree is that of Miao et al. 2023, SpecInfer, arXiv:2305.09781.
    """

    def __init__(self, inner: TreePolicy, size: int, *, trim: bool | None = None) -> None:
        self.name = f"{inner.name}+lookup"
        self.inner, self.size, self.trim = inner, size, trim
        self.num_nodes = refuse_nodes(inner.num_nodes + size, "copied_tokens")
        # copied tokens that the inner tree contains leave room for as many more
        self.depth = self.copied = inner.depth + size
        self.num_guesses = inner.num_guesses

    @property
    def own_depth(self) -> int:
        """Levels of the head's own tree."""
        return self.inner.own_depth

    def grow(
        self, drafter: Drafter, committed: Committed, memory: Any, rows: SamplingState | None = None
    ) -> TokenTree:
        """Draft with the head, copy, and join the two."""
        assert isinstance(drafter, Hybrid)
        if not self.size:
            drafter.lookup.read(committed, memory.text)
            return self.inner.grow(drafter.head, committed, memory.head, rows)
        lookup = drafter.lookup
        # tokens that the head does not read now will come again, for both
        copy = lookup.copy if self.own_depth else lookup.peek
        copied = copy(committed, memory.text)
        tree = self.inner.grow(drafter.head, committed, memory.head, rows)
        trim = copied.device.type == "cpu" if self.trim is None else self.trim
        return join_copied(tree, copied, self.size, trim=trim)


def own_tree(tree: TreePolicy) -> TreePolicy:
    """Return the policy of the drafter's own tree, without copied text."""
    return tree.inner if isinstance(tree, HybridTree) else tree


def lookup_for(tree: TreePolicy, base: FrozenBase) -> PromptLookup:
    """Return the prompt lookup for a tree with copied text."""
    return PromptLookup(base.vocab_size, tree.copied, device=base.device)


def beside_lookup(drafter: Drafter, tree: TreePolicy, base: FrozenBase) -> Drafter:
    """Return the drafter, together with prompt lookup if the tree has copied text."""
    if not tree.copied or isinstance(drafter, Hybrid):
        return drafter
    return Hybrid(drafter, lookup_for(tree, base))

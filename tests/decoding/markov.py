"""Drafters whose guess depends on the last token or the level alone, and trees from them."""

import torch
from jaxtyping import Float
from torch import Tensor

from specheads.core.drafter import Drafter
from specheads.core.features import Committed, Features
from specheads.core.tree import TokenTree
from specheads.decoding.sampling import SamplingState
from specheads.decoding.trees.policies import TreePolicy


class Markov(Drafter):
    """Guesses the next token from the last one by a table of logits."""

    def __init__(self, table: Float[Tensor, "vocab vocab"], depth: int) -> None:
        self.table, self.depth = table, depth

    def begin(self, committed: Committed, memory: None) -> tuple[Tensor, None]:
        del memory
        return self.table[committed.root()], None

    def extend(self, state: None, tokens: Tensor, parents: Tensor) -> tuple[Tensor, None]:
        del state, parents
        return self.table[tokens], None


class Levels(Drafter):
    """Gives the same logits at every node of a level, as Medusa does; column 0 is token `first`."""

    def __init__(self, logits: Float[Tensor, "batch level vocab"], first: int = 0) -> None:
        self.logits, self.depth, self.first = logits, logits.shape[1], first

    def to_tokens(self, drafted: Tensor) -> Tensor:
        return drafted + self.first

    def begin(self, committed: Committed, memory: None) -> tuple[Tensor, int]:
        del memory
        return self.logits[:, :1].expand(len(committed.counts), -1, -1), 1

    def extend(self, state: int, tokens: Tensor, parents: Tensor) -> tuple[Tensor, int]:
        assert tokens.shape == parents.shape
        logits = self.logits[:, state : state + 1].expand(*tokens.shape, -1)
        return logits, state + 1


def grow(
    policy: TreePolicy, drafter: Drafter, roots: list[int], sampling: SamplingState | None = None
) -> TokenTree:
    """Grow trees after rows that committed one position; a second one is padding."""
    tokens = torch.tensor([[root, 99] for root in roots])
    features = Features(torch.zeros(len(roots), 2, 4))
    committed = Committed(features, tokens, torch.ones(len(roots), dtype=torch.long))
    return policy.grow(drafter, committed, None, sampling)

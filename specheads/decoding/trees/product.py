"""The MLP speculator's own way to grow: all products of a few guesses a level, best paths first."""

from collections.abc import Sequence
from typing import Any

import torch

from specheads.core.bounds import level_sizes
from specheads.core.drafter import Drafter
from specheads.core.errors import InputError
from specheads.core.features import Committed
from specheads.core.tree import TokenTree, from_paths
from specheads.decoding.acceptance.sampling import Rows
from specheads.decoding.trees.coupling import coupled
from specheads.decoding.trees.policies import TreePolicy


class Product(TreePolicy):
    """The best complete paths among all products of the best guesses of each level.

    Every node of a level is continued, so the drafter reads the whole product. Paths enter the
    tree by their probability, whole as long as there is room, and share what they share: n
    paths of depth k are in it for sure when it has 1 + n * k nodes, and often with fewer.

    `branches` are the guesses at each node of a level, first level first; `num_nodes` counts the
    root too, and is at most the nodes of the product.

    Source: Wertheimer et al. 2024, arXiv:2404.19124; `generate_suffixes` of
    foundation-model-stack/fms-extras, which counts candidates where this counts nodes.
    """

    def __init__(self, branches: Sequence[int], num_nodes: int) -> None:
        levels = level_sizes(branches)
        most = sum(levels)
        if min(branches, default=0) < 1 or not 2 <= num_nodes <= most:
            raise InputError(
                f"a product tree needs at least 1 branch for each level and 2 to {most} nodes, got "
                f"{list(branches)} and {num_nodes}; set tree.branches, tree.num_nodes"
            )
        self.name = "product"
        self.branches, self.num_nodes, self.depth = tuple(branches), num_nodes, len(branches)
        self.num_guesses, self.num_answers = max(branches), max(levels[:-1])

    def grow(
        self, drafter: Drafter, committed: Committed, memory: Any, rows: Rows | None = None
    ) -> TokenTree:
        """Draft the whole product, then keep the beginnings of its best paths."""
        drafter = coupled(drafter, rows)
        logits, state = drafter.begin(committed, memory)
        paths = committed.root()[..., None]
        score = torch.zeros(paths.shape[:2], dtype=logits.dtype, device=logits.device)
        for level, branch in enumerate(self.branches):
            best, guesses = logits.log_softmax(-1).topk(branch, dim=-1)
            score = (score[..., None] + best).flatten(1)
            above = torch.arange(paths.shape[1], device=paths.device).repeat_interleave(branch)
            drafted = drafter.to_tokens(guesses).flatten(1)
            paths = torch.cat([paths[:, above], drafted[..., None]], dim=-1)
            if level + 1 < self.depth:
                logits, state = drafter.extend(state, drafted, above.expand_as(drafted))
        # each path brings a node of its own at least, so no more of them can matter
        order = score.topk(min(self.num_nodes, score.shape[1]), dim=1).indices
        return from_paths(paths.take_along_dim(order[..., None], dim=1), self.num_nodes)

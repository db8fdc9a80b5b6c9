"""Drafts drawn from the drafter's own law: what speculative sampling tests by rejection."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specheads.core.drafter import Drafter, Memory
from specheads.core.features import Committed
from specheads.core.tree import Drawn, TokenTree
from specheads.decoding.acceptance.sampling import Rows
from specheads.decoding.trees.early_stop import Stop, share
from specheads.decoding.trees.policies import Static, TreePolicy, shaped


class Sampled(TreePolicy):
    """Tokens drawn from the drafter's own law, without replacement: what rejection tests.

    Every node of a level has the same number of children; `(1, 1, 1)` is the chain of
    speculative sampling. The drafter's law is made from its logits as the base's law is made from
    the base's. Rows at temperature zero get the drafter's best guesses.

    Args:
        branches: Children of every node, a number for each level, the root's first.
        confidence: As in `Static`.

    Raises:
        ValueError: There is no level or a level without children, or `confidence` is no
            probability.

    Source: Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2024, arXiv:2402.12374.
    """

    def __init__(self, branches: Sequence[int], confidence: float = 0.0) -> None:
        if not branches or min(branches) < 1:
            raise ValueError(
                f"a sampled tree needs a level, and a child a node at least, got {branches}"
            )
        self.name, self.branches, self.confidence = "sampled", tuple(branches), share(confidence)
        paths = [
            path
            for depth in range(1, len(branches) + 1)
            for path in itertools.product(*map(range, branches[:depth]))
        ]
        self._static = Static(paths)
        self.num_nodes, self.depth = self._static.num_nodes, self._static.depth

    def grow(
        self,
        drafter: Drafter,
        committed: Committed,
        memory: Memory | None,
        rows: Rows | None = None,
    ) -> TokenTree:
        """Draw level by level."""
        assert rows is not None
        logits, state = drafter.begin(committed, memory)
        drafted, laws = [committed.root()], []
        paths = drafted[0][..., None]
        batch, device = len(paths), paths.device
        stop = Stop(self.confidence, batch, device)
        for level, width in enumerate(self.branches):
            logits = _over_vocabulary(drafter, logits, rows.vocab_size)
            laws.append(rows.law(logits, paths))
            drawn = rows.draft(logits, laws[-1], level, width).flatten(1)
            drafted.append(drawn)
            parents = torch.arange(logits.shape[1], device=drawn.device).repeat_interleave(width)
            stop.level(logits, drawn, parents, slice(None))
            if level + 1 == self.depth or stop.everywhere():
                break
            paths = torch.cat([paths[:, parents], drawn[..., None]], dim=-1)
            logits, state = drafter.extend(state, drawn, parents.expand(batch, -1))
        tree = shaped(drafted, self._static.shape(device), stop)
        how = Drawn(self.branches[: len(laws)], torch.cat(laws, dim=1))
        return replace(tree, drawn=how)


def _over_vocabulary(drafter: Drafter, logits: Tensor, vocab_size: int) -> Tensor:
    """Return logits over the base's vocabulary; what cannot be drafted has no chance."""
    columns = torch.arange(logits.shape[-1], device=logits.device)
    if logits.shape[-1] == vocab_size:
        return logits
    out = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
    out[..., drafter.to_tokens(columns)] = logits
    return out

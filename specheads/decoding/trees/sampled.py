"""Drafts drawn from the drafter's own distribution: what speculative sampling tests."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specheads.core.bounds import level_sizes
from specheads.core.drafter import Drafter
from specheads.core.errors import InputError
from specheads.core.features import Committed
from specheads.core.tree import Drawn, TokenTree
from specheads.decoding.acceptance import noise
from specheads.decoding.acceptance.sampling import Rows
from specheads.decoding.trees.coupling import over_vocabulary
from specheads.decoding.trees.early_stop import Stop
from specheads.decoding.trees.policies import Static, TreePolicy

_NO_CHANCE = -2000.0
"""Stands for the logarithm of zero: below that of any float, noise included, and not infinite,
so that noise still orders tokens without a chance."""


class Sampled(TreePolicy):
    """Tokens drawn from the drafter's own distribution, without replacement: what rejection tests.

    `branches` are the children of every node of a level, the root's first; `(1, 1, 1)` is the
    chain of speculative sampling. Drafter's and base's probs are made from their logits alike.
    Rows at temperature zero get the drafter's best guesses. `confidence` is that of `Static`.

    Source: Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2024, arXiv:2402.12374.
    """

    def __init__(self, branches: Sequence[int], confidence: float = 0.0) -> None:
        if not branches or min(branches) < 1:
            raise InputError(
                f"a sampled tree needs a level, and a child a node at least, got {branches}"
            )
        level_sizes(branches)
        self.name, self.branches, self.confidence = "sampled", tuple(branches), confidence
        paths = [
            path
            for depth in range(1, len(branches) + 1)
            for path in itertools.product(*map(range, branches[:depth]))
        ]
        self._static = Static(paths, confidence=confidence)
        self.num_nodes, self.depth = self._static.num_nodes, self._static.depth
        self.num_guesses, self.num_answers = max(branches), self._static.num_answers

    def grow(
        self, drafter: Drafter, committed: Committed, memory: Any, rows: Rows | None = None
    ) -> TokenTree:
        """Draw level by level."""
        assert rows is not None
        logits, state = drafter.begin(committed, memory)
        drafted, probs = [committed.root()], []
        paths = drafted[0][..., None]
        batch, device = len(paths), paths.device
        stop = Stop(drafter, self.confidence, batch, device)
        for level, width in enumerate(self.branches):
            logits = over_vocabulary(drafter, logits, rows.vocab_size)
            probs.append(rows.probs(logits, paths))
            drawn = _drawn(rows, logits, probs[-1], level, width).flatten(1)
            drafted.append(drawn)
            parents = torch.arange(logits.shape[1], device=drawn.device).repeat_interleave(width)
            stop.level(logits, state, drawn, parents, None)
            if level + 1 == self.depth or stop.everywhere():
                break
            paths = torch.cat([paths[:, parents], drawn[..., None]], dim=-1)
            logits, state = drafter.extend(state, drawn, parents.expand(batch, -1))
        how = Drawn(self.branches[: len(probs)], torch.cat(probs, dim=1))
        return replace(self._static.shaped(drafted, stop), drawn=how)


def _drawn(
    rows: Rows,
    logits: Float[Tensor, "batch node vocab"],
    probs: Float[Tensor, "batch node vocab"],
    level: int,
    count: int,
) -> Int[Tensor, "batch node path"]:
    """Return tokens drawn without replacement after each node, in the order of drawing.

    Nodes are those of one level, `level` edges below the root. A greedy row gets the likeliest
    tokens instead. Where too few have a chance, those without follow in random order.
    """
    order = logits.double().log_softmax(-1)
    if rows.draws:
        keys = noise.bits(rows.seeds, rows.lengths + level + 1, noise.DRAFT)
        random = noise.gumbel(keys[:, None], logits.shape[-1])
        order = torch.where(rows.drawing[:, None, None], random, order)
    chance = probs.double().log().clamp(min=_NO_CHANCE)
    return (chance + order).topk(count, dim=-1).indices

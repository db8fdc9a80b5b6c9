"""The tree of the most predicted tokens a second, for a batch and a context."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from specheads.decoding.cost import StepCost
from specheads.decoding.trees import policies
from specheads.measure.counts import DepthCounts
from specheads.measure.replay import replay
from specheads.measure.tune.acceptance import path_counts, positional
from specheads.measure.tune.grow import follow, sequoia

SIZES = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)
"""Nodes of trees that are tried, root included, and any largest size that is asked for."""

CHANCE = 0.005
"""Part of a speed-up that replay does not tell apart: where the loop drafts from shifts with every
tree, so that not even a larger one always has more."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """A tree and what it would give."""

    tree: policies.Static
    tokens_per_forward: float
    speedup: float


def candidates(ranks: Sequence[Tensor], depth: int, max_nodes: int) -> list[policies.Static]:
    """Return no draft, the chains, and trees of every size: by followed paths, and by rates.

    Ranks are those of texts, by `guess_ranks` with width `acceptance.WIDTH`.
    """
    counts, rates = path_counts(ranks), positional(ranks)
    places = max(sum(map(len, ranks)), 1)
    shares = {path: count / places for path, count in counts.items()}
    trees = [policies.NOTHING]
    trees += [policies.chain(length) for length in range(1, min(depth, max_nodes - 1) + 1)]
    known = {tree.paths for tree in trees}
    for size in sorted({*(one for one in SIZES if one < max_nodes), max_nodes}):
        grown = follow(shares, rates, size, depth), sequoia(rates, size, depth + 1)[1]
        for paths in grown:
            tree = policies.Static(paths, "tree")
            if tree.paths not in known:
                known.add(tree.paths)
                trees.append(tree)
    return trees


def predict(
    trees: Sequence[policies.Static],
    ranks: Sequence[Tensor],
    cost: StepCost,
    batch: int,
    context: int | float,
) -> list[Predicted]:
    """Return what each tree would give on texts: exact replay against the cost of its steps.

    The texts are not those that the trees were grown from: on those a tree looks too good.
    """
    alone = cost.seconds(batch, context, 1, 0)
    out = []
    for tree in trees:
        tokens = replayed(tree, ranks)
        seconds = cost.seconds(batch, context, tree.num_nodes, tree.depth)
        out.append(Predicted(tree, tokens, tokens * alone / seconds))
    return out


def replayed(tree: policies.Static, ranks: Sequence[Tensor]) -> float:
    """Return the tokens a forward that a tree gives on texts, 1.0 for none."""
    counts = [replay(rows, tree) for rows in ranks]
    return DepthCounts.total(counts, tree.depth).tokens_per_forward


def best(found: Sequence[Predicted]) -> Predicted:
    """Return the fastest; of those that chance alone tells apart the one of most nodes.

    No draft is among them, and is only left for what is faster.
    """
    fastest = max(found, key=lambda one: one.speedup)
    if fastest.speedup <= 1:
        return min(found, key=lambda one: one.tree.num_nodes)
    alike = [one for one in found if one.speedup >= fastest.speedup * (1 - CHANCE)]
    return max(alike, key=lambda one: one.tree.num_nodes)

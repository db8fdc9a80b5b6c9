"""Candidate trees from measured acceptance, and their predicted speed-up.

Trees are built by Sequoia's dynamic programme from rank rates, and best-first from the rank paths
that the base's own text follows. Their acceptance is replayed exactly; their step time is fitted.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, takewhile

import torch
from torch import Tensor

from specheads.decoding.cost import StepCost
from specheads.decoding.prompt_lookup import MAX_NGRAM
from specheads.decoding.trees import policies
from specheads.decoding.trees.tuned import MatchRates, PathRates
from specheads.measure.counts import DepthCounts
from specheads.measure.offline import Copied, RankPath, replay

WIDTH = 8
"""Largest number of children of a node."""

MOST_PATHS = 256
"""Number of paths per context in tuned.json, the most frequent first."""

SIZES = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)
"""Node counts of candidate trees, root included; the largest size in the settings is added."""

CHANCE = 0.005
"""Relative speed-up that replay cannot resolve: each tree drafts from other positions of the text,
so that even a larger tree does not always accept more."""


# --- acceptance --------------------------------------------------------------------------------


def path_counts(ranks: Sequence[Tensor]) -> Counter[RankPath]:
    """Return how many positions of texts are followed by each rank path.

    `ranks` come from `guess_ranks` with width `WIDTH`. A path is never more frequent than its
    prefix.
    """
    out: Counter[RankPath] = Counter()
    for row in torch.cat(list(ranks)).tolist():
        guessed = takewhile(lambda rank: 0 <= rank < WIDTH, row)
        out.update(accumulate((rank,) for rank in guessed))
    return out


def path_rates(ranks: Sequence[Tensor], context: int) -> PathRates:
    """Return the share of positions that each path follows."""
    places = sum(map(len, ranks))
    ordered = sorted(path_counts(ranks).items(), key=lambda one: (-one[1], len(one[0]), one[0]))
    return PathRates(
        context=context,
        places=places,
        paths={".".join(map(str, path)): n / max(places, 1) for path, n in ordered[:MOST_PATHS]},
    )


def conditional(ranks: Sequence[Tensor]) -> list[float]:
    """Return how often the best guess of each depth is right if all above it are."""
    text = torch.cat(list(ranks))
    right, out = torch.ones(len(text), dtype=torch.bool), []
    for column in text.T:
        reached = right & (column >= 0)
        right = reached & (column == 0)
        out.append(right.sum().item() / max(reached.sum().item(), 1))
    return out


def positional(ranks: Sequence[Tensor]) -> list[float]:
    """Return how often each rank is the right one after a right token, at any depth."""
    counts: Counter[int] = Counter()
    reached = 0
    for row in torch.cat(list(ranks)).tolist():
        for rank in row:
            if rank < 0:
                break
            reached += 1
            counts[rank] += 1
            if rank >= WIDTH:
                break
    deepest = max(counts.keys() - {WIDTH}, default=-1)
    return [counts[rank] / max(reached, 1) for rank in range(1 + deepest)]


def match_rates(copies: Sequence[Copied]) -> list[MatchRates]:
    """Return how often prompt lookup finds n-grams of each length, and is right then.

    The positions are the steps of a loop that copies in every step and skips what it accepts. A
    mean over all positions would count repetitive text too often.
    """
    size, steps = copies[0].size, 0
    found: list[list[list[int]]] = [[] for _ in range(MAX_NGRAM)]
    for one in copies:
        place = 0
        while place < len(one.right):
            right, length = one.right[place], one.length[place]
            # tokens after the end of the text are unknown
            rejected = right < min(length, len(one.right) - place)
            if one.matched[place]:
                # a right token has rank 0, as the best guess has
                step = [0] * right + [1] * rejected + [-1] * size
                found[one.matched[place] - 1].append(step[:size])
            steps += 1
            place += 1 + min(right, one.size)
    return [
        MatchRates(
            share=len(rows) / max(steps, 1),
            rates=conditional([torch.tensor(rows, dtype=torch.long).reshape(-1, size)]),
        )
        for rows in found
    ]


# --- building trees ----------------------------------------------------------------------------


def most_followed(
    shares: Mapping[RankPath, float], rates: Sequence[float], size: int, depth: int
) -> list[RankPath]:
    """Return the paths that text follows most; unseen paths are ordered by positional rates.

    It uses joint shares and no products: products are too low if hard tokens come in bursts.

    Source: Cai et al. 2024, arXiv:2401.10774, section 2.3.3.
    """

    def value(path: RankPath) -> float:
        worth = 1e-9
        for rank in path:
            worth *= rates[rank]
        return shares.get(path, 0.0) + worth

    return _grown(value, size, depth, len(rates))


def _grown(value: Callable[[RankPath], float], size: int, depth: int, width: int) -> list[RankPath]:
    """Take the best path whose prefix was taken, until the tree has its size."""
    pending: list[tuple[float, int, RankPath]] = []
    paths: list[RankPath] = []

    def offer(path: RankPath) -> None:
        heapq.heappush(pending, (-value(path), len(path), path))

    if depth:
        for rank in range(width):
            offer((rank,))
    while pending and len(paths) < size - 1:
        path = heapq.heappop(pending)[2]
        paths.append(path)
        if len(path) < depth:
            for rank in range(width):
                offer((*path, rank))
    return paths


BestSubtree = Callable[[int, int], tuple[float, tuple[int, ...]]]
"""(nodes, levels) -> value of the best tree, and the number of nodes below each child."""


def sequoia(rates: Sequence[float], size: int, levels: int) -> tuple[float, list[RankPath]]:
    """Return the best tree's expected tokens per forward, and its rank paths.

    Args:
        rates: Probability that the guess of each rank is right, the same after every node, in any
            order.
        size: Nodes, root included; fewer if the levels have no room for more.
        levels: Levels of nodes, the root's included.

    Source: Chen et al. 2024, arXiv:2402.12374, section 4.1: the child of rank b owns y nodes, and
    T(m, l, b) = max over y of T(m - y, l, b - 1) + p_b max over b' of T(y, l - 1, b').
    """

    @cache
    def whole(nodes: int, left: int) -> tuple[float, tuple[int, ...]]:
        """Return the best value of exactly so many nodes, and how many each child owns."""
        found = ((first(nodes, left, count), count) for count in range(len(rates) + 1))
        (value, _), count = max(found, key=lambda one: one[0][0])
        owned = []
        while count:
            taken = first(nodes, left, count)[1]
            owned.append(taken)
            nodes, count = nodes - taken, count - 1
        return value, tuple(reversed(owned))

    @cache
    def first(nodes: int, left: int, count: int) -> tuple[float, int]:
        """Return the best value with the first `count` ranks, and what the last child owns."""
        if nodes < 1 or left < 1:
            return float("-inf"), 0
        if count == 0:
            return (1.0 if nodes == 1 else float("-inf")), 0
        found = [(first(nodes, left, count - 1)[0], 0)]
        if left > 1:
            found += [
                (
                    first(nodes - taken, left, count - 1)[0]
                    + rates[count - 1] * whole(taken, left - 1)[0],
                    taken,
                )
                for taken in range(1, nodes)
            ]
        return max(found)

    best = max(range(1, size + 1), key=lambda nodes: whole(nodes, levels)[0])
    return whole(best, levels)[0], _paths(whole, best, levels, ())


def _paths(whole: BestSubtree, nodes: int, levels: int, above: RankPath) -> list[RankPath]:
    """Return the paths below a node that owns so many nodes, itself included."""
    out = []
    for rank, taken in enumerate(whole(nodes, levels)[1]):
        if taken:
            path = (*above, rank)
            out += [path, *_paths(whole, taken, levels - 1, path)]
    return out


# --- prediction --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Predicted:
    """A tree with its predicted speed-up."""

    tree: policies.Static
    tokens_per_forward: float
    speedup: float


def candidate_trees(ranks: Sequence[Tensor], depth: int, max_nodes: int) -> list[policies.Static]:
    """Return the empty tree, the chains, and trees of every size by paths and by rates.

    `ranks` come from `guess_ranks` with width `WIDTH`.
    """
    counts, rates = path_counts(ranks), positional(ranks)
    places = max(sum(map(len, ranks)), 1)
    shares = {path: count / places for path, count in counts.items()}
    trees = [policies.NOTHING]
    trees += [policies.chain(length) for length in range(1, min(depth, max_nodes - 1) + 1)]
    known = {tree.paths for tree in trees}
    for size in sorted({*(one for one in SIZES if one < max_nodes), max_nodes}):
        grown = most_followed(shares, rates, size, depth), sequoia(rates, size, depth + 1)[1]
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
    """Return the predicted speed-up of each tree: exact replay and the fitted step time.

    `ranks` must come from other texts than the trees, on which a tree looks too good.
    """
    alone = cost.seconds(batch, context, 1, 0)
    out = []
    for tree in trees:
        tokens = replayed(tree, ranks)
        seconds = cost.seconds(batch, context, tree.num_nodes, tree.depth)
        out.append(Predicted(tree, tokens, tokens * alone / seconds))
    return out


def replayed(tree: policies.Static, ranks: Sequence[Tensor]) -> float:
    """Return the tokens per forward of a tree on texts, 1.0 for the empty tree."""
    counts = [replay(rows, tree) for rows in ranks]
    return DepthCounts.total(counts, tree.depth).tokens_per_forward


def best(found: Sequence[Predicted]) -> Predicted:
    """Return the fastest tree; among those within `CHANCE` of it the one with most nodes.

    The empty tree is among them and wins unless another is faster.
    """
    fastest = max(found, key=lambda one: one.speedup)
    if fastest.speedup <= 1:
        return min(found, key=lambda one: one.tree.num_nodes)
    alike = [one for one in found if one.speedup >= fastest.speedup * (1 - CHANCE)]
    return max(alike, key=lambda one: one.tree.num_nodes)

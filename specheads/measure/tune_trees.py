"""Candidate trees from measured acceptance, and their predicted speed-up.

Trees are built from rank rates (Sequoia) and from the rank paths that the base's own text follows.
Their acceptance is replayed exactly; their step time is fitted.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, takewhile
from math import prod

import torch
from torch import Tensor

from specheads.decoding.cost import StepCost
from specheads.decoding.prompt_lookup import MAX_NGRAM
from specheads.decoding.trees import policies
from specheads.decoding.trees.tuned import MatchRates
from specheads.measure.counts import DepthCounts
from specheads.measure.offline import Copied, RankPath, replay

WIDTH = 8
"""Largest number of children of a node."""

SIZES = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)
"""Node counts of candidate trees, root included; the largest size in the settings is added."""


# --- acceptance --------------------------------------------------------------------------------


def path_shares(ranks: Sequence[Tensor]) -> dict[RankPath, float]:
    """Return the share of positions of texts that each rank path follows.

    `ranks` come from `guess_ranks` with width `WIDTH`. A path is never more frequent than its
    prefix.
    """
    counts: Counter[RankPath] = Counter()
    rows = torch.cat(list(ranks)).tolist()
    for row in rows:
        guessed = takewhile(lambda rank: 0 <= rank < WIDTH, row)
        counts.update(accumulate((rank,) for rank in guessed))
    return {path: count / len(rows) for path, count in counts.items()}


def positional(ranks: Sequence[Tensor]) -> list[float]:
    """Return how often each rank is the right one after a right token, at any depth."""
    counts = [0] * WIDTH
    reached = 0
    for row in torch.cat(list(ranks)).tolist():
        for rank in takewhile(lambda rank: rank >= 0, row):
            reached += 1
            if rank >= WIDTH:
                break
            counts[rank] += 1
    # a head may have fewer guesses than WIDTH
    while counts and not counts[-1]:
        counts.pop()
    return [count / reached for count in counts]


def match_rates(copies: Sequence[Copied]) -> list[MatchRates]:
    """Return how often prompt lookup finds n-grams of each length, and is right then.

    The positions are the steps of a loop that copies in every step and skips what it accepts. A
    mean over all positions would count repetitive text too often.
    """
    size, steps = copies[0].size, 0
    found = [DepthCounts.zeros(size) for _ in range(MAX_NGRAM)]
    for one in copies:
        place = 0
        while place < len(one.right):
            right, length = min(one.right[place], size), min(one.length[place], size)
            if one.matched[place]:
                # tokens after the end of the text are unknown
                rejected = right < min(length, len(one.right) - place)
                found[one.matched[place] - 1].add(right, drafted_beyond=rejected)
            steps += 1
            place += 1 + right
    return [
        MatchRates(
            share=one.forwards / max(steps, 1),
            rates=[
                right / max(offered, 1)
                for right, offered in zip(one.accepted, one.offered, strict=True)
            ],
        )
        for one in found
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
        return shares.get(path, 0.0) + 1e-9 * prod(rates[rank] for rank in path)

    return _likeliest(value, size, depth, len(rates))


def sequoia(rates: Sequence[float], size: int, depth: int) -> list[RankPath]:
    """Return the paths of the tree with the most expected tokens per forward.

    The guess of each rank is right with the same probability after every node. The best tree of a
    size then consists of the likeliest paths. Sequoia's dynamic programme finds the same value.

    Source: Chen et al. 2024, arXiv:2402.12374, section 4.1.
    """
    return _likeliest(lambda path: prod(rates[rank] for rank in path), size, depth, len(rates))


def _likeliest(
    value: Callable[[RankPath], float], size: int, depth: int, width: int
) -> list[RankPath]:
    """Take the best path whose prefix was taken, until the tree has `size` nodes with the root."""
    pending: list[tuple[float, int, RankPath]] = []
    paths: list[RankPath] = [()]
    while len(paths) < size:
        if len(paths[-1]) < depth:
            for longer in [(*paths[-1], rank) for rank in range(width)]:
                heapq.heappush(pending, (-value(longer), len(longer), longer))
        if not pending:
            break
        paths.append(heapq.heappop(pending)[2])
    return paths[1:]


# --- prediction --------------------------------------------------------------------------------


def candidate_trees(ranks: Sequence[Tensor], depth: int, max_nodes: int) -> list[policies.Static]:
    """Return the chains, and trees of every size by paths and by rates.

    `ranks` come from `guess_ranks` with width `WIDTH`.
    """
    shares, rates = path_shares(ranks), positional(ranks)
    trees = [policies.chain(length) for length in range(1, min(depth, max_nodes - 1) + 1)]
    for size in [*(one for one in SIZES if one < max_nodes), max_nodes]:
        for paths in most_followed(shares, rates, size, depth), sequoia(rates, size, depth):
            trees.append(policies.Static(paths, "tree"))
    distinct: dict[tuple[RankPath, ...], policies.Static] = {}
    for tree in trees:
        distinct.setdefault(tree.paths, tree)
    return [tree for tree in distinct.values() if tree.depth]


def predict(
    tree: policies.Static,
    ranks: Sequence[Tensor],
    cost: StepCost,
    batch: int,
    context: int | float,
) -> float:
    """Return the predicted speed-up of a tree: exact replay and the fitted step time.

    `ranks` must come from other texts than the tree, on which it looks too good.
    """
    counts = DepthCounts.total([replay(rows, tree) for rows in ranks], tree.depth)
    alone = cost.seconds(batch, context, 1, 0)
    seconds = cost.seconds(batch, context, tree.num_nodes, tree.depth)
    return counts.tokens_per_forward * alone / seconds

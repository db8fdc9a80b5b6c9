"""How often the base's own text follows the head's guesses, by rank path."""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, takewhile

import torch
from torch import Tensor

from specheads.decoding.prompt_lookup import MAX_NGRAM
from specheads.decoding.trees.tuned import MatchRates, PathRates
from specheads.measure.replay import Copied, Path

WIDTH = 8
"""Guesses a node may have as children."""

MOST_PATHS = 256
"""Paths that tuned.json names of a context, the most followed."""


def path_counts(ranks: Sequence[Tensor]) -> Counter[Path]:
    """Return how many places of texts are followed by each rank path.

    Ranks are those of texts, by `guess_ranks` with width `WIDTH`. A path is never more frequent
    than its beginning.
    """
    out: Counter[Path] = Counter()
    for row in torch.cat(list(ranks)).tolist():
        guessed = takewhile(lambda rank: 0 <= rank < WIDTH, row)
        out.update(accumulate((rank,) for rank in guessed))
    return out


def path_rates(ranks: Sequence[Tensor], context: int) -> PathRates:
    """Return the shares of the places that are followed by each path."""
    places = sum(map(len, ranks))
    ordered = sorted(path_counts(ranks).items(), key=lambda one: (-one[1], len(one[0]), one[0]))
    return PathRates(
        context=context,
        places=places,
        paths={".".join(map(str, path)): n / max(places, 1) for path, n in ordered[:MOST_PATHS]},
    )


def conditional(ranks: Sequence[Tensor]) -> list[float]:
    """Return how often the best guess of each depth is right where all above it are."""
    text = torch.cat(list(ranks))
    right, out = torch.ones(len(text), dtype=torch.bool), []
    for column in text.T:
        asked = right & (column >= 0)
        right = asked & (column == 0)
        out.append(right.sum().item() / max(asked.sum().item(), 1))
    return out


def match_rates(copies: Sequence[Copied]) -> list[MatchRates]:
    """Return how often one, two, ... tokens stood before, and how often what follows is right then.

    Steps are those of a loop that copies in each, and what is copied is stepped over: of all places
    far more lie in text that repeats itself.
    """
    size, steps = copies[0].size, 0
    found: list[list[list[int]]] = [[] for _ in range(MAX_NGRAM)]
    for one in copies:
        place = 0
        while place < len(one.right):
            right, length = one.right[place], one.length[place]
            # nothing is asked for beyond the end of a text
            refused = right < min(length, len(one.right) - place)
            if one.matched[place]:
                # right is 0, as the best guess is
                step = [0] * right + [1] * refused + [-1] * size
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


def positional(ranks: Sequence[Tensor]) -> list[float]:
    """Return how often each rank is the right one after a right token, at any depth."""
    counts: Counter[int] = Counter()
    asked = 0
    for row in torch.cat(list(ranks)).tolist():
        for rank in row:
            if rank < 0:
                break
            asked += 1
            counts[rank] += 1
            if rank >= WIDTH:
                break
    return [
        counts[rank] / max(asked, 1) for rank in range(1 + max(counts.keys() - {WIDTH}, default=-1))
    ]

"""How many drafts are right at each place of a request's text: drawn from rates, or recorded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import TypeVar

import numpy as np

from specheads.core.errors import InputError
from specheads.core.paths import local_path
from specheads.data.jsonl import Row, read_jsonl
from specheads.decoding.trees.tuned import MatchRates

Accepted = Callable[[int, int], Sequence[int]]
"""Of a request's number and its new tokens, how many drafts are right after each of them.

The same for whatever drafts: of those that draft less deep as many as they draft, at most.
"""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Copy:
    """What there is to copy at a place of a text."""

    matched: int = 0
    """Tokens before it that stood in the text before; without any nothing is copied."""
    right: int = 0
    """Copied tokens that are right."""


Copies = Callable[[int, int], Sequence[Copy]]
"""The same of what there is to copy after each of them."""


def drawn(rates: Sequence[float], seed: int = 0) -> Accepted:
    """Return lengths drawn from conditional rates by depth, each place by itself."""
    chances = np.array(rates, dtype=float)

    def lengths(request: int, new_tokens: int) -> list[int]:
        random = np.random.default_rng((seed, request)).random((new_tokens, len(chances)))
        return (random < chances).cumprod(axis=1).sum(axis=1).astype(int).tolist()

    return lengths


def drawn_copies(matches: Sequence[MatchRates], seed: int = 0) -> Copies:
    """Return what there is to copy as often as that was found, each place by itself."""
    chances = [one.share for one in matches]
    rights = [drawn(one.rates, seed) for one in matches]

    def copies(request: int, new_tokens: int) -> list[Copy]:
        # of other numbers than what is right
        random = np.random.default_rng((seed, request, 1)).random(new_tokens)
        found = np.searchsorted(np.cumsum(chances), random, side="right")
        right = [one(request, new_tokens) for one in rights]
        return [
            Copy(place + 1, right[place][token]) if place < len(matches) else Copy()
            for token, place in enumerate(found.tolist())
        ]

    return copies


def recorded(texts: Sequence[Sequence[T]]) -> Callable[[int, int], Sequence[T]]:
    """Return lengths as they were recorded along texts; a request gets one, from its beginning.

    There are as many texts as there are, over and over, and so it is with the places of one.
    """
    if not texts or not all(texts):
        raise InputError("recorded acceptance needs a text, and a place in each, got none")

    def lengths(request: int, new_tokens: int) -> list[T]:
        return list(islice(cycle(texts[request % len(texts)]), new_tokens))

    return lengths


NOTHING: Copies = drawn_copies(())
"""There is nothing to copy anywhere."""


def read_accepted(path: str | Path) -> list[list[int]]:
    """Return what a .jsonl file recorded, a text a line: {"accepted": [2, 0, 1]}."""
    return [_lengths(row, where) for where, row in read_jsonl(local_path(path))]


def _lengths(row: Row, where: str) -> list[int]:
    found = row.get("accepted")
    if (
        not isinstance(found, list)
        or not found
        or not all(type(one) is int and one >= 0 for one in found)
    ):
        raise InputError(
            f"{where} must say accepted, a list of whole numbers of at least 0, got {found!r:.40}; "
            "mend or remove it"
        )
    return found


def rates_of(texts: Sequence[Sequence[int]], depth: int) -> list[float]:
    """Return conditional rates by depth: of the places right so far, the share right one deeper.

    Where no place was right so far it is zero.
    """
    lengths = np.concatenate([np.asarray(text) for text in texts])
    reached = [int((lengths >= level).sum()) for level in range(depth + 1)]
    return [deeper / max(level, 1) for level, deeper in pairwise(reached)]

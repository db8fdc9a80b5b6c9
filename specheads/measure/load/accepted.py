"""How many drafts are right at each place of a request's text: drawn from rates, or recorded."""

from collections.abc import Callable, Sequence
from itertools import cycle, islice, pairwise
from pathlib import Path

import numpy as np

from specheads.core.errors import InputError
from specheads.core.paths import local_path
from specheads.data.jsonl import Row, read_jsonl

Accepted = Callable[[int, int], Sequence[int]]
"""Of a request's number and its new tokens, how many drafts are right after each of them.

The same for whatever drafts: of those that draft less deep as many as they draft, at most.
"""


def drawn(rates: Sequence[float], seed: int = 0) -> Accepted:
    """Return lengths drawn from conditional rates by depth, each place by itself."""
    chances = np.array(rates, dtype=float)

    def lengths(request: int, new_tokens: int) -> list[int]:
        random = np.random.default_rng((seed, request)).random((new_tokens, len(chances)))
        return (random < chances).cumprod(axis=1).sum(axis=1).astype(int).tolist()

    return lengths


def recorded(texts: Sequence[Sequence[int]]) -> Accepted:
    """Return lengths as they were recorded along texts; a request gets one, from its beginning.

    There are as many texts as there are, over and over, and so it is with the places of one.
    """
    if not texts or not all(texts):
        raise InputError("recorded acceptance needs a text, and a place in each, got none")

    def lengths(request: int, new_tokens: int) -> list[int]:
        return list(islice(cycle(texts[request % len(texts)]), new_tokens))

    return lengths


NONE: Accepted = drawn(())
"""Nothing is right anywhere."""


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

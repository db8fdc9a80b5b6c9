"""Requests of a simulation: arrival times, lengths, and accepted drafts, sampled or recorded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import TypeVar

import numpy as np

from specheads.core.errors import InputError
from specheads.core.paths import local_path
from specheads.data.files import Row, read_jsonl
from specheads.decoding.trees.tuned import MatchRates

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request."""

    seconds: float
    """Arrival time."""
    prompt_tokens: int
    new_tokens: int
    """Number of new tokens of its answer."""

    def __post_init__(self) -> None:
        if not self.seconds >= 0 or self.prompt_tokens < 1 or self.new_tokens < 1:
            raise InputError(
                "an arrival needs a time of at least 0, and a prompt and new tokens of at least 1, "
                f"got {self.seconds}, {self.prompt_tokens} and {self.new_tokens}"
            )


def poisson(
    rate: float,
    number: int,
    *,
    prompt_tokens: int | Sequence[int],
    new_tokens: int,
    parts: Sequence[float] = (1.0,),
    seed: int = 0,
) -> list[Arrival]:
    """Return `number` requests of a Poisson process.

    Args:
        rate: Requests per second.
        number: Requests.
        prompt_tokens: Prompt tokens: one number for all requests, or one for each.
        new_tokens: New tokens of each request.
        parts: Factors of the rate in consecutive periods of equal length, repeated. Together they
            last until all requests have arrived: (0.2, 2, 0.2) rises and falls.
        seed: Seed of the arrival times.
    """
    if rate <= 0 or not parts or min(parts) < 0 or sum(parts) == 0:
        raise InputError(
            "a load needs a rate above 0 and factors of at least 0, one of them above, got "
            f"{rate} and {list(parts)}"
        )
    # times of a process of rate one, mapped to where the integral of the given rate is the same
    passed = np.random.default_rng(seed).exponential(size=number).cumsum()
    part = number / rate / sum(parts)
    ends = np.cumsum(np.array(parts) * rate * part)
    rounds, rest = np.divmod(passed, ends[-1])
    points = np.concatenate([[0.0], ends])
    times = rounds * part * len(parts) + np.interp(rest, points, part * np.arange(len(points)))
    lengths = [prompt_tokens] * number if isinstance(prompt_tokens, int) else prompt_tokens
    return [
        Arrival(float(time), length, new_tokens)
        for time, length in zip(times, lengths, strict=True)
    ]


def read_arrivals(path: str | Path) -> list[Arrival]:
    """Return the recorded requests of a .jsonl file in order of time: see docs/serve.md.

    Raises:
        ValueError: A line is not {"seconds": 0.5, "prompt_tokens": 20, "new_tokens": 64}.
    """
    found = [_arrival(row, where) for where, row in read_jsonl(local_path(path))]
    return sorted(found, key=lambda one: one.seconds)


def _arrival(row: Row, where: str) -> Arrival:
    match row:
        case {
            "seconds": int() | float() as seconds,
            "prompt_tokens": int() as prompt_tokens,
            "new_tokens": int() as new_tokens,
        }:
            return Arrival(float(seconds), prompt_tokens, new_tokens)
    raise InputError(
        f"{where} must have seconds, prompt_tokens and new_tokens, the latter two as whole "
        f"numbers, got {row!r:.80}; fix or remove it"
    )


# --- accepted drafts ---------------------------------------------------------------------------

AcceptedLengths = Callable[[int, int], Sequence[int]]
"""(request number, new tokens) -> how many drafts are right after each new token.

A drafter of smaller depth accepts at most its depth.
"""


@dataclass(frozen=True, slots=True)
class Copy:
    """Prompt-lookup tokens at a position of a text."""

    matched: int = 0
    """Length of the n-gram found earlier in the text; 0: there is nothing to copy."""
    right: int = 0
    """Copied tokens that are right."""


Copies = Callable[[int, int], Sequence[Copy]]
"""(request number, new tokens) -> prompt-lookup tokens after each new token."""


def sampled_lengths(rates: Sequence[float], seed: int = 0) -> AcceptedLengths:
    """Return lengths sampled from conditional rates by depth, independently at each position."""
    chances = np.array(rates, dtype=float)

    def lengths(request: int, new_tokens: int) -> list[int]:
        random = np.random.default_rng((seed, request)).random((new_tokens, len(chances)))
        return (random < chances).cumprod(axis=1).sum(axis=1).astype(int).tolist()

    return lengths


def sampled_copies(matches: Sequence[MatchRates], seed: int = 0) -> Copies:
    """Return prompt-lookup tokens sampled from measured rates, independently at each position."""
    chances = [one.share for one in matches]
    rights = [sampled_lengths(one.rates, seed) for one in matches]

    def copies(request: int, new_tokens: int) -> list[Copy]:
        # another stream than that of the right tokens
        random = np.random.default_rng((seed, request, 1)).random(new_tokens)
        found = np.searchsorted(np.cumsum(chances), random, side="right")
        right = [one(request, new_tokens) for one in rights]
        return [
            Copy(place + 1, right[place][token]) if place < len(matches) else Copy()
            for token, place in enumerate(found.tolist())
        ]

    return copies


NO_COPIES: Copies = sampled_copies(())
"""There is nothing to copy at any position."""


def recorded(texts: Sequence[Sequence[T]]) -> Callable[[int, int], Sequence[T]]:
    """Return recorded lengths along texts; a request gets one text from its start.

    Texts, and the positions of a text, repeat when they run out.
    """
    if not texts or not all(texts):
        raise InputError("recorded acceptance needs a text, and a place in each, got none")

    def lengths(request: int, new_tokens: int) -> list[T]:
        return list(islice(cycle(texts[request % len(texts)]), new_tokens))

    return lengths


def read_accepted(path: str | Path) -> list[list[int]]:
    """Return the recorded lengths of a .jsonl file, one text per line: {"accepted": [2, 0, 1]}."""
    return [_lengths(row, where) for where, row in read_jsonl(local_path(path))]


def _lengths(row: Row, where: str) -> list[int]:
    found = row.get("accepted")
    if (
        not isinstance(found, list)
        or not found
        or not all(type(one) is int and one >= 0 for one in found)
    ):
        raise InputError(
            f"{where} must have accepted, a list of whole numbers of at least 0, got "
            f"{found!r:.40}; fix or remove it"
        )
    return found


def rates_of(texts: Sequence[Sequence[int]], depth: int) -> list[float]:
    """Return conditional rates by depth: the share of positions right so far that go one deeper.

    The rate is zero if no position was right so far.
    """
    lengths = np.concatenate([np.asarray(text) for text in texts])
    reached = [int((lengths >= level).sum()) for level in range(depth + 1)]
    return [deeper / max(level, 1) for level, deeper in pairwise(reached)]

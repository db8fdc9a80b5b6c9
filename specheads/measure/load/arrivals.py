"""When requests come and how long they are: drawn, or recorded."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specheads.core.errors import InputError
from specheads.core.paths import local_path
from specheads.data.jsonl import Row, read_jsonl


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request before anybody has decoded it."""

    seconds: float
    """When it comes."""
    prompt_tokens: int
    new_tokens: int
    """Tokens that it takes, and gets."""

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
    """Return requests that come independently of each other, so many of them.

    Args:
        rate: Requests a second.
        number: Requests.
        prompt_tokens: Tokens of each prompt: one number for all, or one each.
        new_tokens: Tokens that each takes.
        parts: Factors of the rate in parts of time of equal length, over and over, that together
            last as long as all requests take to come: (0.2, 2, 0.2) rises and falls.
        seed: Of the times.
    """
    if rate <= 0 or not parts or min(parts) < 0 or sum(parts) == 0:
        raise InputError(
            "a load needs a rate above 0 and factors of at least 0, one of them above, got "
            f"{rate} and {list(parts)}"
        )
    # times of a process of rate one, stretched to where as much of the given rate has passed
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
    """Return what a .jsonl file recorded, in order of time: see docs/serve.md.

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
        f"{where} must say seconds, prompt_tokens and new_tokens, the latter two as whole "
        f"numbers, got {row!r:.80}; mend or remove it"
    )

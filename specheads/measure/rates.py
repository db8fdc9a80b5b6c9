"""Rates and their intervals, which sections of results are made of."""

from dataclasses import dataclass

Interval = tuple[float, float]
"""Ends of a 95 % bootstrap interval over prompts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """Tokens per forward, the base's own included."""

    tokens_per_forward: float
    interval: Interval


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """What one way to draft gives over what another does, paired by prompt."""

    ratio: float
    interval: Interval


@dataclass(frozen=True, kw_only=True, slots=True)
class Drafting(Rate):
    """One way to draft above temperature zero."""

    tree: str
    num_nodes: int
    compared: int
    identical: int
    gain_of_coupled: Gain | None

"""What is counted while decoding, and what the counts amount to."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from specheads.core.errors import InputError
from specheads.measure.rates import Gain, Interval, Rate
from specheads.measure.results import Depth


@dataclass(slots=True)
class DepthCounts:
    """What base forwards were offered and took, as integers that add up exactly.

    `offered[k]` counts forwards in which every draft before depth k was accepted and there was
    a draft at depth k; `accepted[k]` counts those in which it was accepted. Accepted is a draft
    that saved a forward, so one that the end of the text cuts off is offered and not accepted,
    and `forwards + sum(accepted)` is exactly the number of tokens the forwards gave.
    """

    forwards: int
    offered: list[int]
    accepted: list[int]

    @classmethod
    def zeros(cls, depth: int) -> "DepthCounts":
        """Return the counts of no forward at all."""
        return cls(0, [0] * depth, [0] * depth)

    @classmethod
    def total(cls, counts: Sequence["DepthCounts"], depth: int) -> "DepthCounts":
        """Return the sum of counts of this depth."""
        out = cls.zeros(depth)
        for one in counts:
            out.forwards += one.forwards
            out.offered = [sum(pair) for pair in zip(out.offered, one.offered, strict=True)]
            out.accepted = [sum(pair) for pair in zip(out.accepted, one.accepted, strict=True)]
        return out

    @property
    def new_tokens(self) -> int:
        """Tokens the forwards gave, the base's own choice in each of them included."""
        return self.forwards + sum(self.accepted)

    @property
    def tokens_per_forward(self) -> float:
        """Tokens a forward gave on average, the base's own included; 1.0 is the base alone."""
        return _ratio(self.new_tokens, self.forwards)

    @property
    def tokens_per_forward_without_bonus(self) -> float:
        """Accepted drafts a forward; 0.0 is the base alone."""
        return _ratio(sum(self.accepted), self.forwards)

    def add(self, accepted: int, *, drafted_beyond: bool) -> None:
        """Count one forward: how many drafts it accepted, and whether it drafted beyond them."""
        self.forwards += 1
        for level in range(accepted):
            self.offered[level] += 1
            self.accepted[level] += 1
        if drafted_beyond:
            self.offered[accepted] += 1

    def per_depth(self) -> list[Depth]:
        """Return the counts as results.json has them, first depth first."""
        return [Depth(*both) for both in zip(self.offered, self.accepted, strict=True)]


def _ratio(numerator: int, denominator: int) -> float:
    if denominator == 0:
        raise InputError(
            "tokens per forward needs at least one forward, got none: the base gives the first "
            "token while it reads the prompt; raise max_new_tokens above 1"
        )
    return numerator / denominator


def rate(counts: Sequence[DepthCounts]) -> Rate:
    """Return tokens per forward, and their interval over prompts."""
    return Rate(
        tokens_per_forward=DepthCounts.total(counts, len(counts[0].offered)).tokens_per_forward,
        interval=bootstrap_interval(
            [one.new_tokens for one in counts], [one.forwards for one in counts]
        ),
    )


def paired_gain(ours: Sequence[DepthCounts], theirs: Sequence[DepthCounts]) -> Gain:
    """Return our tokens per forward over theirs, on the same prompts, and its interval.

    Each resample draws prompts for both at once, so what a prompt makes hard for both cancels.
    """
    rows = [
        (one.new_tokens, one.forwards, other.new_tokens, other.forwards)
        for one, other in zip(ours, theirs, strict=True)
    ]
    both = [row for row in rows if row[1] and row[3]]
    top, under, their_top, their_under = (sum(column) for column in zip(*both, strict=True))
    sums = _resampled_sums(torch.tensor(both, dtype=torch.float64))
    ratios = sums[:, 0] / sums[:, 1] / (sums[:, 2] / sums[:, 3])
    return Gain(ratio=top / under / (their_top / their_under), interval=_middle(ratios))


def acceptance_length(rates: Float[Tensor, " depth"]) -> float:
    """Return the mean number of tokens one base forward yields at these acceptance rates.

    `rates[k]` is conditional: the share of drafts accepted at depth k among those accepted at
    every earlier depth. The bonus token the base chooses itself counts, so a drafter that is
    never right scores 1.0 and a perfect one scores `depth + 1`.

    Source: Leviathan et al. 2023, arXiv:2211.17192, eq. 1, with one rate per depth.
    """
    if ((rates < 0) | (rates > 1)).any():
        raise InputError(f"acceptance rates must lie in [0, 1], got {rates.tolist()}")
    return 1.0 + rates.cumprod(0).sum().item()


def bootstrap_interval(
    numerators: Sequence[int | float],
    denominators: Sequence[int | float],
    *,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """Return the 95 % interval of `sum(numerators) / sum(denominators)`, prompts drawn anew.

    Each resample draws as many prompts as there are, with replacement, and keeps a prompt's
    two numbers together. One prompt gives an interval of no width. Prompts whose denominator is
    zero say nothing about the ratio and are left out.
    """
    pairs = list(zip(numerators, denominators, strict=True))
    kept = [(top, bottom) for top, bottom in pairs if bottom > 0]
    if not kept:
        raise InputError(
            f"an interval needs a prompt with a positive denominator, got {len(pairs)} prompts "
            "without one; add prompts or raise max_new_tokens above 1"
        )
    sums = _resampled_sums(torch.tensor(kept, dtype=torch.float64), resamples, seed)
    return _middle(sums[:, 0] / sums[:, 1])


def _resampled_sums(
    values: Float64[Tensor, "prompt column"], resamples: int = 2000, seed: int = 0
) -> Float64[Tensor, "resample column"]:
    """Return the sums of the columns over as many prompts as there are, drawn anew each time."""
    count = len(values)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(count, (resamples, count), generator=generator)
    # how often each prompt was drawn: (resamples, prompts), so the sums are one small product
    weights = torch.zeros(resamples, count, dtype=torch.float64)
    weights.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float64))
    return weights @ values


def _middle(values: Float64[Tensor, " resample"]) -> Interval:
    """Return the ends of the middle 95 %."""
    low, high = values.quantile(torch.tensor([0.025, 0.975]).double()).tolist()
    return low, high

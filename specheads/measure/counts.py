"""Counts of drafts while decoding, and rates with intervals from them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import compress

import torch
from jaxtyping import Float64
from torch import Tensor

from specheads.core.errors import InputError
from specheads.measure.results import CategoryRate, DepthRate, DraftCounts, Gain, Interval, Rate


@dataclass(slots=True)
class DepthCounts:
    """Integer counts of forwards and of the drafts at each depth.

    `offered[k]` counts forwards in which every draft before depth k was accepted and depth k had a
    draft; `accepted[k]` counts those in which that draft was accepted. A draft that the end of the
    text cuts off is offered and not accepted, since it saved no forward. So
    `forwards + sum(accepted)` is exactly the number of tokens that the forwards gave.
    """

    forwards: int
    offered: list[int]
    accepted: list[int]
    source: str = field(default="", compare=False)
    """Document that the prompt was cut from; intervals resample documents. Empty: its own."""
    drafted: int = field(default=0, compare=False)
    """Draft tokens that were verified, at all depths; a replay does not count them."""

    @classmethod
    def zeros(cls, depth: int, source: str = "") -> "DepthCounts":
        """Return the counts of no forward."""
        return cls(0, [0] * depth, [0] * depth, source)

    @classmethod
    def total(cls, counts: Sequence["DepthCounts"], depth: int) -> "DepthCounts":
        """Return the sum over prompts of counts of this depth."""
        return cls(
            sum(prompt.forwards for prompt in counts),
            [sum(prompt.offered[level] for prompt in counts) for level in range(depth)],
            [sum(prompt.accepted[level] for prompt in counts) for level in range(depth)],
            drafted=sum(prompt.drafted for prompt in counts),
        )

    @property
    def new_tokens(self) -> int:
        """Tokens that the forwards gave, including the base's own token of each."""
        return self.forwards + sum(self.accepted)

    @property
    def tokens_per_forward(self) -> float:
        """Mean tokens per forward, including the base's own; the base alone has 1.0."""
        if not self.forwards:
            raise InputError(
                "tokens per forward needs a forward after the one that reads the prompt, got none: "
                "every text ended there; raise max_new_tokens, or choose prompts with longer "
                "answers"
            )
        return self.new_tokens / self.forwards

    def add(self, accepted: int, *, drafted_beyond: bool, drafted: int = 0) -> None:
        """Count one forward: its accepted drafts, whether a deeper one was rejected, and all."""
        self.forwards += 1
        self.drafted += drafted
        for level in range(accepted):
            self.offered[level] += 1
            self.accepted[level] += 1
        if drafted_beyond:
            self.offered[accepted] += 1

    def levels(self) -> list[float]:
        """Return how often each level was right if the one above was, drafted there or not.

        The running products add up to the tokens per forward: see `goodput.expected_tokens`.
        """
        reached = [self.forwards, *self.accepted]
        return [
            accepted / max(total, 1)
            for total, accepted in zip(reached, self.accepted, strict=False)
        ]

    def per_depth(self) -> list[DraftCounts]:
        """Return the counts as in results.json, the first depth first."""
        return [DraftCounts(*row) for row in zip(self.offered, self.accepted, strict=True)]


def compute_rate(counts: Sequence[DepthCounts]) -> Rate:
    """Return tokens per forward and their interval over prompts."""
    total = DepthCounts.total(counts, len(counts[0].offered))
    interval = bootstrap_interval(
        [prompt.new_tokens for prompt in counts],
        [prompt.forwards for prompt in counts],
        [prompt.source for prompt in counts],
    )
    return Rate(tokens_per_forward=total.tokens_per_forward, interval=interval)


def group_rate(counts: Sequence[DepthCounts]) -> CategoryRate:
    """Return the rate of a group of prompts, also by the names that vLLM uses.

    Source: vllm/v1/spec_decode/metrics.py, v0.32.0.
    """
    total = DepthCounts.total(counts, len(counts[0].offered))
    accepted, num_drafts = sum(total.accepted), max(total.offered, default=0)
    return CategoryRate(
        **asdict(compute_rate(counts)),
        count=len(counts),
        num_drafts=num_drafts,
        num_draft_tokens=total.drafted,
        num_accepted_tokens=accepted,
        mean_acceptance_length=1 + accepted / max(num_drafts, 1),
        draft_acceptance_rate=accepted / max(total.drafted, 1),
        per_position_acceptance_rates=[count / max(num_drafts, 1) for count in total.accepted],
    )


def conditional_acceptance(counts: Sequence[DepthCounts]) -> list[DepthRate]:
    """Return accepted / offered at every depth that was offered a draft."""
    sources, rates = [prompt.source for prompt in counts], []
    for level in range(len(counts[0].offered)):
        accepted = [prompt.accepted[level] for prompt in counts]
        offered = [prompt.offered[level] for prompt in counts]
        if any(offered):
            interval = bootstrap_interval(accepted, offered, sources)
            rates.append(DepthRate(rate=sum(accepted) / sum(offered), interval=interval))
    return rates


def paired_gain(counts: Sequence[DepthCounts], baseline: Sequence[DepthCounts]) -> Gain:
    """Return the ratio of tokens per forward to those of a baseline on the same prompts.

    A resample draws the same prompts for both, so the difficulty of a prompt cancels.
    """
    pairs = [(a, b) for a, b in zip(counts, baseline, strict=True) if a.forwards and b.forwards]
    rows = torch.tensor(
        [(a.new_tokens, a.forwards, b.new_tokens, b.forwards) for a, b in pairs],
        dtype=torch.float64,
    )
    totals = rows.sum(0)
    sums = _resampled_sums(rows, [prompt.source for prompt, _ in pairs])
    return Gain(
        ratio=(totals[0] / totals[1] / (totals[2] / totals[3])).item(),
        interval=_central_interval(sums[:, 0] / sums[:, 1] / (sums[:, 2] / sums[:, 3])),
    )


def bootstrap_interval(
    numerators: Sequence[int | float],
    denominators: Sequence[int | float],
    sources: Sequence[str] = (),
) -> Interval:
    """Return the 95 % bootstrap interval of `sum(numerators) / sum(denominators)`.

    A resample draws as many sources as there are, with replacement, and takes all prompts of a
    source together, because they resemble each other; a prompt with an empty source is a source of
    its own. A single source gives an interval without width. Prompts with denominator zero have no
    ratio and are skipped.
    """
    pairs = [*zip(numerators, denominators, strict=True)]
    rows = torch.tensor(pairs, dtype=torch.float64).view(-1, 2)
    has_ratio = rows[:, 1] > 0
    if not has_ratio.any():
        raise InputError(
            f"an interval needs a prompt with a positive denominator, got {len(rows)} prompts "
            "without one; add prompts, or raise max_new_tokens"
        )
    sources = sources or [""] * len(rows)
    sums = _resampled_sums(rows[has_ratio], [*compress(sources, has_ratio.tolist())])
    return _central_interval(sums[:, 0] / sums[:, 1])


def number_sources(sources: Sequence[str]) -> list[int]:
    """Return the number of each row's source, in order of first occurrence.

    An empty source is a source of its own.
    """
    names = [source or row for row, source in enumerate(sources)]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return [numbers[name] for name in names]


def _resampled_sums(
    rows: Float64[Tensor, "row column"], sources: Sequence[str]
) -> Float64[Tensor, "resample column"]:
    """Return the column sums of 2,000 bootstrap resamples of the sources."""
    numbers = torch.tensor(number_sources(sources))
    num_sources = int(numbers.max()) + 1
    values = rows.new_zeros(num_sources, rows.shape[1]).index_add_(0, numbers, rows)
    generator = torch.Generator().manual_seed(0)
    resamples = torch.randint(num_sources, (2000, num_sources), generator=generator)
    # how often each resample has each source, so the sums are one small product
    weights = values.new_zeros(resamples.shape)
    return weights.scatter_add_(1, resamples, torch.ones_like(weights)) @ values


def _central_interval(values: Float64[Tensor, " resample"]) -> Interval:
    """Return the ends of the middle 95 %."""
    low, high = values.quantile(torch.tensor([0.025, 0.975]).double()).tolist()
    return low, high


def is_repetitive(tokens: Sequence[int], *, max_period: int = 16, window: int = 48) -> bool:
    """Return whether the last `window` tokens repeat one block of at most `max_period` tokens.

    Such text is trivially easy to draft, so results have figures with and without it. A text
    shorter than the window never counts as repetitive.
    """
    tail = tokens[-window:]
    if len(tokens) < window:
        return False
    return any(tail[period:] == tail[:-period] for period in range(1, max_period + 1))

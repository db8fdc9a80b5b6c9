"""The first screen's figures: the three that matter most of what was measured."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from math import sqrt

from specheads.measure.report.markup import Markup, element, join
from specheads.measure.results import Interval, Results

NORMAL = 1.959964
"""Standard deviations that hold 95 % of a normal distribution."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Headline:
    """One figure with its 95 % interval."""

    name: str
    shown: str
    value: float
    interval: Interval
    meaning: str
    is_share: bool = False
    """Whether it lies between zero and one, and is told in percent; else one is no gain."""


def wilson(successes: int, trials: int) -> Interval:
    """Return the 95 % interval of a share, which holds at its ends and for few trials too.

    Source: Wilson 1927, Journal of the American Statistical Association 22.
    """
    share, square = successes / trials, NORMAL**2
    middle = (share + square / (2 * trials)) / (1 + square / trials)
    spread = sqrt(share * (1 - share) / trials + square / (4 * trials**2))
    half = NORMAL * spread / (1 + square / trials)
    return max(middle - half, 0.0), min(middle + half, 1.0)


def headlines(results: Results) -> list[Headline]:
    """Return three figures, or as many as were measured."""
    return list(islice(_candidates(results), 3))


def _candidates(results: Results) -> Iterator[Headline]:
    """Yield what could stand on the first screen, the most telling first."""
    if speed := results.speed:
        yield Headline(
            name="speed-up",
            shown=f"{speed.speedup:.2f}×",  # noqa: RUF001
            value=speed.speedup,
            interval=speed.interval,
            meaning="Time of the base alone over that with the head, for the same text.",
        )
    if found := results.online or results.offline:
        yield Headline(
            name="tokens per forward" if results.online else "tokens per forward, replayed",
            shown=f"{found.tokens_per_forward:.2f}",
            value=found.tokens_per_forward,
            interval=found.interval,
            meaning="What one forward of the base yields. The base alone yields 1.",
        )
    if (same := results.lossless) and same.compared:
        yield Headline(
            name="texts identical to the base alone",
            shown=f"{same.identical} of {same.compared}",
            value=same.identical / same.compared,
            interval=wilson(same.identical, same.compared),
            meaning="Token for token; rounding may part two texts at a tie.",
            is_share=True,
        )
    if found and found.conditional_acceptance:
        # drafts of one text depend on each other: its interval is over prompts
        first, counts = found.conditional_acceptance[0], found.per_depth[0]
        yield Headline(
            name="first drafts accepted",
            shown=f"{first.rate:.0%}",
            value=first.rate,
            interval=first.interval,
            meaning=f"At depth 1: {counts.accepted:,} of {counts.offered:,}.",
            is_share=True,
        )


def show(headline: Headline) -> Markup:
    """Return a figure in large letters, its interval in words and on a scale."""
    low, high = headline.interval
    form = ".0%" if headline.is_share else ".2f"
    end = 1.0 if headline.is_share else 1.15 * max(high, headline.value, 1.5)
    marks = [
        element("i", class_="range", style=f"left:{low / end:.1%};width:{(high - low) / end:.1%}"),
        element("i", class_="value", style=f"left:{headline.value / end:.1%}"),
    ]
    if not headline.is_share:
        marks.append(element("i", class_="one", style=f"left:{1 / end:.1%}", title="1: no gain"))
    return element(
        "div",
        element("h2", headline.name),
        element("strong", headline.shown),
        element("div", *marks, class_="scale", aria_hidden="true"),
        element("p", f"95 % interval {low:{form}} to {high:{form}}"),
        element("p", headline.meaning),
        class_="headline",
    )


def show_all(results: Results) -> Markup:
    """Return the figures of the first screen."""
    return element("div", join(*map(show, headlines(results))), class_="headlines")

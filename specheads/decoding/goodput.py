"""Choose in each step how many levels to draft and how many tokens to copy, or neither.

Source: Liu et al. 2024, arXiv:2406.14066 (SmartSpec). See docs/serve.md.
"""

from collections.abc import Sequence
from functools import partial
from operator import mul

from specheads.decoding.cost import (
    MovingRates,
    RequestRates,
    RowLoad,
    StepCost,
    StepLoad,
    expected_tokens,
)
from specheads.decoding.suffix_decoding import LookupText
from specheads.decoding.trees import policies
from specheads.decoding.trees.hybrid import HybridTree
from specheads.decoding.trees.tuned import SwitchingPolicy, Tuned

COPY_SIZES = 2, 4, 7
"""Numbers of copied tokens to choose from, in addition to all that have a rate."""

DraftSize = tuple[int, int]
"""Levels of the drafter's chain, and nodes for copied text next to it. Copied tokens that are
drafted too leave room for more; that is not counted."""


def step_tokens(drafts: Sequence[DraftSize], load: StepLoad) -> list[float]:
    """Return the expected tokens of a step, within each row's limit, for each draft."""
    drafted = _sum_tokens([(row, row.rates.drafted.tokens) for row in load.rows])
    matches = [(row, row.rates.drafted, row.rates.match) for row in load.rows if row.rates.match]
    if not matches:
        return [drafted[depth] for depth, _ in drafts]
    # expected tokens of either = of one + of the other - of both
    copied = _sum_tokens([(row, match.tokens) for row, _, match in matches])
    joint_rates = [(row, map(mul, draft.rates, match.rates)) for row, draft, match in matches]
    joint = _sum_tokens([(row, expected_tokens(rates)) for row, rates in joint_rates])
    return [drafted[depth] + copied[size] - joint[min(depth, size)] for depth, size in drafts]


def _sum_tokens(rows: Sequence[tuple[RowLoad, list[float]]]) -> list[float]:
    """Return the expected tokens of all rows by depth, each row limited by its room."""
    limited = [(tokens, max(row.room, 1) - 1) for row, tokens in rows]
    depths = range(len(rows[0][1]))
    return [sum(tokens[min(depth, limit)] for tokens, limit in limited) for depth in depths]


def best_draft(cost: StepCost, drafts: Sequence[DraftSize], load: StepLoad) -> int:
    """Return the index of the draft with the highest goodput in tokens per second.

    The first of equals is chosen, so smaller drafts come first and those with copied text last;
    these are left out if no row has a match.
    """
    context = max(row.context for row in load.rows)
    if not any(row.rates.match for row in load.rows):
        drafts = [(depth, copied) for depth, copied in drafts if not copied]
    goodputs = [
        tokens / cost.seconds(load.batch, context, depth + 1, depth, copied)
        for tokens, (depth, copied) in zip(step_tokens(drafts, load), drafts, strict=True)
    ]
    # values that differ by rounding only are equal
    threshold = max(goodputs) * (1 - 1e-9)
    return next(index for index, goodput in enumerate(goodputs) if goodput >= threshold)


class Goodput(SwitchingPolicy):
    """Chooses the draft with the highest goodput for the batch of each step, or no draft.

    The candidates are chains of every depth from zero on, each without and with copied text. The
    rates of a request are moving averages over its own steps.

    Args:
        cost: Cost of a step on this machine.
        rates: Measured conditional acceptance rate of each depth, the start of every request.
        copied: Measured rates of copied text, one per token: after a match of one token, of two,
            and so on, up to the longest match that prompt lookup looks for.
    """

    def __init__(
        self, cost: StepCost, rates: Sequence[float], copied: Sequence[Sequence[float]] = ()
    ) -> None:
        self.cost, self.rates = cost, rates
        longest = min(map(len, copied), default=0)
        self.copied_rates = [match_rates[:longest] for match_rates in copied if longest]
        sizes = [0]
        if longest:
            sizes += [*(size for size in COPY_SIZES if size < longest), longest]
        depths = range(len(rates) + 1)
        self.drafts = [(depth, size) for size in sizes for depth in depths]
        chains = [policies.chain(depth) for depth in depths]
        # all look up equally many tokens, those whose rates are observed
        hybrids = [
            HybridTree(chains[depth], size, lookup_length=len(rates) + longest)
            for depth, size in self.drafts
            if size
        ]
        super().__init__("goodput", [*chains, *hybrids], partial(best_draft, cost, self.drafts))

    @classmethod
    def of(cls, tuned: Tuned) -> "Goodput":
        """Return the policy for the measured times and rates of a head."""
        acceptance = tuned.acceptance
        return cls(tuned.cost, acceptance.per_depth, [match.rates for match in acceptance.matches])

    def start_rates(self, text: LookupText) -> RequestRates:
        """Return the rates of a new request, those that were measured."""
        copied = [*map(MovingRates, self.copied_rates)]
        rates = RequestRates(MovingRates(self.rates), copied, text, self.lookup_length)
        rates.find_match()
        return rates

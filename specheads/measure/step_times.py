"""Time the steps of decoding, in our loop or in a server, and fit their cost."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, TypeVar

import torch

from specheads.base.model import FrozenBase
from specheads.core.drafter import Drafter
from specheads.core.errors import InputError
from specheads.decoding import accept, loop
from specheads.decoding.cost import ForwardCost, StepCost
from specheads.decoding.trees import policies
from specheads.measure.generation import GenerationSettings
from specheads.runs.progress import progress_bar

BURST = 4
"""Consecutive steps of one method. The first is not timed: other methods have filled the caches
before it."""
CONTEXT_BUCKET = 64
"""Tokens of context whose steps are one point of a server's fit."""
MAX_COST_ERROR = 0.25
"""Largest median relative error of a fit. A quiet machine has 0.06, one with other work 0.6."""

CostError = dict[str, float | int]
"""Relative errors of fitted costs, median and largest, and the number of points."""
T = TypeVar("T")

TreeMethod = tuple[Drafter | None, policies.TreePolicy]
"""A drafter, None for the base alone, and its tree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """A measured step time."""

    batch: int
    context: int | float
    nodes: int
    depth: int
    verify: float
    """Seconds of everything but drafting."""
    draft: float
    """Seconds of drafting; zero without a draft."""

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.verify + self.draft


@torch.inference_mode()
def time_steps(
    base: FrozenBase,
    methods: Sequence[TreeMethod],
    prompts: Sequence[list[list[int]]],
    *,
    generation: GenerationSettings,
    rounds: int = 8,
) -> list[StepTime]:
    """Return the step time of each method, all of its rows decoding together.

    Methods take turns, a burst of steps each: a slow phase of the machine then slows all of them.
    """
    deepest = max(tree.depth for _, tree in methods)
    widest = max(tree.num_nodes for _, tree in methods)
    lengths = [max(map(len, rows)) for rows in prompts]
    longest, burst = max(lengths), BURST * (deepest + 1)
    if longest + tokens_after(deepest) > base.max_length:
        raise InputError(
            f"step times need room for {tokens_after(deepest)} tokens after {longest}, and the "
            f"base has room for {base.max_length}; lower contexts"
        )
    # methods start again from their prompts when the context is full
    bursts = min((base.max_length - longest - 2 * deepest - 2) // burst, rounds)
    new_tokens = (bursts + 1) * burst + widest
    times: list[list[tuple[float, float]]] = [[] for _ in methods]
    states: list[loop.DecodingState] = []
    for turn in progress_bar(range(rounds), "step times", generation.progress):
        if turn % bursts == 0:
            states = []
            for (drafter, _), rows, length in zip(methods, prompts, lengths, strict=True):
                samplings = [generation.sampling] * len(rows)
                state, _ = loop.start(
                    base, drafter, rows, length + new_tokens, samplings, coupled=generation.coupled
                )
                states.append(state)
        # the order rotates, so that no method always follows the slowest one
        for i in [*range(turn % len(methods), len(methods)), *range(turn % len(methods))]:
            drafter, tree = methods[i]
            for step in range(BURST):
                ledger = loop.StepLedger(base.device, synchronised=("draft", "host"))
                loop.step(base, drafter, tree, accept.match_rule, states[i], ledger=ledger)
                if step:
                    times[i].append((sum(ledger.seconds.values()), ledger.seconds["draft"]))
    return [
        StepTime(
            batch=len(rows),
            # the context of a step in the middle, at the usual pace
            context=length + bursts * BURST / 2,
            nodes=tree.num_nodes,
            depth=tree.depth,
            verify=trimmed_mean([seconds - draft for seconds, draft in steps]),
            draft=trimmed_mean([draft for _, draft in steps]) if tree.depth else 0.0,
        )
        for (_, tree), rows, length, steps in zip(methods, prompts, lengths, times, strict=True)
    ]


def tokens_after(depth: int) -> int:
    """Return the tokens after a context: a burst of steps with this depth, and a last tree."""
    return (BURST + 2) * (depth + 1)


def trimmed_mean(seconds: Sequence[int | float]) -> float:
    """Return the mean without the slowest and the fastest fifth: some steps stop early or copy."""
    ordered = sorted(seconds)
    cut = len(ordered) // 5
    return statistics.fmean(ordered[cut : len(ordered) - cut])


# --- fits --------------------------------------------------------------------------------------


def measure_until_it_fits(
    measure: Callable[[], tuple[T, CostError]], *, is_required: bool = True
) -> tuple[T, CostError]:
    """Return a measurement and the error of its fit; if the error is large, measure again once.

    Raises:
        InputError: Both errors are larger than `MAX_COST_ERROR`. Without `is_required` the
            measurement with the smaller one is returned.
    """
    first = measure()
    if first[1]["median"] <= MAX_COST_ERROR:
        return first
    best = min(first, measure(), key=lambda measurement: measurement[1]["median"])
    error = best[1]
    if is_required and error["median"] > MAX_COST_ERROR:
        raise InputError(
            "costs must fit the measured step times with a median error of "
            f"{MAX_COST_ERROR:.0%}, got {error['median']:.0%} over {error['points']} points, "
            "twice; close other work, then run specheads tune again"
        )
    return best


def fit_cost(times: Sequence[StepTime]) -> tuple[StepCost, CostError]:
    """Return the linear cost with the least squared relative error, and its error."""
    verify = [(1, time.batch * time.nodes, time.batch * time.context) for time in times]
    drafting = [time for time in times if time.depth]
    draft = [
        (time.depth, time.batch * (time.nodes - 1), time.depth * time.batch * time.context)
        for time in drafting
    ]
    cost = StepCost(
        verify=_least_squares(verify, [time.verify for time in times]),
        draft=_least_squares(draft, [time.draft for time in drafting]),
    )
    errors = [
        abs(cost.seconds(time.batch, time.context, time.nodes, time.depth) / time.seconds - 1)
        for time in times
    ]
    median, largest = statistics.median(errors), max(errors)
    return cost, {"points": len(times), "median": median, "largest": largest}


def fit_server_cost(steps: Sequence[Sequence[Any]]) -> tuple[StepCost, CostError]:
    """Return the cost of a server's steps, and its error.

    Each step has its requests, their mean context, the drafts of each request, and the seconds
    without and of drafting. Contexts grow from step to step, so those within `CONTEXT_BUCKET`
    tokens are one point of the fit.
    """
    groups = defaultdict[tuple[int, int, int], list[tuple[float, ...]]](list)
    for batch, context, depth, *seconds in steps:
        groups[batch, round(context / CONTEXT_BUCKET), depth].append((context, *seconds))
    times = []
    for (batch, _, depth), rows in groups.items():
        context, verify, draft = (trimmed_mean(column) for column in zip(*rows, strict=True))
        times.append(
            StepTime(
                batch=batch,
                context=context,
                nodes=1 + depth,
                depth=depth,
                verify=verify,
                draft=draft,
            )
        )
    return fit_cost(times)


def fit_ragged(
    steps: Sequence[Sequence[Any]], ragged: Sequence[Sequence[Any]], cost: StepCost
) -> float:
    """Return the further seconds per request where requests verify unequal numbers of drafts.

    `steps` are those of `fit_server_cost`. Each of `ragged` has its requests, their mean context,
    its tokens and its seconds, and is compared with steps of as many requests that verify one
    draft.
    """
    equal = defaultdict[tuple[int, int], list[float]](list)
    for batch, context, depth, seconds, _ in steps:
        if depth == 1:
            equal[batch, round(context / CONTEXT_BUCKET)].append(seconds)
    differences = list[float]()
    for batch, context, tokens, seconds in ragged:
        if equal_seconds := equal.get((batch, round(context / CONTEXT_BUCKET))):
            further_tokens = tokens - 2 * batch
            expected = statistics.median(equal_seconds) + cost.verify.token * further_tokens
            differences.append((seconds - expected) / batch)
    return max(statistics.median(differences), 0.0) if differences else 0.0


def _least_squares(
    work: Sequence[tuple[int | float, ...]], seconds: Sequence[float]
) -> ForwardCost:
    """Return the non-negative coefficients of `work` with the least squared relative error.

    Every subset of non-zero coefficients is tried, which is exact.
    """
    scaled = torch.tensor(work, dtype=torch.float64).view(-1, 3)
    scaled = scaled / torch.tensor(seconds, dtype=torch.float64)[:, None]
    ones = torch.ones(len(scaled), 1, dtype=torch.float64)
    best, least_error = torch.zeros(3, dtype=torch.float64), float("inf")
    subsets = [subset for size in (1, 2, 3) for subset in combinations(range(3), size)]
    for subset in subsets:
        columns = scaled[:, subset]
        # seconds per token and per step differ by orders of magnitude, so scale the columns
        norms = columns.norm(dim=0).clamp(min=1e-300)
        solution = torch.linalg.lstsq(columns / norms, ones, driver="gelsd").solution[:, 0]
        error = (columns / norms @ solution - 1).square().sum().item()
        if (solution >= 0).all() and error < least_error - 1e-12:
            least_error, best = error, torch.zeros_like(best)
            best[[*subset]] = solution / norms
    fixed, token, context = best.tolist()
    return ForwardCost(fixed=fixed, token=token, context=context)

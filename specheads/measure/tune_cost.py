"""Step times on this machine: measured in turns, and fitted by a linear function."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import torch

from specheads.base.model import FrozenBase
from specheads.core.drafter import Drafter
from specheads.core.errors import InputError
from specheads.core.machine import synchronise
from specheads.decoding import accept, loop
from specheads.decoding.cost import ForwardCost, StepCost
from specheads.decoding.trees import policies
from specheads.measure.generation import GenerationSettings
from specheads.runs.progress import bar

BURST = 4
"""Consecutive steps of one method. The first is not timed: other methods have filled the caches
before it."""

TreeMethod = tuple[Drafter | None, policies.TreePolicy]
"""A drafter, None for the base alone, and its tree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
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
) -> list[Point]:
    """Return the step time of each method, all of its rows decoding together.

    Methods take turns, a burst of steps each: a slow phase of the machine then slows all of them.
    Each method continues `prompts` of its own. The trimmed mean of its steps counts.
    """
    deepest = max(tree.depth for _, tree in methods)
    widest = max(tree.num_nodes for _, tree in methods)
    lengths = [max(map(len, rows)) for rows in prompts]
    longest, burst = max(lengths), BURST * (deepest + 1)
    if longest + room(deepest) > base.max_length:
        raise InputError(
            f"step times need room for {room(deepest)} tokens after {longest}, and the base has "
            f"room for {base.max_length}; lower contexts"
        )
    # methods start again from their prompts when the context is full
    bursts = min((base.max_length - longest - 2 * deepest - 2) // burst, rounds)
    beyond = (bursts + 1) * burst + widest
    times: list[list[tuple[float, float]]] = [[] for _ in methods]
    states: list[loop.DecodingState] = []
    for turn in bar(range(rounds), "step times", generation.progress):
        if turn % bursts == 0:
            states = [
                loop.start(
                    base,
                    drafter,
                    rows,
                    length + beyond,
                    [generation.sampling] * len(rows),
                    coupled=generation.coupled,
                )[0]
                for (drafter, _), rows, length in zip(methods, prompts, lengths, strict=True)
            ]
        # the order rotates, so that no method always follows the slowest one
        for place in [*range(turn % len(methods), len(methods)), *range(turn % len(methods))]:
            steps = [_time_step(base, *methods[place], states[place]) for _ in range(BURST)]
            times[place] += steps[1:]
    return [
        Point(
            batch=len(rows),
            # the context of a step in the middle, at the usual pace
            context=length + bursts * BURST / 2,
            nodes=tree.num_nodes,
            depth=tree.depth,
            verify=trimmed_mean([whole - draft for whole, draft in each]),
            draft=trimmed_mean([draft for _, draft in each]) if tree.depth else 0.0,
        )
        for (_, tree), rows, length, each in zip(methods, prompts, lengths, times, strict=True)
    ]


def room(depth: int) -> int:
    """Return the tokens after a context: a burst of steps with this depth, and a last tree."""
    return (BURST + 2) * (depth + 1)


def _time_step(
    base: FrozenBase, drafter: Drafter | None, tree: policies.TreePolicy, state: loop.DecodingState
) -> tuple[float, float]:
    """Return the seconds of one step, and those of its draft."""
    synchronise(base.device)
    began = time.perf_counter()
    taken = loop.step(base, drafter, tree, accept.match_rule, state, timed=True)
    synchronise(base.device)
    return time.perf_counter() - began, taken[0].times.drafted - began


def trimmed_mean(seconds: Sequence[float]) -> float:
    """Return the mean without the slowest and the fastest fifth.

    A median would describe one kind of step only if a method stops early or copies in some steps.
    """
    ordered = sorted(seconds)
    cut = len(ordered) // 5
    return statistics.fmean(ordered[cut : len(ordered) - cut])


def fit(points: Sequence[Point]) -> tuple[StepCost, dict[str, float]]:
    """Return the linear cost with the least squared relative error, and its error."""
    verify = [(1, one.batch * one.nodes, one.batch * one.context) for one in points]
    drafted = [one for one in points if one.depth]
    draft = [
        (one.depth, one.batch * (one.nodes - 1), one.depth * one.batch * one.context)
        for one in drafted
    ]
    cost = StepCost(
        verify=_least_squares(verify, [one.verify for one in points]),
        draft=_least_squares(draft, [one.draft for one in drafted]),
    )
    errors = [
        abs(cost.seconds(one.batch, one.context, one.nodes, one.depth) / one.seconds - 1)
        for one in points
    ]
    median, largest = statistics.median(errors), max(errors)
    return cost, {"points": float(len(points)), "median": median, "largest": largest}


def _least_squares(
    work: Sequence[tuple[int | float, ...]], seconds: Sequence[float]
) -> ForwardCost:
    """Return the non-negative coefficients of `work` with the least squared relative error.

    Every subset of non-zero coefficients is tried, which is exact.
    """
    scaled = torch.tensor(work, dtype=torch.float64).view(-1, 3)
    scaled = scaled / torch.tensor(seconds, dtype=torch.float64)[:, None]
    ones = torch.ones(len(scaled), 1, dtype=torch.float64)
    best, least = torch.zeros(3, dtype=torch.float64), float("inf")
    for chosen in [one for count in (1, 2, 3) for one in combinations(range(3), count)]:
        columns = scaled[:, chosen]
        # seconds per token and per step differ by orders of magnitude, so scale the columns
        sizes = columns.norm(dim=0).clamp(min=1e-300)
        found = torch.linalg.lstsq(columns / sizes, ones, driver="gelsd").solution[:, 0]
        missed = (columns / sizes @ found - 1).square().sum().item()
        if (found >= 0).all() and missed < least - 1e-12:
            least, best = missed, torch.zeros_like(best)
            best[[*chosen]] = found / sizes
    fixed, token, context = best.tolist()
    return ForwardCost(fixed=fixed, token=token, context=context)

"""Step times on this machine: measured in turns, and fitted."""

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specheads.base.model import FrozenBase
from specheads.core.drafter import Drafter
from specheads.core.errors import InputError
from specheads.core.machine import synchronise
from specheads.decoding import accept, loop
from specheads.decoding.cost import ForwardCost, StepCost
from specheads.decoding.trees import policies
from specheads.decoding.trees.hybrid import beside_lookup
from specheads.decoding.trees.tuned import CostError
from specheads.measure.generation import GenerationSettings
from specheads.runs.progress import bar

BURST = 4
"""Consecutive steps of one method. The first is not timed: other methods have filled the caches
before it."""

WORST = 0.1
"""Largest relative error of the linear form that is not refined."""


@dataclass(frozen=True, slots=True)
class Form:
    """Parameters of `ForwardCost` that are searched and not solved for."""

    power: float = 1.0
    free: int = 0
    several: bool = False


LINEAR = Form()
POWERS, FREE = (1.0, 0.9, 0.8, 0.7, 0.6), (2, 4, 6, 8, 12, 16, 32, 64, 128)
REFINED = [
    LINEAR,
    *(Form(power, several=True) for power in POWERS),
    *(Form(free=free) for free in FREE),
]
"""Forms that are tried if the linear one is too far off: a jump, or tokens that are free."""


TreeMethod = tuple[Drafter | None, policies.TreePolicy]
"""A drafter, None for the base alone, and its tree; a hybrid tree adds prompt lookup."""


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
    methods = [
        (None if one is None else beside_lookup(one, tree, base), tree) for one, tree in methods
    ]
    deepest = max(tree.depth for _, tree in methods)
    widest = max(tree.num_nodes for _, tree in methods)
    lengths = [max(map(len, rows)) for rows in prompts]
    longest = max(lengths)
    burst = BURST * (deepest + 1)
    if longest + room(deepest) > base.max_length:
        raise InputError(
            f"step times need room for {room(deepest)} tokens after {longest}, and the base has "
            f"room for {base.max_length}; lower contexts"
        )
    # methods start again from their prompts when the context is full
    each = min((base.max_length - longest - 2 * deepest - 2) // burst, rounds)
    beyond = (each + 1) * burst + widest
    times: list[list[tuple[float, float]]] = [[] for _ in methods]
    states: list[loop.DecodingState] = []
    for turn in bar(range(rounds), "step times", generation.progress):
        if turn % each == 0:
            started = zip(methods, prompts, lengths, strict=True)
            states = [
                _start(base, one, rows, own + beyond, generation) for (one, _), rows, own in started
            ]
        # the order rotates, so that no method always follows the slowest one
        for place in [*range(turn % len(methods), len(methods)), *range(turn % len(methods))]:
            steps = [_time_step(base, *methods[place], states[place]) for _ in range(BURST)]
            times[place] += steps[1:]
    # the context of a step in the middle, at the usual pace
    return [
        _point(tree, len(rows), own + each * BURST / 2, one)
        for (_, tree), rows, own, one in zip(methods, prompts, lengths, times, strict=True)
    ]


def _point(
    tree: policies.TreePolicy, batch: int, context: float, times: Sequence[tuple[float, float]]
) -> Point:
    return Point(
        batch=batch,
        context=context,
        nodes=tree.num_nodes,
        depth=tree.depth,
        verify=trimmed_mean([whole - draft for whole, draft in times]),
        draft=trimmed_mean([draft for _, draft in times]) if tree.depth else 0.0,
    )


def room(depth: int) -> int:
    """Return the tokens after a context: a burst of steps with this depth, and a last tree."""
    return (BURST + 2) * (depth + 1)


def _start(
    base: FrozenBase,
    drafter: Drafter | None,
    prompts: list[list[int]],
    capacity: int,
    generation: GenerationSettings,
) -> loop.DecodingState:
    sampling = [generation.sampling] * len(prompts)
    return loop.start(base, drafter, prompts, capacity, sampling, coupled=generation.coupled)[0]


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


def fit(points: Sequence[Point]) -> tuple[StepCost, CostError]:
    """Return the costs with the least squared relative error, and their error.

    This is SmartSpec's linear form. If it errs by more than `WORST`, it is the form of `REFINED`
    with the least error on held-out points: each third of them against the fit to the others.
    """
    form = LINEAR
    if max(_errors(_fit(points, LINEAR), points)) > WORST:
        form = min(REFINED, key=lambda one: sum(e**2 for e in _held_out(points, one)))
    cost = _fit(points, form)
    errors = _errors(cost, points)
    return cost, CostError(
        points=len(points),
        median=statistics.median(errors),
        largest=max(errors),
        held_out=max(_held_out(points, form)),
    )


def _held_out(points: Sequence[Point], form: Form) -> list[float]:
    """Return the error of every point against a fit to the two thirds without it."""
    errors: list[float] = []
    for third in range(3):
        kept = [point for place, point in enumerate(points) if place % 3 != third]
        errors += _errors(_fit(kept, form), points[third::3])
    return errors


def _errors(cost: StepCost, points: Sequence[Point]) -> list[float]:
    return [
        abs(cost.seconds(one.batch, one.context, one.nodes, one.depth) / one.seconds - 1)
        for one in points
    ]


def _fit(points: Sequence[Point], form: Form) -> StepCost:
    """Return the best costs of a form."""
    drafted = [one for one in points if one.depth]
    names = ["fixed", "token", "context"]
    refined = ["several"] if form.several else []
    verify = _least_squares(
        [
            [1.0, max(tokens - form.free, 0) ** form.power, one.batch * one.context]
            + [float(tokens > 1) for _ in refined]
            for one in points
            for tokens in (one.batch * one.nodes,)
        ],
        [one.verify for one in points],
    )
    draft = _least_squares(
        [
            [one.depth, one.batch * (one.nodes - 1), one.depth * one.batch * one.context]
            for one in drafted
        ],
        [one.draft for one in drafted],
    )
    own: dict[str, Any] = dict(zip(names + refined, verify, strict=True))
    drafting: dict[str, Any] = dict(zip(names, draft, strict=True))
    verifying = ForwardCost(**own, free=form.free, power=form.power)
    return StepCost(verify=verifying, draft=ForwardCost(**drafting))


def _least_squares(rows: Sequence[Sequence[int | float]], seconds: Sequence[float]) -> list[float]:
    """Return the non-negative coefficients with the least squared relative error.

    There are so few coefficients that every subset of non-zero ones is tried; that is exact.
    """
    number = len(rows[0]) if rows else 3
    target = torch.tensor(seconds, dtype=torch.float64)
    scaled = torch.tensor(rows, dtype=torch.float64).view(-1, number) / target[:, None]
    ones = torch.ones(len(seconds), 1, dtype=torch.float64)
    best, least = [0.0] * number, float("inf")
    for count in range(1, number + 1):
        for chosen in itertools.combinations(range(number), count):
            columns = scaled[:, chosen]
            # seconds per token and per step differ by orders of magnitude, so scale the columns
            sizes = columns.norm(dim=0).clamp(min=1e-300)
            found = torch.linalg.lstsq(columns / sizes, ones, driver="gelsd").solution[:, 0]
            missed = (columns / sizes @ found - 1).square().sum().item()
            if (found >= 0).all() and missed < least - 1e-12:
                least, best = missed, [0.0] * number
                for place, value in zip(chosen, (found / sizes).tolist(), strict=True):
                    best[place] = value
    return best

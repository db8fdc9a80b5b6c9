"""Simulate loads: the waiting times of requests without speculation and with it, load.json.

The server is the continuous batching of `decoding.engine.Engine`, event by event: see
docs/serve.md. Requests arrive at random or as recorded, and drafts are accepted at random.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specheads.base.model import FrozenBase
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.core.files import local_path
from specheads.core.ranges import NonNegativeFloat, PositiveInt, check_value, setting_hints
from specheads.data.files import read_jsonl
from specheads.decoding.cost import (
    ForwardCost,
    MovingRates,
    RequestRates,
    RowLoad,
    StepCost,
    StepLoad,
)
from specheads.decoding.goodput import Goodput, best_draft
from specheads.decoding.request import group_by_length
from specheads.measure.summary import ConsoleTable

MEASURED = "measured"
"""Source of step times that `specheads tune` timed, in place of a machine's name."""
LOAD_SHARES = 0.25, 0.5, 0.75, 0.95, 1.2
"""Default loads, relative to the highest load that the base alone can serve."""
WEIGHT_BYTES = 2
"""Bytes of a parameter and of a cached number, for computed times: bfloat16."""

# --- requests ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request."""

    seconds: NonNegativeFloat
    """Arrival time."""
    prompt_tokens: PositiveInt
    new_tokens: PositiveInt
    """Number of new tokens of its answer."""


def poisson_arrivals(
    rate: float, number: int, *, prompt_tokens: int, new_tokens: int, seed: int = 0
) -> list[Arrival]:
    """Return `number` requests of a Poisson process of `rate` requests per second."""
    times = np.random.default_rng(seed).exponential(size=number).cumsum() / rate
    return [Arrival(time, prompt_tokens, new_tokens) for time in times.tolist()]


def read_arrivals(path: str | Path) -> list[Arrival]:
    """Return the recorded requests of a .jsonl file in order of time: see docs/serve.md."""
    arrivals = []
    for line, row in read_jsonl(local_path(path)):
        for name, hint in setting_hints(Arrival).items():
            check_value(f"{name} in {line}", row.get(name), hint)
        arrivals.append(Arrival(float(row["seconds"]), row["prompt_tokens"], row["new_tokens"]))
    return sorted(arrivals, key=lambda arrival: arrival.seconds)


def default_rates(
    cost: StepCost, prompt_tokens: int, new_tokens: int, max_batch: int
) -> list[float]:
    """Return five loads, from a quarter of what the base alone can serve to more than that."""
    step = cost.seconds(max_batch, prompt_tokens + new_tokens / 2, 1, 0)
    # share of a request in the system's time
    seconds = cost.verify.seconds(prompt_tokens, 0) + new_tokens * step / max_batch
    # three digits, as they are shown
    return [float(f"{share / seconds:.3g}") for share in LOAD_SHARES]


# --- the server --------------------------------------------------------------------------------


@dataclass(slots=True)
class ServedRequest:
    """A request in the server, with times in seconds."""

    arrival: Arrival
    num_right: Sequence[int]
    """How many drafts are right after each new token."""
    rates: RequestRates
    """Estimates for goodput."""
    first_token_time: float = 0.0
    end_time: float = 0.0
    """Time of the last token."""
    tokens: int = 0
    """New tokens so far."""

    @property
    def length(self) -> int:
        """Tokens of the text so far."""
        return self.arrival.prompt_tokens + self.tokens

    @property
    def room(self) -> int:
        """Remaining new tokens."""
        return self.arrival.new_tokens - self.tokens

    def add_step(self, depth: int, *, is_observed: bool) -> None:
        """Add the tokens of a step that drafted so many levels."""
        num_right = self.num_right[self.tokens - 1]
        accepted = min(num_right, depth)
        if is_observed:
            self.rates.drafted.update(accepted, refused=num_right < depth)
        self.tokens += min(accepted + 1, self.room)


class ServerStep(NamedTuple):
    """A step of some rows together."""

    batch: int
    depth: int
    """Drafted levels."""


def simulate(
    policy: Goodput,
    arrivals: Sequence[Arrival],
    num_right: Sequence[Sequence[int]],
    *,
    max_batch: int = 1,
    depth: int | None = None,
) -> tuple[list[ServedRequest], list[ServerStep]]:
    """Serve all requests, first come, first served; return them in order of arrival, and the steps.

    A turn admits the requests that have arrived and fit, reads prompts of similar length together,
    and takes a step of all rows. `num_right` is how many drafts are right after each new token, of
    each request. `depth` is that of the chain of every step; None chooses by goodput.
    """
    pairs = zip(arrivals, num_right, strict=True)
    rates = policy.rates
    served = [ServedRequest(*pair, RequestRates(MovingRates(rates))) for pair in pairs]
    steps, waiting, rows, clock = list[ServerStep](), deque(served), list[ServedRequest](), 0.0
    while waiting or rows:
        if not rows:
            clock = max(clock, waiting[0].arrival.seconds)
        new = list[ServedRequest]()
        while waiting and len(rows) + len(new) < max_batch and waiting[0].arrival.seconds <= clock:
            new.append(waiting.popleft())
        lengths = [row.arrival.prompt_tokens for row in new]
        for group in group_by_length(lengths):
            longest = max(lengths[index] for index in group)
            clock += policy.cost.verify.seconds(len(group) * longest, 0)
            for row in [new[index] for index in group]:
                row.first_token_time, row.end_time, row.tokens = clock, clock, 1
                rows.append(row)
        rows = [row for row in rows if row.room]
        if not rows:
            continue
        step_depth = depth
        if step_depth is None:
            load = StepLoad([RowLoad(row.length, row.room, row.rates) for row in rows])
            # without copied text a draft's index is its depth
            step_depth = best_draft(policy.cost, policy.drafts, load)
        context = max(row.length for row in rows)
        clock += policy.cost.seconds(len(rows), context, step_depth + 1, step_depth)
        steps.append(ServerStep(len(rows), step_depth))
        for row in rows:
            row.add_step(step_depth, is_observed=depth is None)
            row.end_time = clock
        rows = [row for row in rows if row.room]
    return served, steps


def sampled_lengths(rates: Sequence[float], seed: Sequence[int], new_tokens: int) -> list[int]:
    """Return how many drafts are right after each new token, sampled independently.

    `rates` are conditional acceptance rates by depth.
    """
    random = np.random.default_rng(seed).random((new_tokens, len(rates)))
    return (random < np.array(rates)).cumprod(axis=1).sum(axis=1).astype(int).tolist()


# --- load.json ---------------------------------------------------------------------------------


def distribution(values: Sequence[float]) -> dict[str, float]:
    """Return mean and percentiles of these values."""
    p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
    return {"mean": float(np.mean(values)), "p50": p50, "p90": p90, "p99": p99}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRow:
    """One draft policy under one load."""

    load: str
    """Requests per second, or the name of the recording."""
    draft: str
    """none, a fixed depth, or goodput."""
    latency: dict[str, float]
    """Seconds from a request's arrival to its last token."""
    first_token: dict[str, float]
    """Seconds from a request's arrival to its first token."""
    tokens_per_second: float
    """New tokens of all requests over the time from the first arrival to the last token."""
    mean_depth: float
    """Drafted depth, over the rows of all steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResults:
    """load.json."""

    schema: int = 1
    times: str
    """Source of the step times: measured, or computed for a machine."""
    rates: list[float]
    """Conditional acceptance by depth."""
    max_batch: int
    seed: int
    rows: list[LoadRow]


def summarise_load(
    load: str, draft: str, served: Sequence[ServedRequest], steps: Sequence[ServerStep]
) -> LoadRow:
    """Return the figures of a simulation."""
    seconds = max(row.end_time for row in served) - served[0].arrival.seconds
    num_rows = sum(step.batch for step in steps)
    return LoadRow(
        load=load,
        draft=draft,
        latency=distribution([row.end_time - row.arrival.seconds for row in served]),
        first_token=distribution([row.first_token_time - row.arrival.seconds for row in served]),
        tokens_per_second=sum(row.tokens for row in served) / seconds,
        mean_depth=sum(step.batch * step.depth for step in steps) / max(num_rows, 1),
    )


def load_table(load: LoadResults) -> ConsoleTable:
    """Return the rows as a table for the console."""
    columns = "load", "draft", "mean", "p50", "p90", "p99", "first token", "tokens/s", "depth"
    rows = []
    for row in load.rows:
        times = *row.latency.values(), row.first_token["mean"]
        figures = map(three_digits, (*times, row.tokens_per_second))
        rows.append((row.load, row.draft, *figures, f"{row.mean_depth:.2f}"))
    title = f"seconds of requests by load (requests/s), simulated; times {load.times}"
    title += ", not measured" * (load.times != MEASURED)
    return ConsoleTable(title, rows, columns, num_names=2)


def three_digits(value: float) -> str:
    """Return three digits, or all digits of a large number: no exponent."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def simulate_loads(
    policy: Goodput,
    loads: Mapping[str, Sequence[Arrival]],
    *,
    times: str,
    depths: Sequence[int] = (),
    max_batch: int = 16,
    seed: int = 0,
) -> LoadResults:
    """Simulate the base alone, fixed depths and goodput, without copied text, under each load.

    `times` names the source of the step times. `depths` are the fixed ones; zero is the base alone,
    and empty is zero and the deepest chain.
    """
    rates = list(policy.rates)
    depths = list(dict.fromkeys(depths or [0, len(rates)]))
    if max(depths) > len(rates):
        raise InputError(
            f"depths can be at most {len(rates)}, as acceptance is known of, got {max(depths)}"
        )
    drafts = {f"depth {depth}" if depth else "none": depth for depth in depths}
    rows = []
    for load, arrivals in loads.items():
        num_right = [
            sampled_lengths(rates, (seed, number), arrival.new_tokens)
            for number, arrival in enumerate(arrivals)
        ]
        for draft, depth in {**drafts, "goodput": None}.items():
            served, steps = simulate(policy, arrivals, num_right, max_batch=max_batch, depth=depth)
            rows.append(summarise_load(load, draft, served, steps))
    return LoadResults(times=times, rates=rates, max_batch=max_batch, seed=seed, rows=rows)


# --- machines that one does not have -----------------------------------------------------------


def computed_cost(
    *,
    bandwidth: float,
    flops: float,
    parameters: float,
    draft_parameters: float,
    position_bytes: int = 0,
    levels: int = 1,
) -> StepCost:
    """Return step times from the limits of a machine and the sizes of base and drafter.

    A forward reads the weights once, and the base's also the keys and values of its context; each
    token takes two operations per parameter. These times are added. The arithmetic of attention and
    the time for kernel launches, sampling and communication are left out: a real machine is slower.

    Args:
        bandwidth: Bytes per second between memory and processor.
        flops: Dense floating-point operations per second in the precision of the weights.
        parameters: Parameters of the base.
        draft_parameters: Parameters of one forward of the drafter.
        position_bytes: Bytes of keys and values of one position of the base, in all layers.
        levels: As in `StepCost`.
    """

    def forward(parameters: float, position_bytes: int) -> ForwardCost:
        fixed, token = WEIGHT_BYTES * parameters / bandwidth, 2 * parameters / flops
        return ForwardCost(fixed=fixed, token=token, context=position_bytes / bandwidth)

    verify, draft = forward(parameters, position_bytes), forward(draft_parameters, 0)
    return StepCost(verify=verify, draft=draft, levels=levels)


def model_sizes(base: FrozenBase, head: Head) -> dict[str, Any]:
    """Return the arguments of `computed_cost` that follow from a base and a head.

    A head whose levels share one projection reads all its parameters at each level, other heads
    those of the level; a block head drafts all levels at once.
    """
    num_parameters = sum(parameter.numel() for parameter in head.parameters())
    weights = [weight for weight, _ in head.projections()]
    is_shared = all(weight is weights[0] for weight in weights)
    is_trained = any(weights[0] is parameter for parameter in head.parameters())
    # a concatenated projection borrows the base's columns and trains the others
    num_borrowed = 0 if is_trained else len(weights[0]) * head.width
    num_read = num_parameters if is_shared else num_parameters // head.depth
    return {
        "parameters": float(base.num_parameters),
        "draft_parameters": float(num_read + num_borrowed),
        "position_bytes": base.slot_bytes // base.dtype.itemsize * WEIGHT_BYTES,
        "levels": head.depth if head.drafts_blocks else 1,
    }

"""Speed: the loop with a drafter against the same loop with the base alone, turn by turn."""

import resource
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from specheads.base.model import FrozenBase
from specheads.core.drafter import Drafter, Features, Memory
from specheads.core.tree import TokenTree
from specheads.decoding.acceptance import accept
from specheads.decoding.acceptance.rules import AcceptanceRule, acceptance_rule
from specheads.decoding.acceptance.sampling import GREEDY, Rows, Sampling, each_prompt
from specheads.decoding.generate import generate
from specheads.decoding.trees import policies
from specheads.measure.counts import bootstrap_interval
from specheads.measure.how import How
from specheads.measure.progress import bar
from specheads.measure.results import Speed


@dataclass(slots=True)
class Timing:
    """One timed call of `generate`."""

    seconds: float
    """Prompt and all new tokens."""
    step_seconds: float
    """From the first forward's verdict to the last one's: `num_steps` whole steps."""
    num_steps: int
    new_tokens: int
    forwards: int


class _Clock:
    """A rule that also notes when it is called: once in every step."""

    def __init__(self, acceptance: AcceptanceRule) -> None:
        self.acceptance = acceptance
        self.ticks: list[float] = []

    def __call__(
        self, tree: TokenTree, logits: Tensor, ancestors: Tensor, rows: Rows
    ) -> accept.Verdict:
        self.ticks.append(time.perf_counter())
        return self.acceptance(tree, logits, ancestors, rows)


class _Stopwatch(policies.TreePolicy):
    """A policy that also notes how long each of its drafts takes.

    It waits for the device before and after each, so what it times is not timed otherwise.
    """

    def __init__(self, tree: policies.TreePolicy, base: FrozenBase) -> None:
        self.tree, self.base = tree, base
        self.name, self.num_nodes, self.depth = tree.name, tree.num_nodes, tree.depth
        self.seconds: list[float] = []

    def grow(
        self,
        drafter: Drafter,
        features: Features,
        tokens: Int[Tensor, "batch time"],
        count: Int[Tensor, " batch"],
        memory: Memory | None,
        rows: Rows | None = None,
    ) -> TokenTree:
        """Draft, by the clock."""
        synchronise(self.base)
        start = time.perf_counter()
        tree = self.tree.grow(drafter, features, tokens, count, memory, rows)
        synchronise(self.base)
        self.seconds.append(time.perf_counter() - start)
        return tree


def synchronise(base: FrozenBase) -> None:
    """Wait until the base's device has done what it was given."""
    if base.device.type == "cuda":
        torch.cuda.synchronize(base.device)


def time_generate(
    base: FrozenBase,
    drafter: Drafter | None,
    prompts: list[list[int]],
    *,
    tree: policies.TreePolicy | None,
    settings: Sampling = GREEDY,
    acceptance: str = "match",
    max_new_tokens: int,
    stop_at_eos: bool,
) -> Timing:
    """Decode once, by the clock."""
    clock = _Clock(acceptance_rule(acceptance))
    synchronise(base)
    start = time.perf_counter()
    out = generate(
        base,
        drafter,
        prompts,
        max_new_tokens=max_new_tokens,
        tree=tree,
        settings=each_prompt(settings, len(prompts)),
        acceptance=clock,
        stop_at_eos=stop_at_eos,
    )
    synchronise(base)
    seconds = time.perf_counter() - start
    ticks = clock.ticks
    return Timing(
        seconds=seconds,
        step_seconds=ticks[-1] - ticks[0] if ticks else 0.0,
        num_steps=max(len(ticks) - 1, 0),
        new_tokens=sum(map(len, out.tokens)),
        forwards=sum(out.forwards),
    )


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of drafting."""

    drafter: Drafter
    tree: policies.TreePolicy


Timings = dict[str | None, list[list[Timing]]]
"""By arm, None being the base alone: every batch of prompts, every repetition of it."""


def time_arms(
    base: FrozenBase,
    arms: Mapping[str, Arm],
    prompts: list[list[int]],
    how: How,
    *,
    repetitions: int,
    warmup: int = 1,
) -> Timings:
    """Time the base alone and several ways of drafting, turn by turn.

    All decode a batch one right after the other, so that a slower machine slows all, and each
    repetition begins with another of them.

    Args:
        base: The model that decides.
        arms: What drafts, by name.
        prompts: Token ids.
        how: How prompts are decoded; trees are those of the arms.
        repetitions: How often everything is timed.
        warmup: Batches that each decodes before the clock counts.

    Raises:
        ValueError: There is no prompt, no repetition, or no step to time.
    """
    _refuse_nothing(len(prompts), repetitions, how.max_new_tokens)
    units = [prompts[i : i + how.batch_size] for i in range(0, len(prompts), how.batch_size)]
    entrants: dict[str | None, Arm | None] = {None: None, **arms}
    names = list(entrants)

    def run(name: str | None, unit: list[list[int]]) -> Timing:
        arm = entrants[name]
        return time_generate(
            base,
            arm.drafter if arm else None,
            unit,
            tree=arm.tree if arm else None,
            settings=how.sampling,
            acceptance=how.acceptance if arm else "match",
            max_new_tokens=how.max_new_tokens,
            stop_at_eos=how.stop_at_eos,
        )

    for unit in units[:warmup]:
        for name in names:
            run(name, unit)
    _reset_peak(base)
    timings: Timings = {name: [[] for _ in units] for name in names}
    work = [(turn, place) for turn in range(repetitions) for place in range(len(units))]
    for turn, place in bar(work, "speed", how.progress):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            timings[name][place].append(run(name, units[place]))
    return timings


def measure_speed(
    base: FrozenBase,
    drafter: Drafter,
    prompts: list[list[int]],
    how: How,
    *,
    repetitions: int = 3,
    warmup: int = 1,
) -> Speed:
    """Return the `speed` section of results.json: see `time_arms`.

    Of a batch's repetitions the median counts. Times cover the prompt and all new tokens;
    `step_overhead` covers decode steps only, and `draft_milliseconds` is the median time that a
    step spends drafting, for a single row.

    Args:
        base: The model that decides.
        drafter: What guesses.
        prompts: Token ids.
        how: How prompts are decoded; intervals are over batches.
        repetitions: How often everything is timed.
        warmup: Batches decoded both ways before the clock counts.

    Raises:
        ValueError: There is no prompt, no repetition, or no step to time.
    """
    tree = how.tree or policies.chain(drafter.depth)
    arms = {"drafted": Arm(drafter, tree)}
    timings = time_arms(base, arms, prompts, how, repetitions=repetitions, warmup=warmup)
    return replace(
        summarise(timings[None], timings["drafted"]),
        draft_milliseconds=_draft_milliseconds(base, drafter, prompts[0], tree, how.max_new_tokens),
        repetitions=repetitions,
        peak_gib=peak_gib(base),
    )


def _draft_milliseconds(
    base: FrozenBase,
    drafter: Drafter,
    prompt: list[int],
    tree: policies.TreePolicy,
    max_new_tokens: int,
) -> float:
    """Return the median time that a decode step spends drafting, greedy and one row."""
    watch = _Stopwatch(tree, base)
    generate(base, drafter, [prompt], max_new_tokens=max_new_tokens, tree=watch, stop_at_eos=False)
    return 1e3 * statistics.median(watch.seconds)


def summarise(alone: list[list[Timing]], drafted: list[list[Timing]]) -> Speed:
    """Return rates, their ratio and its interval from timings of the same batches, both ways.

    Time is compared a token, because output may differ by a tie in rounding; where it does
    not, the speed-up is simply the ratio of the summed times.
    """
    base_seconds = [_median_seconds(arm) for arm in alone]
    seconds = [_median_seconds(arm) for arm in drafted]
    base_tokens, tokens = ([arm[0].new_tokens for arm in arms] for arms in (alone, drafted))
    # what the drafted arm would have taken for the base's number of tokens
    matched = [
        taken * wanted / given
        for taken, wanted, given in zip(seconds, base_tokens, tokens, strict=True)
    ]
    base_step, step = _step_seconds(alone), _step_seconds(drafted)
    return Speed(
        base_tokens_per_second=sum(base_tokens) / sum(base_seconds),
        tokens_per_second=sum(tokens) / sum(seconds),
        speedup=sum(base_seconds) / sum(matched),
        interval=bootstrap_interval(base_seconds, matched),
        step_overhead=step / base_step,
        step_milliseconds=1e3 * step,
        base_step_milliseconds=1e3 * base_step,
        new_tokens=sum(tokens),
        forwards=sum(arm[0].forwards for arm in drafted),
    )


def _median_seconds(timings: list[Timing]) -> float:
    return statistics.median(timing.seconds for timing in timings)


def _step_seconds(arms: list[list[Timing]]) -> float:
    """Return the mean time of a decode step over batches, the median repetition of each."""
    seconds = sum(statistics.median(one.step_seconds for one in arm) for arm in arms)
    steps = sum(statistics.median(one.num_steps for one in arm) for arm in arms)
    if steps == 0:
        raise ValueError(
            "step_overhead needs a prompt of two forwards at least, and every text ended "
            "sooner; raise max_new_tokens or choose other prompts"
        )
    return seconds / steps


def _refuse_nothing(num_prompts: int, repetitions: int, max_new_tokens: int) -> None:
    if num_prompts < 1 or repetitions < 1 or max_new_tokens < 3:
        raise ValueError(
            "speed needs a prompt, a repetition and 3 new tokens at least, got "
            f"{num_prompts}, {repetitions} and {max_new_tokens}"
        )


def _reset_peak(base: FrozenBase) -> None:
    if base.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(base.device)


def peak_gib(base: FrozenBase) -> float:
    """Return the peak memory: of the device since the last reset, or of the whole process."""
    if base.device.type == "cuda":
        return torch.cuda.max_memory_allocated(base.device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # kibibytes on Linux, bytes on macOS
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20

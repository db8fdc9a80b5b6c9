"""Speed: the loop with a drafter against the same loop with the base alone, turn by turn."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch

from specheads.base.model import FrozenBase
from specheads.core.device_memory import peak_gib
from specheads.core.drafter import Drafter
from specheads.core.errors import InputError
from specheads.core.machine import synchronise
from specheads.decoding.acceptance.sampling import GREEDY
from specheads.decoding.generate import generate
from specheads.decoding.trees import policies
from specheads.measure.counts import bootstrap_interval
from specheads.measure.how import How
from specheads.measure.online import Decoded, decode_prompts
from specheads.measure.rates import Gain
from specheads.measure.results import Speed
from specheads.runs.progress import bar


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


def time_generate(
    base: FrozenBase, drafter: Drafter | None, prompts: list[list[int]], how: How
) -> Timing:
    """Decode prompts together once, by the clock.

    Without a drafter the base decodes alone, whatever tree and acceptance rule are said.
    """
    synchronise(base.device)
    start = time.perf_counter()
    out = generate(
        base,
        drafter,
        prompts,
        max_new_tokens=how.max_new_tokens,
        tree=how.tree if drafter is not None else None,
        sampling=how.sampling,
        acceptance=how.acceptance if drafter is not None else "match",
        stop_at_eos=how.stop_at_eos,
        coupled=how.coupled,
    )
    synchronise(base.device)
    seconds = time.perf_counter() - start
    ends = sorted({step.times.ended for steps in out.steps for step in steps})
    return Timing(
        seconds=seconds,
        step_seconds=ends[-1] - ends[0] if ends else 0.0,
        num_steps=max(len(ends) - 1, 0),
        new_tokens=sum(map(len, out.tokens)),
        forwards=sum(out.forwards),
    )


@runtime_checkable
class Way(Protocol):
    """One way of decoding that can be measured."""

    @property
    def tree(self) -> policies.TreePolicy:
        """How its drafts grow."""
        ...

    @property
    def batches(self) -> bool:
        """Whether it decodes prompts together."""
        ...

    def decode(self, base: FrozenBase, prompts: list[list[int]], how: How) -> list[Decoded]:
        """Decode every prompt and count its forwards."""
        ...

    def time(self, base: FrozenBase, prompts: list[list[int]], how: How) -> Timing:
        """Decode prompts together once, by the clock."""
        ...

    def draft_seconds(self, base: FrozenBase, prompts: list[list[int]], how: How) -> float:
        """Return the median time that a step spends drafting."""
        ...


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of drafting in our loop."""

    drafter: Drafter
    tree: policies.TreePolicy
    acceptance: str | None = None
    """What is kept of its trees; None is as all are told."""
    coupled: bool | None = None
    """Whether its drafts see the noise that the base draws with; None is as all are told."""
    batches: bool = True

    def how(self, how: How) -> How:
        """Return how it decodes where all are told to decode like this."""
        return replace(
            how,
            tree=self.tree,
            acceptance=how.acceptance if self.acceptance is None else self.acceptance,
            coupled=how.coupled if self.coupled is None else self.coupled,
        )

    def decode(self, base: FrozenBase, prompts: list[list[int]], how: How) -> list[Decoded]:
        """Decode every prompt and count its forwards."""
        return decode_prompts(base, self.drafter, prompts, self.how(how))

    def time(self, base: FrozenBase, prompts: list[list[int]], how: How) -> Timing:
        """Decode prompts together once, by the clock."""
        return time_generate(base, self.drafter, prompts, self.how(how))

    def draft_seconds(self, base: FrozenBase, prompts: list[list[int]], how: How) -> float:
        """Return the median time that a step spends drafting, waiting for the device."""
        how = self.how(how)
        out = generate(
            base,
            self.drafter,
            prompts,
            max_new_tokens=how.max_new_tokens,
            tree=how.tree,
            sampling=how.sampling,
            acceptance=how.acceptance,
            coupled=how.coupled,
            stop_at_eos=False,
            timed=True,
        )
        times = [step.times for step in out.steps[0]]
        return statistics.median([one.drafted - one.began for one in times] or [0.0])


Timings = dict[str | None, list[list[Timing]]]
"""By arm, None being the base alone: every batch of prompts, every repetition of it."""


def time_arms(
    base: FrozenBase,
    arms: Mapping[str, Way],
    prompts: list[list[int]],
    how: How,
    *,
    repetitions: int,
) -> Timings:
    """Time the base alone and several ways of drafting, turn by turn.

    All decode a batch one right after the other, so that a slower machine slows all, and each
    repetition begins with another of them. The first batch is decoded once before the clock
    counts. Trees are the arms' own.
    """
    if len(prompts) < 1 or repetitions < 1 or how.max_new_tokens < 3:
        raise InputError(
            "speed needs a prompt, a repetition and 3 new tokens at least, got "
            f"{len(prompts)}, {repetitions} and {how.max_new_tokens}"
        )
    units = [prompts[i : i + how.batch_size] for i in range(0, len(prompts), how.batch_size)]
    names = [None, *arms]

    def run(name: str | None, unit: list[list[int]]) -> Timing:
        if name is None:
            return time_generate(base, None, unit, how)
        return arms[name].time(base, unit, how)

    for name in bar(names, "warming up", how.progress):
        run(name, units[0])
    if base.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(base.device)
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
) -> Speed:
    """Return the `speed` section of results.json: see `time_arms`.

    Of a batch's repetitions the median counts. Times cover the prompt and all new tokens;
    `step_overhead` covers decode steps only, and `draft_milliseconds` is the median time that a
    step spends drafting, greedy and for a single row. Intervals are over batches.
    """
    arm = Arm(drafter, how.tree or policies.chain(drafter.depth))
    timings = time_arms(base, {"drafted": arm}, prompts, how, repetitions=repetitions)
    seconds = arm.draft_seconds(base, prompts[:1], replace(how, sampling=GREEDY))
    return replace(
        summarise(timings[None], timings["drafted"], unit_sources(prompts, how)),
        draft_milliseconds=1e3 * seconds,
        repetitions=repetitions,
        peak_gib=peak_gib(base.device),
    )


def unit_sources(prompts: Sequence[object], how: How) -> Sequence[str]:
    """Return what each batch was cut from; batches of several prompts stand for themselves."""
    num_units = -(-len(prompts) // how.batch_size)
    return how.sources_of(prompts) if how.batch_size == 1 else [""] * num_units


def summarise(
    alone: list[list[Timing]], drafted: list[list[Timing]], sources: Sequence[str] = ()
) -> Speed:
    """Return rates, their ratio and its interval from timings of the same batches, both ways.

    Time is compared a token, because output may differ by a tie in rounding; where it does
    not, the speed-up is simply the ratio of the summed times. What a step takes is None where every
    text ended before its second forward.
    """
    base_seconds, seconds = _medians(alone), _medians(drafted)
    base_tokens, tokens = ([arm[0].new_tokens for arm in arms] for arms in (alone, drafted))
    gain = paired_speed(drafted, alone, sources)
    base_step, step = _step_seconds(alone), _step_seconds(drafted)
    return Speed(
        base_tokens_per_second=sum(base_tokens) / sum(base_seconds),
        tokens_per_second=sum(tokens) / sum(seconds),
        speedup=gain.ratio,
        interval=gain.interval,
        step_overhead=step / base_step if step and base_step else None,
        step_milliseconds=1e3 * step if step else None,
        base_step_milliseconds=1e3 * base_step if base_step else None,
        new_tokens=sum(tokens),
        forwards=sum(arm[0].forwards for arm in drafted),
    )


def paired_speed(
    ours: list[list[Timing]], theirs: list[list[Timing]], sources: Sequence[str] = ()
) -> Gain:
    """Return our tokens per second over theirs, on the same batches, and its interval.

    Of a batch's repetitions the median counts.
    """
    seconds, our_seconds = _medians(theirs), _medians(ours)
    # what we would have taken for their number of tokens
    matched = [
        taken * other[0].new_tokens / one[0].new_tokens
        for taken, one, other in zip(our_seconds, ours, theirs, strict=True)
    ]
    interval = bootstrap_interval(seconds, matched, sources)
    return Gain(ratio=sum(seconds) / sum(matched), interval=interval)


def _medians(arm: list[list[Timing]]) -> list[float]:
    return [statistics.median(timing.seconds for timing in timings) for timings in arm]


def _step_seconds(arms: list[list[Timing]]) -> float | None:
    """Return the mean time of a decode step over batches, the median repetition of each."""
    seconds = sum(statistics.median(one.step_seconds for one in arm) for arm in arms)
    steps = sum(statistics.median(one.num_steps for one in arm) for arm in arms)
    return seconds / steps if steps else None

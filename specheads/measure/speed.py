"""Speed: the loop with a drafter and the same loop with the base alone, timed in turns."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch

from specheads.base.model import FrozenBase
from specheads.core.drafter import Drafter
from specheads.core.errors import InputError
from specheads.core.machine import peak_gib, synchronise
from specheads.decoding.sampling import GREEDY
from specheads.decoding.trees import policies
from specheads.measure.counts import bootstrap_interval
from specheads.measure.generation import (
    Decoded,
    GenerationSettings,
    decode_prompts,
    generate_with,
)
from specheads.measure.results import Gain, Speed
from specheads.runs.progress import bar


@dataclass(slots=True)
class Timing:
    """One timed call of `generate`."""

    seconds: float
    """Time for the prompt and all new tokens."""
    step_seconds: float
    """Time between the ends of the first and the last step: `num_steps` whole steps."""
    num_steps: int
    new_tokens: int
    forwards: int


def time_generate(
    base: FrozenBase,
    drafter: Drafter | None,
    prompts: list[list[int]],
    generation: GenerationSettings,
) -> Timing:
    """Decode prompts together once and time it; without a drafter the base decodes alone."""
    synchronise(base.device)
    start = time.perf_counter()
    out = generate_with(base, drafter, prompts, generation)
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
class Method(Protocol):
    """A decoding method that can be measured."""

    @property
    def tree(self) -> policies.TreePolicy:
        """The draft tree."""
        ...

    @property
    def batches(self) -> bool:
        """Whether it decodes prompts together."""
        ...

    def decode(
        self, base: FrozenBase, prompts: list[list[int]], generation: GenerationSettings
    ) -> list[Decoded]:
        """Decode every prompt and count its forwards."""
        ...

    def time(
        self, base: FrozenBase, prompts: list[list[int]], generation: GenerationSettings
    ) -> Timing:
        """Decode prompts together once and time it."""
        ...

    def draft_seconds(
        self, base: FrozenBase, prompts: list[list[int]], generation: GenerationSettings
    ) -> float:
        """Return the median drafting time of a step."""
        ...


@dataclass(frozen=True, slots=True)
class DraftMethod:
    """A drafter with a tree in our loop."""

    drafter: Drafter
    tree: policies.TreePolicy
    acceptance: str | None = None
    """Acceptance rule; None is that of the generation settings."""
    coupled: bool | None = None
    """Whether drafts see the noise of the base; None is as in the generation settings."""
    batches: bool = True

    def settings(self, generation: GenerationSettings) -> GenerationSettings:
        """Return the generation settings with this method's own tree and rule."""
        return replace(
            generation,
            tree=self.tree,
            acceptance=generation.acceptance if self.acceptance is None else self.acceptance,
            coupled=generation.coupled if self.coupled is None else self.coupled,
        )

    def decode(
        self, base: FrozenBase, prompts: list[list[int]], generation: GenerationSettings
    ) -> list[Decoded]:
        """Decode every prompt and count its forwards."""
        return decode_prompts(base, self.drafter, prompts, self.settings(generation))

    def time(
        self, base: FrozenBase, prompts: list[list[int]], generation: GenerationSettings
    ) -> Timing:
        """Decode prompts together once and time it."""
        return time_generate(base, self.drafter, prompts, self.settings(generation))

    def draft_seconds(
        self, base: FrozenBase, prompts: list[list[int]], generation: GenerationSettings
    ) -> float:
        """Return the median drafting time of a step; each part of a step waits for the device."""
        generation = replace(self.settings(generation), stop_at_eos=False)
        out = generate_with(base, self.drafter, prompts, generation, timed=True)
        times = [step.times for step in out.steps[0]]
        return statistics.median([one.drafted - one.began for one in times] or [0.0])


Timings = dict[str | None, list[list[Timing]]]
"""By method, None for the base alone: every batch of prompts, every repetition of it."""


def time_methods(
    base: FrozenBase,
    methods: Mapping[str, Method],
    prompts: list[list[int]],
    generation: GenerationSettings,
    *,
    repetitions: int,
) -> Timings:
    """Time the base alone and several methods in turns.

    All methods decode a batch one after the other: a slow phase of the machine then slows all of
    them; each repetition starts with another method. The first batch is decoded once as a
    warm-up.
    """
    if len(prompts) < 1 or repetitions < 1 or generation.max_new_tokens < 3:
        raise InputError(
            "speed needs a prompt, a repetition and 3 new tokens at least, got "
            f"{len(prompts)}, {repetitions} and {generation.max_new_tokens}"
        )
    size = generation.batch_size
    units = [prompts[i : i + size] for i in range(0, len(prompts), size)]
    names = [None, *methods]

    def run(name: str | None, unit: list[list[int]]) -> Timing:
        if name is None:
            return time_generate(base, None, unit, generation)
        return methods[name].time(base, unit, generation)

    for name in bar(names, "warming up", generation.progress):
        run(name, units[0])
    if base.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(base.device)
    timings: Timings = {name: [[] for _ in units] for name in names}
    work = [(turn, place) for turn in range(repetitions) for place in range(len(units))]
    for turn, place in bar(work, "speed", generation.progress):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            timings[name][place].append(run(name, units[place]))
    return timings


def measure_speed(
    base: FrozenBase,
    drafter: Drafter,
    prompts: list[list[int]],
    generation: GenerationSettings,
    *,
    repetitions: int = 3,
) -> Speed:
    """Return the `speed` section of results.json: see `time_methods`.

    The median repetition of a batch counts. Times cover the prompt and all new tokens;
    `step_overhead` covers decode steps only, and `draft_milliseconds` is the median drafting time
    of a step, greedy and for one row. Intervals are over batches.
    """
    method = DraftMethod(drafter, generation.tree or policies.chain(drafter.depth))
    timings = time_methods(base, {"drafted": method}, prompts, generation, repetitions=repetitions)
    seconds = method.draft_seconds(base, prompts[:1], replace(generation, sampling=GREEDY))
    return replace(
        summarise(timings[None], timings["drafted"], unit_sources(prompts, generation)),
        draft_milliseconds=1e3 * seconds,
        repetitions=repetitions,
        peak_gib=peak_gib(base.device),
    )


def unit_sources(prompts: Sequence[object], generation: GenerationSettings) -> Sequence[str]:
    """Return the source of each batch; a batch of several prompts is a source of its own."""
    num_units = -(-len(prompts) // generation.batch_size)
    return generation.sources_of(prompts) if generation.batch_size == 1 else [""] * num_units


def summarise(
    alone: list[list[Timing]], drafted: list[list[Timing]], sources: Sequence[str] = ()
) -> Speed:
    """Return rates, their ratio and its interval from timings of the same batches.

    Times are compared per token, because a tie in rounding may change the output; if it does not,
    the speed-up is the ratio of the summed times. Step times are None if every text ended before
    its second forward.
    """
    base_seconds, seconds = _medians(alone), _medians(drafted)
    base_tokens, tokens = ([unit[0].new_tokens for unit in one] for one in (alone, drafted))
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
        forwards=sum(unit[0].forwards for unit in drafted),
    )


def paired_speed(
    ours: list[list[Timing]], theirs: list[list[Timing]], sources: Sequence[str] = ()
) -> Gain:
    """Return the ratio of our tokens per second to theirs on the same batches.

    The median repetition of a batch counts.
    """
    seconds, our_seconds = _medians(theirs), _medians(ours)
    # our time for their number of tokens
    matched = [
        taken * other[0].new_tokens / one[0].new_tokens
        for taken, one, other in zip(our_seconds, ours, theirs, strict=True)
    ]
    interval = bootstrap_interval(seconds, matched, sources)
    return Gain(ratio=sum(seconds) / sum(matched), interval=interval)


def _medians(units: list[list[Timing]]) -> list[float]:
    return [statistics.median(timing.seconds for timing in unit) for unit in units]


def _step_seconds(units: list[list[Timing]]) -> float | None:
    """Return the mean time of a decode step over batches, the median repetition of each."""
    seconds = sum(statistics.median(one.step_seconds for one in unit) for unit in units)
    steps = sum(statistics.median(one.num_steps for one in unit) for unit in units)
    return seconds / steps if steps else None

"""Speed: the loop with a drafter and the same loop with the base alone, timed in turns."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress

import torch

from specheads.base.model import FrozenBase
from specheads.core.drafter import Drafter
from specheads.core.machine import peak_gib, synchronise
from specheads.decoding.loop import StepLedger
from specheads.decoding.trees.hybrid import remove_lookup
from specheads.measure.counts import bootstrap_interval
from specheads.measure.generation import GenerationSettings, decode_batch
from specheads.measure.results import Gain, LedgerSummary, Speed
from specheads.runs.progress import progress_bar


@dataclass(slots=True)
class Timing:
    """One timed call of `generate`, or the median of several."""

    seconds: float
    """Time for the prompt and all new tokens."""
    step_seconds: float
    """Time between the ends of the first and the last step: `num_steps` whole steps."""
    num_steps: int | float
    new_tokens: int
    forwards: int
    source: str = ""
    """As in `DepthCounts`; a batch of several prompts is a source of its own."""
    prompt_seconds: float = 0.0
    """Time for the prompt, and the first token of each text."""
    num_prompts: int = 1

    def decoding(self) -> "Timing":
        """Return the same without the time for the prompt and its first token."""
        seconds, new_tokens = self.seconds - self.prompt_seconds, self.new_tokens - self.num_prompts
        return replace(self, seconds=seconds, new_tokens=new_tokens)


Runner = Callable[[list[list[int]]], Timing]
"""Decodes a batch of prompts once."""


def time_generate(
    base: FrozenBase,
    drafter: Drafter | None,
    prompts: list[list[int]],
    generation: GenerationSettings,
) -> Timing:
    """Decode prompts together once and time it."""
    synchronise(base.device)
    start = time.perf_counter()
    out = decode_batch(base, drafter, prompts, generation)
    synchronise(base.device)
    seconds = time.perf_counter() - start
    ends = sorted({step.times.ended for steps in out.steps for step in steps})
    begins = [steps[0].times.began for steps in out.steps if steps]
    return Timing(
        seconds=seconds,
        step_seconds=ends[-1] - ends[0] if ends else 0.0,
        num_steps=max(len(ends) - 1, 0),
        new_tokens=sum(map(len, out.tokens)),
        forwards=sum(out.forwards),
        prompt_seconds=min(begins, default=start + seconds) - start,
        num_prompts=len(prompts),
    )


def time_in_turns(
    base: FrozenBase,
    methods: Mapping[str, Runner],
    prompts: list[list[int]],
    generation: GenerationSettings,
) -> dict[str | None, list[Timing]]:
    """Return the median timings of each batch by method; None is the base alone.

    The first `speed_prompts` prompts are timed. All methods decode a batch one after the other: a
    slow phase of the machine then slows all of them; each repetition starts with another method.
    The first batch is decoded once as a warm-up.
    """
    prompts, size = prompts[: generation.speed_prompts], generation.batch_size
    batches = [prompts[i : i + size] for i in range(0, len(prompts), size)]
    sources = generation.sources_of(prompts) if size == 1 else [""] * len(batches)
    runners: dict[str | None, Runner] = {
        None: lambda batch: time_generate(base, None, batch, generation.without_drafts),
        **methods,
    }
    for runner in progress_bar([*runners.values()], "warming up", generation.progress):
        runner(batches[0])
    if base.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(base.device)
    names, repeats = [*runners], {name: [[] for _ in batches] for name in runners}
    turns = [(repeat, i) for repeat in range(generation.repeats) for i in range(len(batches))]
    for repeat, i in progress_bar(turns, "speed", generation.progress):
        offset = repeat % len(names)
        for name in names[offset:] + names[:offset]:
            repeats[name][i].append(runners[name](batches[i]))
    return {name: list(map(_median, timings, sources)) for name, timings in repeats.items()}


def _median(timings: list[Timing], source: str) -> Timing:
    names = ("seconds", "step_seconds", "num_steps", "prompt_seconds")
    medians = {name: statistics.median(getattr(time, name) for time in timings) for name in names}
    return replace(timings[0], source=source, **medians)


def measure_speed(
    base: FrozenBase,
    drafter: Drafter,
    prompts: list[list[int]],
    generation: GenerationSettings,
    *,
    with_prompt: bool = True,
) -> Speed:
    """Return the `speed` section of results.json: see `time_in_turns`.

    Times cover the prompt and all new tokens, or decoding only; `step_overhead` covers decode steps
    only. Intervals are over batches. A tree with prompt lookup is also timed without it.
    """
    trees, tree = {"drafted": generation.tree}, generation.tree
    if tree is not None and (head_tree := remove_lookup(tree)) is not tree and head_tree.depth:
        trees["head alone"] = head_tree
    methods = {
        name: partial(time_generate, base, drafter, generation=replace(generation, tree=tree))
        for name, tree in trees.items()
    }
    timings = time_in_turns(base, methods, prompts, generation)
    prompt_seconds = None
    if not with_prompt:
        prompt_seconds = statistics.fmean(timing.prompt_seconds for timing in timings[None])
        # a text that ended with its first token has no decoding to time
        rows = zip(*timings.values(), strict=True)
        has_decoding = [all(timing.forwards for timing in row) for row in rows]
        timings = {
            name: [timing.decoding() for timing in compress(column, has_decoding)]
            for name, column in timings.items()
        }
    head_alone = timings.get("head alone")
    return replace(
        summarise(timings[None], timings["drafted"]),
        peak_gib=peak_gib(base.device),
        head_alone=paired_speed(head_alone, timings[None]) if head_alone else None,
        prompt_seconds=prompt_seconds,
    )


def measure_ledger(
    base: FrozenBase, drafter: Drafter, prompts: list[list[int]], generation: GenerationSettings
) -> LedgerSummary:
    """Return the `ledger` section of results.json: means over the steps of the timed prompts.

    The prompts are decoded once more, because the ledger slows steps down on CUDA.
    """
    ledger, size = StepLedger(base.device), generation.batch_size
    prompts = prompts[: generation.speed_prompts]
    for first in range(0, len(prompts), size):
        decode_batch(base, drafter, prompts[first : first + size], generation, ledger=ledger)
    num_steps = max(ledger.num_steps, 1)
    means = {part: seconds / num_steps for part, seconds in ledger.seconds.items()}
    return LedgerSummary(**means, num_steps=ledger.num_steps)


def summarise(alone: list[Timing], drafted: list[Timing]) -> Speed:
    """Return rates, their ratio and its interval from timings of the same batches.

    Times are compared per token, because a tie in rounding may change the output; if it does not,
    the speed-up is the ratio of the summed times. Step times are None if every text ended before
    its second forward.
    """
    gain = paired_speed(drafted, alone)
    base_step, step = _step_seconds(alone), _step_seconds(drafted)
    base_rate, rate = (
        sum(timing.new_tokens for timing in timings) / sum(timing.seconds for timing in timings)
        for timings in (alone, drafted)
    )
    return Speed(
        base_tokens_per_second=base_rate,
        tokens_per_second=rate,
        speedup=gain.ratio,
        interval=gain.interval,
        step_overhead=step / base_step if step and base_step else None,
    )


def paired_speed(timings: list[Timing], baseline: list[Timing]) -> Gain:
    """Return the ratio of tokens per second to those of a baseline on the same batches."""
    baseline_seconds = [timing.seconds for timing in baseline]
    # time for the baseline's number of tokens
    seconds = [
        timing.seconds * reference.new_tokens / timing.new_tokens
        for timing, reference in zip(timings, baseline, strict=True)
    ]
    sources = [timing.source for timing in timings]
    interval = bootstrap_interval(baseline_seconds, seconds, sources)
    return Gain(ratio=sum(baseline_seconds) / sum(seconds), interval=interval)


def _step_seconds(timings: list[Timing]) -> float | None:
    """Return the mean time of a decode step over batches."""
    num_steps = sum(timing.num_steps for timing in timings)
    return sum(timing.step_seconds for timing in timings) / num_steps if num_steps else None

"""Speed: the loop with a drafter against the same loop with the base alone, turn by turn."""

import resource
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specheads.base.model import FrozenBase
from specheads.core.drafter import Drafter
from specheads.decoding.acceptance.sampling import GREEDY, Sampling
from specheads.decoding.generate import generate
from specheads.decoding.loop import synchronise
from specheads.decoding.trees import policies
from specheads.measure.counts import bootstrap_interval
from specheads.measure.how import How
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
    """Decode once, by the clock.

    Args:
        base: The model that decides.
        drafter: What guesses; None decodes with the base alone.
        prompts: Token ids, decoded together.
        how: How they are decoded; its tree and acceptance rule are those of a drafter alone.
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


@dataclass(slots=True)
class Pair:
    """One batch of prompts, every repetition of it, both ways."""

    alone: list[Timing]
    drafted: list[Timing]


def measure_speed(
    base: FrozenBase,
    drafter: Drafter,
    prompts: list[list[int]],
    *,
    tree: policies.TreePolicy | None = None,
    max_new_tokens: int,
    settings: Sampling = GREEDY,
    acceptance: str = "match",
    repetitions: int = 3,
    batch_size: int = 1,
    warmup: int = 1,
    stop_at_eos: bool = True,
    progress: bool = False,
) -> dict[str, Any]:
    """Return the `speed` section of results.json.

    Each batch of prompts is decoded with the base alone and with the drafter, one right after
    the other; every other repetition swaps who goes first, so that a machine that grows slower
    slows both. Of a batch's repetitions the median counts. Times cover the prompt and all new
    tokens; `step_overhead` covers decode steps only, and `draft_milliseconds` is the median time
    that a step spends drafting, for a single row.

    Args:
        base: The model that decides.
        drafter: What guesses.
        prompts: Token ids.
        tree: How drafts grow; None is a chain as deep as the drafter.
        max_new_tokens: Limit for each prompt.
        settings: How tokens are chosen; each prompt draws with a seed of its own.
        acceptance: What is kept of a tree: a name in `specheads.decoding.acceptance.rules.RULES`.
        repetitions: How often everything is timed.
        batch_size: Prompts decoded together; intervals are over these batches.
        warmup: Batches decoded both ways before the clock counts.
        stop_at_eos: Whether the base's end-of-text token ends a text.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: There is no prompt, no repetition, or no step to time.
    """
    if not prompts or repetitions < 1 or max_new_tokens < 3:
        raise ValueError(
            "speed needs a prompt, a repetition and 3 new tokens at least, got "
            f"{len(prompts)}, {repetitions} and {max_new_tokens}"
        )
    units = [prompts[i : i + batch_size] for i in range(0, len(prompts), batch_size)]

    how = How(
        tree=tree,
        max_new_tokens=max_new_tokens,
        sampling=settings,
        acceptance=acceptance,
        stop_at_eos=stop_at_eos,
    )

    def run(arm: Drafter | None, unit: list[list[int]]) -> Timing:
        return time_generate(base, arm, unit, how)

    for unit in units[:warmup]:
        run(None, unit)
        run(drafter, unit)
    _reset_peak(base)
    pairs = [Pair([], []) for _ in units]
    work = [(turn, place) for turn in range(repetitions) for place in range(len(units))]
    for turn, place in bar(work, "speed", progress):
        pair, unit = pairs[place], units[place]
        if turn % 2 == 0:
            pair.alone.append(run(None, unit))
        pair.drafted.append(run(drafter, unit))
        if turn % 2 == 1:
            pair.alone.append(run(None, unit))
    return summarise(pairs) | {
        "draft_milliseconds": draft_milliseconds(base, drafter, prompts[0], how),
        "repetitions": repetitions,
        "peak_gib": peak_gib(base),
    }


def draft_milliseconds(base: FrozenBase, drafter: Drafter, prompt: list[int], how: How) -> float:
    """Return the median time that a decode step spends drafting, greedy and one row."""
    out = generate(
        base,
        drafter,
        [prompt],
        max_new_tokens=how.max_new_tokens,
        tree=how.tree,
        stop_at_eos=False,
        timed=True,
    )
    times = [step.times for step in out.steps[0]]
    return 1e3 * statistics.median(one.drafted - one.began for one in times)


def summarise(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Return rates, their ratio and its interval from paired timings.

    Time is compared a token, because output may differ by a tie in rounding; where it does
    not, the speed-up is simply the ratio of the summed times.
    """
    alone = [_median_seconds(pair.alone) for pair in pairs]
    drafted = [_median_seconds(pair.drafted) for pair in pairs]
    alone_tokens = [pair.alone[0].new_tokens for pair in pairs]
    drafted_tokens = [pair.drafted[0].new_tokens for pair in pairs]
    # what the drafted arm would have taken for the base's number of tokens
    matched = [
        seconds * wanted / given
        for seconds, wanted, given in zip(drafted, alone_tokens, drafted_tokens, strict=True)
    ]
    forwards = sum(pair.drafted[0].forwards for pair in pairs)
    step = _step_seconds([pair.drafted for pair in pairs])
    base_step = _step_seconds([pair.alone for pair in pairs])
    return {
        "base_tokens_per_second": sum(alone_tokens) / sum(alone),
        "tokens_per_second": sum(drafted_tokens) / sum(drafted),
        "speedup": sum(alone) / sum(matched),
        "interval": list(bootstrap_interval(alone, matched)),
        "step_overhead": step / base_step,
        "step_milliseconds": 1e3 * step,
        "base_step_milliseconds": 1e3 * base_step,
        "new_tokens": sum(drafted_tokens),
        "forwards": forwards,
    }


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

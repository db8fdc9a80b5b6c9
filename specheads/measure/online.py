"""Online measurement: decode with a drafter, count, and compare with the base alone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from specheads.base.model import FrozenBase
from specheads.core.drafter import Drafter
from specheads.core.loops import loops
from specheads.measure.counts import DepthCounts, conditional_acceptance, rate
from specheads.measure.exactness import PROMPTS, compare_texts, in_float32
from specheads.measure.generation import (
    Decoded,
    GenerationSettings,
    decode_prompts,
    write_alone,
)
from specheads.measure.results import CategoryRate, Degenerate, Lossless, Online, OnlineSections


def measure_online(
    base: FrozenBase,
    drafter: Drafter,
    prompts: list[list[int]],
    alone: list[list[int]],
    generation: GenerationSettings,
    categories: Sequence[str] = (),
) -> OnlineSections:
    """Return the sections `online`, `lossless` and `degenerate` of results.json.

    `alone` is the output of `write_alone` with the same limit and sampling.
    """
    decoded = decode_prompts(base, drafter, prompts, generation)
    # rejection samples from the base's distribution, but not the same tokens
    comparable = generation.sampling.temperature == 0 or generation.acceptance == "match"
    return online_sections(
        base, decoded, prompts, alone, generation, categories, comparable=comparable
    )


def lossless_in_float32(
    base: FrozenBase,
    methods: Callable[[FrozenBase], Mapping[str, tuple[Drafter, GenerationSettings]]],
    prompts: list[list[int]],
    generation: GenerationSettings,
) -> dict[str, Lossless]:
    """Return the `lossless` sections of the first few prompts with the base in float32.

    `methods` returns drafters for a base with their generation settings. The result is empty if
    the base has float32 precision already, or if memory has no room for a copy.
    """
    if (wide := in_float32(base)) is None:
        return {}
    few = prompts[:PROMPTS]
    alone = write_alone(wide, few, generation)
    return {
        name: measure_online(wide, drafter, few, alone, one).lossless
        for name, (drafter, one) in methods(wide).items()
    }


def online_sections(
    base: FrozenBase,
    decoded: Sequence[Decoded],
    prompts: list[list[int]],
    alone: list[list[int]],
    generation: GenerationSettings,
    categories: Sequence[str] = (),
    *,
    comparable: bool,
) -> OnlineSections:
    """Return the sections for decoded texts: see `measure_online`.

    Texts that are not `comparable` are other samples from the same distribution.
    """
    counts = [one.counts for one in decoded]
    total = DepthCounts.total(counts, len(counts[0].offered))
    online = Online(
        **asdict(rate(counts)),
        tokens_per_forward_without_bonus=total.tokens_per_forward_without_bonus,
        per_depth=total.per_depth(),
        by_category=_by_category(counts, categories),
        forwards=total.forwards,
        new_tokens=total.new_tokens,
        conditional_acceptance=conditional_acceptance(counts),
    )
    texts = list(zip(prompts, [one.tokens for one in decoded], alone, strict=True))
    return OnlineSections(
        online=online,
        lossless=compare_texts(base, texts if comparable else [], generation.sampling),
        degenerate=degenerate(counts, alone),
    )


def _by_category(counts: list[DepthCounts], categories: Sequence[str]) -> dict[str, CategoryRate]:
    groups: dict[str, list[DepthCounts]] = {}
    for name, one in zip(categories, counts, strict=bool(categories)):
        groups.setdefault(name, []).append(one)
    return {
        name: CategoryRate(**asdict(rate(group)), count=len(group))
        for name, group in sorted(groups.items())
        if any(one.forwards for one in group)
    }


def degenerate(counts: list[DepthCounts], alone: list[list[int]]) -> Degenerate:
    """Return the rates with and without the prompts after which the base alone loops.

    `core.loops` has the rule. A rate is None if no prompt, or no forward, remains.
    """
    flags = [loops(tokens) for tokens in alone]
    flagged = [one for one, flag in zip(counts, flags, strict=True) if flag]
    rest = [one for one, flag in zip(counts, flags, strict=True) if not flag]
    return Degenerate(
        flagged=sum(flags),
        compared=len(flags),
        with_=rate(counts),
        without=rate(rest) if any(one.forwards for one in rest) else None,
        only=rate(flagged) if flagged else None,
    )

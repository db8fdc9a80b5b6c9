"""Online measurement: decode with a drafter, count, and compare with the base alone.

Text that differs from the base's own is a tie in rounding, or wrong.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from specheads.base.model import FrozenBase
from specheads.base.selfcheck import make_exact
from specheads.core.drafter import Drafter
from specheads.core.machine import dtype_name
from specheads.core.repetition import is_repetitive
from specheads.decoding.prompt_lookup import common_prefix_length
from specheads.decoding.sampling import GREEDY, Sampling, SamplingState, each_prompt
from specheads.measure.counts import DepthCounts, compute_rate, group_rate, sections
from specheads.measure.generation import (
    Continuations,
    Decoded,
    GenerationSettings,
    decode_prompts,
    write_alone,
)
from specheads.measure.results import (
    IDENTICAL,
    TIED,
    WRONG,
    CategoryRate,
    Degenerate,
    Lossless,
    Online,
)

T = TypeVar("T")
SLACK = 4
"""Roundings between two tied scores: two logits, each computed in two ways."""


def measure_online(
    base: FrozenBase, drafter: Drafter, texts: Continuations, generation: GenerationSettings
) -> tuple[Online, Lossless, Degenerate]:
    """Return the sections `online`, `lossless` and `degenerate` of results.json."""
    decoded = decode_prompts(base, drafter, texts.prompts, generation)
    online, lossless, flagged = online_sections(
        base, decoded, texts, generation, comparable=generation.matched
    )
    if lossless.verdict == TIED and generation.sampling.greedy:
        parted = [
            prompt
            for prompt, one, alone in zip(texts.prompts, decoded, texts.alone, strict=True)
            if one.tokens != alone
        ]
        lossless = replace(lossless, exact=identical_exactly(base, drafter, parted, generation))
    return online, lossless, flagged


def identical_exactly(
    base: FrozenBase, drafter: Drafter, prompts: list[list[int]], generation: GenerationSettings
) -> int | None:
    """Return after how many prompts the text is that of the base alone, both with exact sums.

    It is None if the base is not in bfloat16, or if it or the machine cannot compute exactly.
    """
    if not make_exact(base):
        return None
    try:
        drafted = decode_prompts(base, drafter, prompts, generation)
        alone = write_alone(base, prompts, generation)
        return sum(one.tokens == other for one, other in zip(drafted, alone, strict=True))
    finally:
        base.exact = False


def online_sections(
    base: FrozenBase,
    decoded: Sequence[Decoded],
    texts: Continuations,
    generation: GenerationSettings,
    *,
    comparable: bool,
) -> tuple[Online, Lossless, Degenerate]:
    """Return the sections for decoded texts: see `measure_online`.

    Texts that are not `comparable` are other samples from the same distribution.
    """
    counts, groups = [one.counts for one in decoded], texts.groups
    new_tokens, forwards = (
        sum(getattr(one, name) for one in counts) for name in ("new_tokens", "forwards")
    )
    rates: dict[str, Any] = {"by_category": {}} | {
        f"by_{name}": _grouped(counts, values)
        for name, values in groups.items()
        if any(values) or name == "category"
    }
    subsets = _grouped(counts, list(zip(*groups.values(), strict=True)) or [()] * len(counts))
    online = Online(
        **asdict(group_rate(counts)) | sections(counts) | rates,
        tokens_per_forward_without_bonus=(new_tokens - forwards) / forwards,
        subsets=[(dict(zip(groups, one, strict=True)), each) for one, each in subsets.items()],
        new_tokens=new_tokens,
    )
    tokens = [one.tokens for one in decoded]
    triples = list(zip(texts.prompts, tokens, texts.alone, strict=True))
    lossless = compare_texts(base, triples if comparable else [], generation.sampling)
    return online, lossless, degenerate(counts, texts.alone)


def _grouped(counts: Sequence[DepthCounts], labels: Sequence[T]) -> dict[T, CategoryRate]:
    """Return the rate of the prompts of each label, if they had a forward; 8k is before 16k."""
    rates: dict[T, CategoryRate] = {}
    for label in sorted({*labels}, key=_natural):
        own = [one for one, other in zip(counts, labels, strict=True) if other == label]
        if any(one.forwards for one in own):
            rates[label] = group_rate(own)
    return rates


def _natural(label: Any) -> list[list[str | int]]:
    names = [label] if isinstance(label, str) else label
    parts = [re.split(r"(\d+)", name) for name in names]
    return [[int(one) if one.isdecimal() else one for one in each] for each in parts]


def degenerate(counts: list[DepthCounts], alone: list[list[int]]) -> Degenerate:
    """Return the rates with and without the prompts after which the base alone loops.

    `core.repetition` has the rule. A rate is None if no prompt, or no forward, remains.
    """
    both = list(zip(counts, map(is_repetitive, alone), strict=True))
    flagged, rest = ([one for one, flag in both if flag is kind] for kind in (True, False))
    return Degenerate(
        flagged=len(flagged),
        compared=len(counts),
        with_=compute_rate(counts),
        without=compute_rate(rest) if any(one.forwards for one in rest) else None,
        only=compute_rate(flagged) if flagged else None,
    )


# --- the same text? ----------------------------------------------------------------------------


def compare_texts(
    base: FrozenBase,
    texts: Sequence[tuple[list[int], list[int], list[int]]],
    sampling: Sampling = GREEDY,
) -> Lossless:
    """Return the `lossless` section for prompts, their speculative texts, and those of the base.

    At the first divergence the base reads the text before it, at once and token by token. If the
    scores of the two tokens differ by no more than the rounding that this shows, they are a tie.
    Otherwise the base distinguishes them, and decoding is wrong. Scores are logits after
    temperature and penalty plus the base's noise, without cuts.
    """
    found = [
        first_divergence(base, *text, one)
        for text, one in zip(texts, each_prompt(sampling, len(texts)), strict=True)
        if text[1] != text[2]
    ]
    tied = sum(abs(ulps) <= SLACK * rounding for _, ulps, rounding in found)
    verdict = WRONG if tied < len(found) else TIED if found else IDENTICAL
    gap, ulps, rounding = map(max, zip(*found, strict=True)) if found else (None, None, None)
    return Lossless(
        compared=len(texts),
        identical=len(texts) - len(found),
        first_divergence_logit_gap=gap,
        first_divergence_ulps=ulps,
        rounding_ulps=rounding,
        tied=tied,
        wrong=len(found) - tied,
        verdict=verdict if texts else "",
        dtype=dtype_name(base.dtype),
    )


def first_divergence(
    base: FrozenBase, prompt: list[int], mine: list[int], theirs: list[int], sampling: Sampling
) -> tuple[float, float, float]:
    """Return how close the scores are where two different texts diverge.

    Returns:
        The score of the base's own token minus that of the other; the same in units of the spacing
        of the logits' dtype at their size; and, in these units and at least 1, the difference
        between the base's scores read at once and token by token.
    """
    place = common_prefix_length(mine, theirs)
    text = prompt + theirs[:place]
    whole, stepwise = _read(base, text)
    scores, others = (_scores(logits, text, sampling) for logits in (whole, stepwise))
    if place < min(len(mine), len(theirs)):
        pair = [theirs[place], mine[place]]
    else:
        # one text ends early, so there are no two tokens: compare the base's two best
        pair = scores.topk(2).indices.tolist()
    best, other = scores[pair].tolist()
    _, exponent = torch.frexp(whole[pair].float().abs().max())
    spacing = 2.0 ** (int(exponent) - 1) * torch.finfo(whole.dtype).eps
    spacing /= sampling.temperature or 1.0
    rounding = (scores - others).abs().nan_to_num(0.0).max().item()
    return best - other, (best - other) / spacing, max(rounding / spacing, 1.0)


@torch.inference_mode()
def _read(base: FrozenBase, text: list[int]) -> tuple[Tensor, Tensor]:
    """Return the logits after a text, read at once and with its last token after a cache."""
    tokens = torch.tensor([text], device=base.device)
    whole = base.logits_of(base.read(tokens).hidden[0, -1])
    if len(text) == 1:
        return whole, whole
    cache = base.cache(1, len(text))
    base.prefill(tokens[:, :-1], cache, [len(text) - 1])
    return whole, base.prefill(tokens[:, -1:], cache, [1])[0][0]


def _scores(
    logits: Float[Tensor, " vocab"], text: list[int], sampling: Sampling
) -> Float[Tensor, " vocab"]:
    """Return the scores whose largest the base chooses, with no token cut."""
    uncut = replace(sampling, top_k=0, top_p=1.0, min_p=0.0)
    tokens = torch.tensor([text], device=logits.device)
    length = torch.tensor([len(text) - 1], device=logits.device)
    rows = SamplingState([uncut], length, tokens, len(logits), dtype=logits.dtype)
    scores = rows.scores(logits[None, None], tokens[:, None, -1:])
    return (scores + rows.level_noise(0) if rows.draws else scores)[0, 0]

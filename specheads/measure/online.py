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
from specheads.core.tree import chain
from specheads.decoding.sampling import GREEDY, Sampling, SamplingState, expand_sampling
from specheads.decoding.suffix_decoding import common_prefix_length
from specheads.measure.counts import (
    DepthCounts,
    compute_rate,
    conditional_acceptance,
    group_rate,
    is_repetitive,
)
from specheads.measure.generation import (
    BaseTexts,
    DecodedPrompt,
    GenerationSettings,
    continue_prompts,
    decode_prompts,
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
    base: FrozenBase, drafter: Drafter, texts: BaseTexts, generation: GenerationSettings
) -> tuple[Online, Lossless, Degenerate]:
    """Return the sections `online`, `lossless` and `degenerate` of results.json."""
    decoded = decode_prompts(base, drafter, texts.prompts, generation)
    online, lossless, degenerate = online_sections(
        base, decoded, texts, generation, is_comparable=generation.is_matched
    )
    if lossless.verdict == TIED and generation.sampling.greedy:
        rows = zip(texts.prompts, decoded, texts.continuations, strict=True)
        different = [prompt for prompt, text, base_text in rows if text.tokens != base_text]
        num_identical = count_identical_exactly(base, drafter, different, generation)
        lossless = replace(lossless, exact=num_identical)
    return online, lossless, degenerate


def count_identical_exactly(
    base: FrozenBase, drafter: Drafter, prompts: list[list[int]], generation: GenerationSettings
) -> int | None:
    """Return after how many prompts the text is that of the base alone, both with exact sums.

    It is None if the base is not in bfloat16, or if it or the machine cannot compute exactly.
    """
    if not make_exact(base.forwards):
        return None
    try:
        decoded = decode_prompts(base, drafter, prompts, generation)
        base_texts = continue_prompts(base, prompts, generation)
        return sum(a.tokens == b for a, b in zip(decoded, base_texts, strict=True))
    finally:
        base.forwards.exact = False


def online_sections(
    base: FrozenBase,
    decoded: Sequence[DecodedPrompt],
    texts: BaseTexts,
    generation: GenerationSettings,
    *,
    is_comparable: bool,
) -> tuple[Online, Lossless, Degenerate]:
    """Return the sections for decoded texts: see `measure_online`.

    Texts that are not comparable are other samples from the same distribution.
    """
    counts, groups = [text.counts for text in decoded], texts.groups
    total = DepthCounts.total(counts, len(counts[0].offered))
    input_lengths, thinking = groups.get("input_length", []), groups.get("thinking", [])
    subset_labels = list(zip(*groups.values(), strict=True)) or [()] * len(counts)
    subsets = group_rates(counts, subset_labels)
    online = Online(
        **asdict(group_rate(counts)),
        tokens_per_forward_without_bonus=(total.new_tokens - total.forwards) / total.forwards,
        per_depth=total.per_depth(),
        by_category=group_rates(counts, groups.get("category", [])),
        by_input_length=group_rates(counts, input_lengths) if any(input_lengths) else {},
        by_thinking=group_rates(counts, thinking) if any(thinking) else {},
        subsets=[
            (dict(zip(groups, labels, strict=True)), rate) for labels, rate in subsets.items()
        ],
        forwards=total.forwards,
        new_tokens=total.new_tokens,
        conditional_acceptance=conditional_acceptance(counts),
    )
    tokens = [text.tokens for text in decoded]
    triples = list(zip(texts.prompts, tokens, texts.continuations, strict=True))
    lossless = compare_texts(base, triples if is_comparable else [], generation.sampling)
    return online, lossless, count_loops(counts, texts.continuations)


def group_rates(counts: Sequence[DepthCounts], labels: Sequence[T]) -> dict[T, CategoryRate]:
    """Return the rate of the prompts of each label, if they had a forward; 8k is before 16k."""
    rates: dict[T, CategoryRate] = {}
    for label in sorted({*labels}, key=_natural_order):
        group = [prompt for prompt, name in zip(counts, labels, strict=True) if name == label]
        if any(prompt.forwards for prompt in group):
            rates[label] = group_rate(group)
    return rates


def _natural_order(label: Any) -> list[list[str | int]]:
    names = [label] if isinstance(label, str) else label
    pieces = [re.split(r"(\d+)", name) for name in names]
    return [[int(word) if word.isdecimal() else word for word in words] for words in pieces]


def count_loops(counts: Sequence[DepthCounts], continuations: Sequence[list[int]]) -> Degenerate:
    """Count the prompts after which the base alone loops; return it with the rate of the others.

    `counts.is_repetitive` has the rule. The rate is None if no forward remains.
    """
    pairs = zip(counts, continuations, strict=True)
    sound = [prompt for prompt, tokens in pairs if not is_repetitive(tokens)]
    return Degenerate(
        flagged=len(counts) - len(sound),
        compared=len(counts),
        without=compute_rate(sound) if any(prompt.forwards for prompt in sound) else None,
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
    rows = zip(texts, expand_sampling(sampling, len(texts)), strict=True)
    divergences = [
        first_divergence(base, prompt, tokens, base_tokens, prompt_sampling)
        for (prompt, tokens, base_tokens), prompt_sampling in rows
        if tokens != base_tokens
    ]
    tied = sum(abs(ulps) <= SLACK * rounding for _, ulps, rounding in divergences)
    verdict = WRONG if tied < len(divergences) else TIED if divergences else IDENTICAL
    gap = ulps = rounding = None
    if divergences:
        gap, ulps, rounding = map(max, zip(*divergences, strict=True))
    return Lossless(
        compared=len(texts),
        identical=len(texts) - len(divergences),
        first_divergence_logit_gap=gap,
        first_divergence_ulps=ulps,
        rounding_ulps=rounding,
        tied=tied,
        wrong=len(divergences) - tied,
        verdict=verdict if texts else "",
        dtype=dtype_name(base.dtype),
    )


def first_divergence(
    base: FrozenBase,
    prompt: list[int],
    tokens: list[int],
    base_tokens: list[int],
    sampling: Sampling,
) -> tuple[float, float, float]:
    """Return how close the scores are where two different texts diverge.

    Returns:
        The score of the base's own token minus that of the other; the same in units of the spacing
        of the logits' dtype at their size; and, in these units and at least 1, the difference
        between the base's scores read at once and token by token.
    """
    length = common_prefix_length(tokens, base_tokens)
    text = prompt + base_tokens[:length]
    logits, stepwise_logits = logits_in_two_ways(base, text, len(prompt))
    scores = _scores(logits, text, sampling)
    stepwise_scores = _scores(stepwise_logits, text, sampling)
    if length < min(len(tokens), len(base_tokens)):
        pair = [base_tokens[length], tokens[length]]
    else:
        # one text ends early, so there are no two tokens: compare the base's two best
        pair = scores.topk(2).indices.tolist()
    base_score, score = scores[pair].tolist()
    _, exponent = torch.frexp(logits[pair].float().abs().max())
    spacing = 2.0 ** (int(exponent) - 1) * torch.finfo(logits.dtype).eps
    spacing /= sampling.temperature or 1.0
    rounding = (scores - stepwise_scores).abs().nan_to_num(0.0).max().item()
    gap = base_score - score
    return gap, gap / spacing, max(rounding / spacing, 1.0)


@torch.inference_mode()
def logits_in_two_ways(
    base: FrozenBase, text: list[int], num_prompt: int = 1
) -> tuple[Tensor, Tensor]:
    """Return the logits after a text, read at once and with its last token after a cache.

    Some bases with states scan a text in another way than they decode it. Such a base reads what
    follows the first `num_prompt` tokens in chains, and token by token.
    """
    tokens = torch.tensor([text], device=base.device)
    if base.has_states:
        chains, single = (_decoded_logits(base, tokens, num_prompt, size) for size in (8, 1))
        return chains, single
    logits = base.logits_of(base.read(tokens).hidden[0, -1])
    if len(text) == 1:
        return logits, logits
    cache = base.cache(1, len(text))
    base.prefill(tokens[:, :-1], cache, [len(text) - 1])
    return logits, base.prefill(tokens[:, -1:], cache, [1])[0][0]


def _decoded_logits(base: FrozenBase, tokens: Tensor, num_prompt: int, size: int) -> Tensor:
    """Return the logits after a prompt and chains of so many tokens."""
    cache = base.cache(1, tokens.shape[1])
    logits, _ = base.prefill(tokens[:, :num_prompt], cache, [num_prompt])
    for piece in tokens[:, num_prompt:].split(size, dim=1):
        logits = base.verify(chain(piece), cache).logits[:, -1]
        cache.commit([[*range(piece.shape[1])]])
    return logits[0]


def _scores(
    logits: Float[Tensor, " vocab"], text: list[int], sampling: Sampling
) -> Float[Tensor, " vocab"]:
    """Return the scores whose largest the base chooses, with no token cut."""
    uncut = replace(sampling, top_k=0, top_p=1.0, min_p=0.0)
    tokens = torch.tensor([text], device=logits.device)
    length = torch.tensor([len(text) - 1], device=logits.device)
    rows = SamplingState([uncut], length, tokens, len(logits), dtype=logits.dtype)
    scores = rows.scores(logits[None, None], tokens[:, None, -1:])
    return (scores + rows.level_noise(0) if rows.any_sampled else scores)[0, 0]

"""Online measurement: decode with the head, count what was accepted, compare with the base."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from specheads.base.model import FrozenBase
from specheads.core.drafter import Drafter
from specheads.decoding.acceptance.sampling import GREEDY, each_prompt
from specheads.decoding.generate import generate
from specheads.decoding.loop import Step
from specheads.decoding.trees import policies
from specheads.measure.counts import DepthCounts, loops
from specheads.measure.how import How
from specheads.measure.offline import interval
from specheads.measure.results import Acceptance, CategoryRate, Degenerate, Lossless, Online, Rate
from specheads.runs.progress import bar


@dataclass(slots=True)
class Decoded:
    """What decoding gave one prompt."""

    tokens: list[int]
    """New tokens, cut at the limit and after the first end-of-text token."""
    counts: DepthCounts
    """Of the base forwards that gave all of them but the first."""


def decode_prompts(
    base: FrozenBase, drafter: Drafter | None, prompts: list[list[int]], how: How
) -> list[Decoded]:
    """Decode every prompt in the real loop and count its forwards.

    Args:
        base: The model that decides.
        drafter: What guesses; None decodes with the base alone, at exactly 1.0 a forward.
        prompts: Token ids.
        how: How they are decoded; its tree and acceptance rule are those of a drafter alone.
    """
    tree = _tree(drafter, how)
    each = each_prompt(how.sampling, len(prompts))
    firsts = range(0, len(prompts), how.batch_size)
    decoded: list[Decoded] = []
    for first in bar(firsts, "online" if drafter is not None else "base alone", how.progress):
        batch = slice(first, first + how.batch_size)
        out = generate(
            base,
            drafter,
            prompts[batch],
            max_new_tokens=how.max_new_tokens,
            sampling=each[batch],
            tree=tree,
            acceptance=how.acceptance if drafter is not None else "match",
            stop_at_eos=how.stop_at_eos,
        )
        decoded += [
            Decoded(tokens, _count(steps, len(tokens), tree.depth))
            for tokens, steps in zip(out.tokens, out.steps, strict=True)
        ]
    return decoded


def _tree(drafter: Drafter | None, how: How) -> policies.TreePolicy:
    if drafter is None:
        return policies.NOTHING
    return policies.chain(drafter.depth) if how.tree is None else how.tree


def _count(steps: list[Step], length: int, depth: int) -> DepthCounts:
    """Count one prompt's forwards; see `DepthCounts` for what the end of the text cuts off."""
    counts = DepthCounts.zeros(depth)
    room = length - 1
    for taken in steps:
        reached = len(taken.path) - 1
        kept = min(reached, room - 1)
        counts.add(kept, drafted_beyond=taken.drafted_beyond or kept < reached)
        room -= len(taken.tokens)
    return counts


def write_alone(base: FrozenBase, prompts: list[list[int]], how: How) -> list[list[int]]:
    """Return what the base alone writes after each prompt: the new tokens."""
    decoded = decode_prompts(base, None, prompts, how)
    return [one.tokens for one in decoded]


def measure_online(
    base: FrozenBase,
    drafter: Drafter,
    prompts: list[list[int]],
    alone: list[list[int]],
    how: How,
    categories: Sequence[str] = (),
) -> Acceptance:
    """Return the sections `online`, `lossless` and `degenerate` of results.json.

    Args:
        base: The model that decides.
        drafter: What guesses.
        prompts: Token ids.
        alone: What `write_alone` gave each prompt, with the same limit and sampling.
        how: How prompts are decoded.
        categories: One name a prompt, where prompts have any.
    """
    decoded = decode_prompts(base, drafter, prompts, how)
    counts = [one.counts for one in decoded]
    total = DepthCounts.total(counts, len(counts[0].offered))
    rate = _rate(counts)
    online = Online(
        tokens_per_forward=rate.tokens_per_forward,
        interval=rate.interval,
        tokens_per_forward_without_bonus=total.tokens_per_forward_without_bonus,
        per_depth=total.per_depth(),
        by_category=_by_category(counts, categories),
        forwards=total.forwards,
        new_tokens=total.new_tokens,
    )
    return Acceptance(
        online=online,
        lossless=_lossless(base, prompts, decoded, alone, how),
        degenerate=degenerate(counts, alone),
    )


def _rate(counts: list[DepthCounts]) -> Rate:
    total = DepthCounts.total(counts, len(counts[0].offered))
    return Rate(tokens_per_forward=total.tokens_per_forward, interval=interval(counts))


def _by_category(counts: list[DepthCounts], categories: Sequence[str]) -> dict[str, CategoryRate]:
    groups: dict[str, list[DepthCounts]] = {}
    for name, one in zip(categories, counts, strict=bool(categories)):
        groups.setdefault(name, []).append(one)
    rates = {
        name: (_rate(group), len(group))
        for name, group in sorted(groups.items())
        if any(one.forwards for one in group)
    }
    return {
        name: CategoryRate(
            tokens_per_forward=rate.tokens_per_forward, interval=rate.interval, count=count
        )
        for name, (rate, count) in rates.items()
    }


def _lossless(
    base: FrozenBase,
    prompts: list[list[int]],
    decoded: list[Decoded],
    alone: list[list[int]],
    how: How,
) -> Lossless:
    # samples by rejection have the base's distribution and other letters: nothing to compare
    comparable = how.sampling.temperature == 0 or how.acceptance == "match"
    triples = list(zip(prompts, decoded, alone, strict=True)) if comparable else []
    found = compare(base, [(prompt, one.tokens, theirs) for prompt, one, theirs in triples])
    if how.sampling == replace(GREEDY, seed=how.sampling.seed):
        return found
    # how close a call a draw was is no matter of the two best logits
    return replace(found, first_divergence_logit_gap=None)


def compare(base: FrozenBase, texts: Sequence[tuple[list[int], list[int], list[int]]]) -> Lossless:
    """Hold speculative output against the base alone: the `lossless` section of results.json.

    Args:
        base: Reads the text up to a divergence again, to say how close a call it was.
        texts: A prompt, its new tokens with a drafter, and its new tokens without; one a prompt.

    Returns:
        How many prompts were compared and are identical, and the largest gap between the
        base's two best logits at a first differing place: None without any, near zero where
        two tokens tie in rounding, and large only where decoding is wrong.
    """
    gaps = [
        _gap(base, prompt + theirs[: _first_difference(mine, theirs)])
        for prompt, mine, theirs in texts
        if mine != theirs
    ]
    return Lossless(
        compared=len(texts),
        identical=len(texts) - len(gaps),
        first_divergence_logit_gap=max(gaps, default=None),
    )


def _first_difference(mine: list[int], theirs: list[int]) -> int:
    shorter = min(len(mine), len(theirs))
    return next((place for place in range(shorter) if mine[place] != theirs[place]), shorter)


def _gap(base: FrozenBase, text: list[int]) -> float:
    hidden = base.read(torch.tensor([text], device=base.device)).hidden[0, -1]
    best, second = base.logits_of(hidden).float().topk(2).values.tolist()
    return best - second


def degenerate(counts: list[DepthCounts], alone: list[list[int]]) -> Degenerate:
    """Return the figures with and without the prompts after which the base alone loops.

    Args:
        counts: One a prompt.
        alone: What the base alone writes after each; `counts.loops` is the rule.

    Returns:
        The `degenerate` section of results.json. `without` or `only` is None where no prompt,
        or none with a forward, is left.
    """
    flags = [loops(tokens) for tokens in alone]
    flagged = [one for one, flag in zip(counts, flags, strict=True) if flag]
    rest = [one for one, flag in zip(counts, flags, strict=True) if not flag]
    return Degenerate(
        flagged=sum(flags),
        compared=len(flags),
        with_=_rate(counts),
        without=_rate(rest) if any(one.forwards for one in rest) else None,
        only=_rate(flagged) if flagged else None,
    )

"""Online measurement: decode with the head, count what was accepted, compare with the base."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specheads.base.model import FrozenBase
from specheads.core.drafter import Drafter
from specheads.core.tree import TokenTree
from specheads.decoding import loop
from specheads.decoding.acceptance import accept
from specheads.decoding.acceptance.rules import AcceptanceRule, acceptance_rule
from specheads.decoding.acceptance.sampling import GREEDY, Rows, Sampling, each_prompt
from specheads.decoding.generate import Decoding, generate
from specheads.decoding.trees import policies
from specheads.measure.counts import DepthCounts, loops
from specheads.measure.offline import interval
from specheads.measure.progress import bar


@dataclass(slots=True)
class Decoded:
    """What decoding gave one prompt."""

    tokens: list[int]
    """New tokens, cut at the limit and after the first end-of-text token."""
    counts: DepthCounts
    """Of the base forwards that gave all of them but the first."""


class _Watch:
    """A rule that also notes whether a draft followed the last accepted node.

    Steps carry paths and not trees, and a tree may end where its path does.
    """

    def __init__(self, acceptance: AcceptanceRule) -> None:
        self.acceptance = acceptance
        self.noted: list[Tensor] = []

    def __call__(
        self, tree: TokenTree, logits: Tensor, ancestors: Tensor, rows: Rows
    ) -> accept.Verdict:
        verdict = self.acceptance(tree, logits, ancestors, rows)
        last = verdict.path.gather(1, verdict.count[:, None] - 1)
        self.noted.append((tree.parents == last).any(-1))
        return verdict


def decode_prompts(
    base: FrozenBase,
    drafter: Drafter | None,
    prompts: list[list[int]],
    *,
    tree: policies.TreePolicy | None = None,
    max_new_tokens: int,
    settings: Sampling = GREEDY,
    acceptance: str = "match",
    batch_size: int = 1,
    stop_at_eos: bool = True,
    progress: bool = False,
) -> list[Decoded]:
    """Decode every prompt in the real loop and count its forwards.

    Args:
        base: The model that decides.
        drafter: What guesses; None decodes with the base alone, at exactly 1.0 a forward.
        prompts: Token ids.
        tree: How drafts grow; None is a chain as deep as the drafter.
        max_new_tokens: Limit for each prompt.
        settings: How tokens are chosen; each prompt draws with a seed of its own.
        acceptance: What is kept of a tree: a name in `specheads.decoding.acceptance.rules.RULES`.
        batch_size: Prompts decoded together.
        stop_at_eos: Whether the base's end-of-text token ends a text.
        progress: Whether to show a progress bar.
    """
    if drafter is None:
        tree = policies.NOTHING
    elif tree is None:
        tree = policies.chain(drafter.depth)
    each = each_prompt(settings, len(prompts))
    starts = range(0, len(prompts), batch_size)
    decoded: list[Decoded] = []
    for start in bar(starts, "online" if drafter is not None else "base alone", progress):
        watch = _Watch(acceptance_rule(acceptance))
        out = generate(
            base,
            drafter,
            prompts[start : start + batch_size],
            max_new_tokens=max_new_tokens,
            settings=each[start : start + batch_size],
            tree=tree,
            acceptance=watch,
            stop_at_eos=stop_at_eos,
        )
        beyond = _by_row(watch, out)
        decoded += [
            Decoded(tokens, _count(steps, followed, len(tokens), tree.depth))
            for tokens, steps, followed in zip(out.tokens, out.steps, beyond, strict=True)
        ]
    return decoded


def _by_row(watch: _Watch, out: Decoding) -> list[list[bool]]:
    """Sort what was noted a step into prompts: finished ones leave, the others keep order."""
    rows: list[list[bool]] = [[] for _ in out.steps]
    for number, noted in enumerate(watch.noted):
        live = [row for row, steps in enumerate(out.steps) if len(steps) > number]
        for row, followed in zip(live, noted.tolist(), strict=True):
            rows[row].append(followed)
    return rows


def _count(steps: list[loop.Step], followed: list[bool], length: int, depth: int) -> DepthCounts:
    """Count one prompt's forwards; see `DepthCounts` for what the end of the text cuts off."""
    counts = DepthCounts.zeros(depth)
    room = length - 1
    for taken, has_child in zip(steps, followed, strict=True):
        reached = len(taken.path) - 1
        kept = min(reached, room - 1)
        counts.add(kept, drafted_beyond=has_child or kept < reached)
        room -= len(taken.tokens)
    return counts


def measure_online(
    base: FrozenBase,
    drafter: Drafter,
    prompts: list[list[int]],
    alone: list[list[int]],
    *,
    tree: policies.TreePolicy | None = None,
    categories: Sequence[str] | None = None,
    max_new_tokens: int,
    settings: Sampling = GREEDY,
    acceptance: str = "match",
    batch_size: int = 1,
    stop_at_eos: bool = True,
    progress: bool = False,
) -> dict[str, dict[str, Any]]:
    """Return the sections `online`, `lossless` and `degenerate` of results.json.

    Args:
        base: The model that decides.
        drafter: What guesses.
        prompts: Token ids.
        alone: What `decode_prompts` without a drafter gave each prompt, with the same limits
            and settings.
        tree: How drafts grow; None is a chain as deep as the drafter.
        categories: One name a prompt, where prompts have any.
        max_new_tokens: Limit for each prompt.
        settings: How tokens are chosen; each prompt draws with a seed of its own.
        acceptance: What is kept of a tree: a name in `specheads.decoding.acceptance.rules.RULES`.
        batch_size: Prompts decoded together.
        stop_at_eos: Whether the base's end-of-text token ends a text.
        progress: Whether to show a progress bar.
    """
    decoded = decode_prompts(
        base,
        drafter,
        prompts,
        tree=tree,
        max_new_tokens=max_new_tokens,
        settings=settings,
        acceptance=acceptance,
        batch_size=batch_size,
        stop_at_eos=stop_at_eos,
        progress=progress,
    )
    counts = [one.counts for one in decoded]
    total = DepthCounts.total(counts, len(counts[0].offered))
    online = _summary(counts) | {
        "tokens_per_forward_without_bonus": total.tokens_per_forward_without_bonus,
        "per_depth": total.per_depth(),
        "by_category": _by_category(counts, categories or []),
        "forwards": total.forwards,
        "new_tokens": total.new_tokens,
    }
    # by rejection samples are equal in law and not in letters: there is nothing to compare
    comparable = settings.temperature == 0 or acceptance == "match"
    pairs = list(zip(prompts, decoded, alone, strict=True)) if comparable else []
    lossless = compare(base, [(prompt, one.tokens, said) for prompt, one, said in pairs])
    if settings != replace(GREEDY, seed=settings.seed):
        # how close a call a draw was is no matter of the two best logits
        lossless["first_divergence_logit_gap"] = None
    return {
        "online": online,
        "lossless": lossless,
        "degenerate": degenerate(counts, alone),
    }


def _summary(counts: list[DepthCounts]) -> dict[str, Any]:
    depth = len(counts[0].offered)
    return {
        "tokens_per_forward": DepthCounts.total(counts, depth).tokens_per_forward,
        "interval": list(interval(counts)),
    }


def _by_category(counts: list[DepthCounts], categories: Sequence[str]) -> dict[str, Any]:
    groups: dict[str, list[DepthCounts]] = {}
    for name, one in zip(categories, counts, strict=bool(categories)):
        groups.setdefault(name, []).append(one)
    return {
        name: _summary(group) | {"count": len(group)}
        for name, group in sorted(groups.items())
        if any(one.forwards for one in group)
    }


def compare(
    base: FrozenBase, texts: Sequence[tuple[list[int], list[int], list[int]]]
) -> dict[str, Any]:
    """Hold speculative output against the base alone: the `lossless` section of results.json.

    Args:
        base: Reads the text up to a divergence again, to say how close a call it was.
        texts: A prompt, its new tokens with a drafter, and its new tokens without; one a prompt.

    Returns:
        How many prompts were compared and are identical, and the largest gap between the
        base's two best logits at a first differing place: null without any, near zero where
        two tokens tie in rounding, and large only where decoding is wrong.
    """
    gaps = [
        _gap(base, prompt + theirs[: _first_difference(mine, theirs)])
        for prompt, mine, theirs in texts
        if mine != theirs
    ]
    return {
        "compared": len(texts),
        "identical": len(texts) - len(gaps),
        "first_divergence_logit_gap": max(gaps, default=None),
    }


def _first_difference(mine: list[int], theirs: list[int]) -> int:
    shorter = min(len(mine), len(theirs))
    return next((place for place in range(shorter) if mine[place] != theirs[place]), shorter)


def _gap(base: FrozenBase, text: list[int]) -> float:
    hidden = base.read(torch.tensor([text], device=base.device)).hidden[0, -1]
    best, second = base.project(hidden).float().topk(2).values.tolist()
    return best - second


def degenerate(counts: list[DepthCounts], alone: list[list[int]]) -> dict[str, Any]:
    """Return the figures with and without the prompts after which the base alone loops.

    Args:
        counts: One a prompt.
        alone: What the base alone says after each; `counts.loops` is the rule.

    Returns:
        The `degenerate` section of results.json. `without` or `only` is null where no prompt,
        or none with a forward, is left.
    """
    flags = [loops(tokens) for tokens in alone]
    flagged = [one for one, flag in zip(counts, flags, strict=True) if flag]
    rest = [one for one, flag in zip(counts, flags, strict=True) if not flag]
    return {
        "flagged": sum(flags),
        "compared": len(flags),
        "with": _summary(counts),
        "without": _summary(rest) if any(one.forwards for one in rest) else None,
        "only": _summary(flagged) if flagged else None,
    }

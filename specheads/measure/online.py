"""Online measurement: decode with the head, count what was accepted, compare with the base."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from specheads.base.model import FrozenBase
from specheads.core.drafter import Drafter
from specheads.core.loops import loops
from specheads.decoding.acceptance.sampling import each_prompt
from specheads.decoding.generate import generate
from specheads.decoding.loop import Step
from specheads.decoding.trees import policies
from specheads.measure.counts import DepthCounts, conditional_acceptance, rate
from specheads.measure.exactness import PROMPTS, hold, in_float32
from specheads.measure.how import How
from specheads.measure.results import Acceptance, CategoryRate, Degenerate, Lossless, Online
from specheads.runs.progress import bar


@dataclass(slots=True)
class Decoded:
    """What decoding gave one prompt."""

    tokens: list[int]
    """New tokens, cut at the limit and after the first end-of-text token."""
    counts: DepthCounts
    """Counts of the base forwards that gave all of them but the first."""


def decode_prompts(
    base: FrozenBase, drafter: Drafter | None, prompts: list[list[int]], how: How
) -> list[Decoded]:
    """Decode every prompt in the real loop and count its forwards.

    Without a drafter the base decodes alone, at exactly 1.0 a forward, whatever tree and
    acceptance rule are said.
    """
    tree = policies.NOTHING if drafter is None else how.tree or policies.chain(drafter.depth)
    each, sources = each_prompt(how.sampling, len(prompts)), how.sources_of(prompts)
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
            coupled=how.coupled,
        )
        decoded += [
            Decoded(tokens, _count(steps, len(tokens), tree.depth, source))
            for tokens, steps, source in zip(out.tokens, out.steps, sources[batch], strict=True)
        ]
    return decoded


def _count(steps: list[Step], length: int, depth: int, source: str) -> DepthCounts:
    """Count one prompt's forwards; see `DepthCounts` for what the end of the text cuts off."""
    counts = DepthCounts.zeros(depth, source)
    room = length - 1
    for taken in steps:
        reached = len(taken.path) - 1
        kept = min(reached, room - 1)
        counts.add(kept, drafted_beyond=taken.drafted_beyond or kept < reached)
        room -= len(taken.tokens)
    return counts


def write_alone(base: FrozenBase, prompts: list[list[int]], how: How) -> list[list[int]]:
    """Return what the base alone writes after each prompt: the new tokens."""
    return [one.tokens for one in decode_prompts(base, None, prompts, how)]


def measure_online(
    base: FrozenBase,
    drafter: Drafter,
    prompts: list[list[int]],
    alone: list[list[int]],
    how: How,
    categories: Sequence[str] = (),
) -> Acceptance:
    """Return the sections `online`, `lossless` and `degenerate` of results.json.

    `alone` is what `write_alone` gave each prompt, with the same limit and sampling.
    """
    decoded = decode_prompts(base, drafter, prompts, how)
    # samples by rejection have the base's distribution and other letters: nothing to compare
    comparable = how.sampling.temperature == 0 or how.acceptance == "match"
    return judge(base, decoded, prompts, alone, how, categories, comparable=comparable)


def lossless_in_float32(
    base: FrozenBase,
    arms: Callable[[FrozenBase], Mapping[str, tuple[Drafter, How]]],
    prompts: list[list[int]],
    how: How,
) -> dict[str, Lossless]:
    """Return what `measure_online` says of the first few texts where a base computes in float32.

    `arms` makes drafters for a base, and says how each decodes. None is left where the base has as
    many digits already, or where there is no memory for a copy of it.
    """
    if (wide := in_float32(base)) is None:
        return {}
    few = prompts[:PROMPTS]
    alone = write_alone(wide, few, how)
    return {
        name: measure_online(wide, drafter, few, alone, one).lossless
        for name, (drafter, one) in arms(wide).items()
    }


def judge(
    base: FrozenBase,
    decoded: Sequence[Decoded],
    prompts: list[list[int]],
    alone: list[list[int]],
    how: How,
    categories: Sequence[str] = (),
    *,
    comparable: bool,
) -> Acceptance:
    """Return the sections of what was decoded: see `measure_online`.

    Texts that are not `comparable` are other draws from the same distribution.
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
    return Acceptance(
        online=online,
        lossless=hold(base, texts if comparable else [], how.sampling),
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
    """Return the figures with and without the prompts after which the base alone loops.

    `core.loops` is the rule. A figure is None where no prompt, or none with a forward, is left.
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

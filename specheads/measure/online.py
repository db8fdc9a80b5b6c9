"""Online measurement: decode with a drafter, count, and compare with the base alone."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, replace

from specheads.base.model import FrozenBase
from specheads.core.drafter import Drafter, Head
from specheads.core.errors import InputError
from specheads.core.machine import refuse_bytes
from specheads.core.texts import loops
from specheads.decoding.trees import policies
from specheads.decoding.trees.hybrid import own_tree
from specheads.decoding.trees.policies import Sampled
from specheads.heads.load import drafter_of
from specheads.measure.counts import DepthCounts, conditional_acceptance, paired_gain, rate
from specheads.measure.exactness import compare_texts
from specheads.measure.generation import (
    Continuations,
    Decoded,
    GenerationSettings,
    decode_prompts,
    write_alone,
)
from specheads.measure.results import (
    CategoryRate,
    Degenerate,
    Drafting,
    Lossless,
    Online,
    OnlineSections,
)

FLOAT32_PROMPTS = 4
"""Prompts of the comparison in float32."""


def measure_online(
    base: FrozenBase, drafter: Drafter, texts: Continuations, generation: GenerationSettings
) -> OnlineSections:
    """Return the sections `online`, `lossless` and `degenerate` of results.json."""
    decoded = decode_prompts(base, drafter, texts.prompts, generation)
    # rejection samples from the base's distribution, but not the same tokens
    comparable = generation.sampling.temperature == 0 or generation.acceptance == "match"
    return online_sections(base, decoded, texts, generation, comparable=comparable)


def lossless_in_float32(
    base: FrozenBase, head: Head, texts: Continuations, generation: GenerationSettings
) -> Lossless | None:
    """Return the `lossless` section of the first prompts with the base in float32.

    None if the base has float32 precision already, if it is sharded or quantised, or if memory has
    no room for a copy.
    """
    if base.dtype.itemsize >= 4 or base.sharding or getattr(base.model, "hf_quantizer", None):
        return None
    try:
        refuse_bytes(4 * base.num_parameters, base.device, "the base in float32", "take a part")
    except InputError:
        return None
    wide = FrozenBase(deepcopy(base.model).float(), base.tokenizer, name=base.name)
    few = texts.prompts[:FLOAT32_PROMPTS]
    texts = Continuations(few, write_alone(wide, few, generation))
    return measure_online(wide, drafter_of(head, wide), texts, generation).lossless


def measure_drafting(
    base: FrozenBase, drafter: Drafter, texts: Continuations, generation: GenerationSettings
) -> dict[str, Drafting]:
    """Return the `drafting` section of results.json: three ways to draft on the same prompts.

    Coupled drafts see the noise that the base samples with, uncoupled ones do not. Rejection
    tests one sampled token per level, at as many levels as the head's own tree has. If the tree
    itself is `Sampled`, rejection tests that tree, and the other two draft a chain as deep. A tree
    that drafts nothing has no ways.
    """
    tree = tested = generation.tree or policies.chain(drafter.depth)
    if not tree.depth:
        return {}
    if isinstance(tree, Sampled):
        tree = policies.chain(tree.depth)
    else:
        tested = Sampled((1,) * own_tree(tree).depth)
    guessed = replace(generation, tree=tree, acceptance="match")
    ways = {
        "coupled": replace(guessed, coupled=True),
        "uncoupled": replace(guessed, coupled=False),
        "rejection": replace(guessed, tree=tested, acceptance="rejection", coupled=False),
    }
    found: dict[str, Drafting] = {}
    coupled: list[DepthCounts] = []
    for name, way in ways.items():
        assert way.tree is not None
        decoded = decode_prompts(base, drafter, texts.prompts, way)
        counts = [one.counts for one in decoded]
        coupled = coupled or counts
        # rejection samples from the base's distribution, but not the same tokens
        compared = texts.alone if way.acceptance == "match" else []
        found[name] = Drafting(
            **asdict(rate(counts)),
            tree=way.tree.name,
            num_nodes=way.tree.num_nodes,
            compared=len(compared),
            identical=sum(one.tokens == text for one, text in zip(decoded, compared, strict=False)),
            gain_of_coupled=None if name == "coupled" else paired_gain(coupled, counts),
        )
    return found


def online_sections(
    base: FrozenBase,
    decoded: Sequence[Decoded],
    texts: Continuations,
    generation: GenerationSettings,
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
        tokens_per_forward_without_bonus=sum(total.accepted) / total.forwards,
        per_depth=total.per_depth(),
        by_category=_by_category(counts, texts.categories),
        forwards=total.forwards,
        new_tokens=total.new_tokens,
        conditional_acceptance=conditional_acceptance(counts),
    )
    tokens = [one.tokens for one in decoded]
    triples = list(zip(texts.prompts, tokens, texts.alone, strict=True))
    return OnlineSections(
        online=online,
        lossless=compare_texts(base, triples if comparable else [], generation.sampling),
        degenerate=degenerate(counts, texts.alone),
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

    `core.texts` has the rule. A rate is None if no prompt, or no forward, remains.
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

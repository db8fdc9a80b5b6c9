"""Decode prompts with a drafter: settings, tokens, counts, and texts for the report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from specheads.base.model import FrozenBase
from specheads.core.drafter import Drafter
from specheads.data.prompts import Prompt
from specheads.decoding.detokenize import token_text
from specheads.decoding.generate import Decoding, generate
from specheads.decoding.loop import DecodingStep
from specheads.decoding.sampling import GREEDY, Sampling, each_prompt
from specheads.decoding.trees import policies
from specheads.measure.counts import DepthCounts
from specheads.measure.results import DecodedText, TextStep
from specheads.runs.progress import bar

NUM_TEXTS = 3
"""Texts in the report: those of the first prompts, without selection."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationSettings:
    """Conditions of decoding, shared by all measurements of an evaluation."""

    max_new_tokens: int
    """Limit of each prompt."""
    tree: policies.TreePolicy | None = None
    """Draft tree; None is a chain as deep as the drafter."""
    sampling: Sampling = GREEDY
    """How the base samples; every prompt has a seed of its own."""
    acceptance: str = "match"
    """Acceptance rule: a name in `specheads.decoding.accept.RULES`."""
    coupled: bool = True
    """Whether drafts see the noise that the base samples with."""
    batch_size: int = 1
    """Prompts decoded together."""
    stop_at_eos: bool = True
    """Whether an end-of-text token ends a text."""
    repeats: int = 2
    """Timed runs of each prompt."""
    speed_prompts: int = 16
    """How many of the prompts are timed; zero measures no speed."""
    progress: bool = False
    """Whether to show a progress bar."""
    sources: tuple[str, ...] = ()
    """Document that each prompt was cut from; intervals resample documents. Empty: its own."""

    @property
    def matched(self) -> bool:
        """Whether the text must equal that of the base alone; rejection samples another one."""
        return self.sampling.temperature == 0 or self.acceptance == "match"

    @property
    def alone(self) -> "GenerationSettings":
        """The same conditions for the base alone."""
        return replace(self, tree=policies.NOTHING, acceptance="match")

    def tree_of(self, drafter: Drafter | None) -> policies.TreePolicy:
        """Return the tree of a drafter; None needs one of copied text, or without a draft."""
        return self.tree or policies.chain(drafter.depth if drafter else 0)

    def sources_of(self, prompts: Sequence[object]) -> Sequence[str]:
        """Return the sources of the first prompts, or of all."""
        return self.sources[: len(prompts)] or [""] * len(prompts)


def generate_with(
    base: FrozenBase,
    drafter: Drafter | None,
    prompts: Sequence[list[int]],
    generation: GenerationSettings,
    sampling: Sampling | Sequence[Sampling] | None = None,
) -> Decoding:
    """Call `generate` under these conditions."""
    return generate(
        base,
        drafter,
        prompts,
        max_new_tokens=generation.max_new_tokens,
        sampling=generation.sampling if sampling is None else sampling,
        tree=generation.tree_of(drafter),
        acceptance=generation.acceptance,
        stop_at_eos=generation.stop_at_eos,
        coupled=generation.coupled,
    )


@dataclass(frozen=True, slots=True)
class Continuations:
    """Prompts, and the new tokens that the base alone writes after each."""

    prompts: list[list[int]]
    alone: list[list[int]]
    """Output of `write_alone` with the limit and the sampling of the measurement."""
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Each prompt's category and so on: see `PromptSet.groups`."""


@dataclass(slots=True)
class Decoded:
    """The decoded text of one prompt."""

    tokens: list[int]
    """New tokens, cut at the limit and after the first end-of-text token."""
    counts: DepthCounts
    """Counts of the forwards that gave all of them but the first."""


def decode_prompts(
    base: FrozenBase,
    drafter: Drafter | None,
    prompts: list[list[int]],
    generation: GenerationSettings,
) -> list[Decoded]:
    """Decode every prompt in the real loop and count its forwards."""
    depth = generation.tree_of(drafter).depth
    each, sources = each_prompt(generation.sampling, len(prompts)), generation.sources_of(prompts)
    firsts = range(0, len(prompts), generation.batch_size)
    decoded: list[Decoded] = []
    for first in bar(firsts, "online" if depth else "base alone", generation.progress):
        batch = slice(first, first + generation.batch_size)
        out = generate_with(base, drafter, prompts[batch], generation, each[batch])
        decoded += [
            Decoded(tokens, _count(steps, len(tokens), depth, source))
            for tokens, steps, source in zip(out.tokens, out.steps, sources[batch], strict=True)
        ]
    return decoded


def _count(steps: list[DecodingStep], length: int, depth: int, source: str) -> DepthCounts:
    """Count one prompt's forwards; see `DepthCounts` for drafts after the end of the text."""
    counts = DepthCounts.zeros(depth, source)
    room = length - 1
    for taken in steps:
        reached = len(taken.path) - 1
        kept = min(reached, room - 1)
        drafted = sum(parent >= 0 for parent in taken.parents)
        counts.add(kept, drafted_beyond=taken.drafted_beyond or kept < reached, drafted=drafted)
        room -= len(taken.tokens)
    return counts


def write_alone(
    base: FrozenBase, prompts: list[list[int]], generation: GenerationSettings
) -> list[list[int]]:
    """Return the new tokens that the base alone writes after each prompt."""
    return [one.tokens for one in decode_prompts(base, None, prompts, generation.alone)]


def decode_texts(
    base: FrozenBase, drafter: Drafter, prompts: Sequence[Prompt], generation: GenerationSettings
) -> list[DecodedText]:
    """Decode the first prompts one by one for the report; none if the base has no tokenizer."""
    if (tokenizer := base.tokenizer) is None:
        return []
    texts, seeds = [], each_prompt(generation.sampling, len(prompts))
    for prompt, sampling in zip(prompts[:NUM_TEXTS], seeds, strict=False):
        out = generate_with(base, drafter, [prompt.tokens], generation, [sampling])
        before, steps = [*prompt.tokens, out.tokens[0][0]], []
        for step in out.steps[0]:
            steps.append(_text_step(tokenizer, before, step))
            before += step.tokens
        text = DecodedText(
            category=prompt.category,
            prompt=str(tokenizer.decode(prompt.tokens, clean_up_tokenization_spaces=False)),
            first=token_text(tokenizer, prompt.tokens, out.tokens[0][0]),
            steps=steps,
            num_tokens=len(out.tokens[0]),
        )
        texts.append(text)
    return texts


def _text_step(
    tokenizer: PreTrainedTokenizerBase, before: list[int], step: DecodingStep
) -> TextStep:
    """Return a step with the text of each node, decoded after the text of its ancestors."""
    paths: list[list[int]] = []
    for token, parent in zip(step.drafted, step.parents, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else before[:-1]), token])
    return TextStep(
        tokens=[token_text(tokenizer, path[:-1], path[-1]) for path in paths],
        parents=step.parents,
        path=step.path,
        bonus=token_text(tokenizer, before + step.tokens[:-1], step.tokens[-1]),
        num_copied=step.num_copied,
    )

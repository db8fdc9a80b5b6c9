"""Decode prompts with a drafter: settings, tokens, counts, and texts for the report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from specheads.base.model import FrozenBase
from specheads.core.drafter import Drafter
from specheads.data.prompts import Prompt
from specheads.decoding.detokenize import token_text
from specheads.decoding.generate import Decoding, generate
from specheads.decoding.loop import NO_LEDGER, DecodingStep, StepLedger
from specheads.decoding.sampling import GREEDY, Sampling, expand_sampling
from specheads.decoding.suffix_decoding import SuffixAutomaton
from specheads.decoding.trees import policies
from specheads.measure.counts import DepthCounts
from specheads.measure.results import DecodedText, TextStep
from specheads.runs.progress import progress_bar

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
    ledger: bool = False
    """Whether to measure the seconds of the parts of a step, on the timed prompts."""
    memory: SuffixAutomaton | None = None
    """Text of earlier prompts and answers, to copy from: see `Engine`."""
    progress: bool = False
    """Whether to show a progress bar."""
    sources: tuple[str, ...] = ()
    """Document that each prompt was cut from; intervals resample documents. Empty: its own."""

    @property
    def is_matched(self) -> bool:
        """Whether the text must equal that of the base alone; rejection samples another one."""
        return self.sampling.temperature == 0 or self.acceptance == "match"

    @property
    def without_drafts(self) -> "GenerationSettings":
        """The same conditions for the base alone."""
        return replace(self, tree=policies.NOTHING, acceptance="match")

    def tree_of(self, drafter: Drafter | None) -> policies.TreePolicy:
        """Return the tree of a drafter; None needs one of copied text, or without a draft."""
        return self.tree or policies.chain(drafter.depth if drafter else 0)

    def sources_of(self, prompts: Sequence[object]) -> Sequence[str]:
        """Return the sources of the first prompts, or of all."""
        return self.sources[: len(prompts)] or [""] * len(prompts)


def decode_batch(
    base: FrozenBase,
    drafter: Drafter | None,
    prompts: Sequence[list[int]],
    generation: GenerationSettings,
    sampling: Sampling | Sequence[Sampling] | None = None,
    ledger: StepLedger = NO_LEDGER,
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
        ledger=ledger,
        memory=generation.memory,
    )


@dataclass(frozen=True, slots=True)
class BaseTexts:
    """Prompts, and the new tokens that the base alone writes after each."""

    prompts: list[list[int]]
    continuations: list[list[int]]
    """Output of `continue_prompts` with the limit and the sampling of the measurement."""
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Each prompt's category and so on: see `PromptSet.groups`."""

    @property
    def pairs(self) -> list[tuple[list[int], list[int]]]:
        """Each prompt with its continuation."""
        return list(zip(self.prompts, self.continuations, strict=True))


@dataclass(slots=True)
class DecodedPrompt:
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
) -> list[DecodedPrompt]:
    """Decode every prompt in the real loop and count its forwards."""
    depth = generation.tree_of(drafter).depth
    samplings = expand_sampling(generation.sampling, len(prompts))
    sources = generation.sources_of(prompts)
    starts = range(0, len(prompts), generation.batch_size)
    decoded: list[DecodedPrompt] = []
    for start in progress_bar(starts, "online" if depth else "base alone", generation.progress):
        batch = slice(start, start + generation.batch_size)
        out = decode_batch(base, drafter, prompts[batch], generation, samplings[batch])
        decoded += [
            DecodedPrompt(tokens, count_steps(steps, len(tokens), depth, source))
            for tokens, steps, source in zip(out.tokens, out.steps, sources[batch], strict=True)
        ]
    return decoded


def count_steps(steps: list[DecodingStep], length: int, depth: int, source: str) -> DepthCounts:
    """Count one prompt's forwards; see `DepthCounts` for drafts after the end of the text."""
    counts = DepthCounts.zeros(depth, source)
    remaining = length - 1
    for step in steps:
        path_depth = len(step.path) - 1
        num_accepted = min(path_depth, remaining - 1)
        num_drafted = sum(parent >= 0 for parent in step.parents)
        drafted_beyond = step.drafted_beyond or num_accepted < path_depth
        counts.add(num_accepted, drafted_beyond=drafted_beyond, drafted=num_drafted)
        remaining -= len(step.tokens)
    return counts


def continue_prompts(
    base: FrozenBase, prompts: list[list[int]], generation: GenerationSettings
) -> list[list[int]]:
    """Return the new tokens that the base alone writes after each prompt."""
    decoded = decode_prompts(base, None, prompts, generation.without_drafts)
    return [text.tokens for text in decoded]


def decode_texts(
    base: FrozenBase, drafter: Drafter, prompts: Sequence[Prompt], generation: GenerationSettings
) -> list[DecodedText]:
    """Decode the first prompts one by one for the report; none if the base has no tokenizer."""
    if (tokenizer := base.tokenizer) is None:
        return []
    texts, seeds = [], expand_sampling(generation.sampling, len(prompts))
    for prompt, sampling in zip(prompts[:NUM_TEXTS], seeds, strict=False):
        out = decode_batch(base, drafter, [prompt.tokens], generation, [sampling])
        text, steps = [*prompt.tokens, out.tokens[0][0]], []
        for step in out.steps[0]:
            steps.append(_text_step(tokenizer, text, step))
            text += step.tokens
        texts.append(
            DecodedText(
                category=prompt.category,
                prompt=str(tokenizer.decode(prompt.tokens, clean_up_tokenization_spaces=False)),
                first=token_text(tokenizer, prompt.tokens, out.tokens[0][0]),
                steps=steps,
                num_tokens=len(out.tokens[0]),
            )
        )
    return texts


def _text_step(tokenizer: PreTrainedTokenizerBase, text: list[int], step: DecodingStep) -> TextStep:
    """Return a step with the text of each node, decoded after the text of its ancestors."""
    paths: list[list[int]] = []
    for token, parent in zip(step.drafted, step.parents, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else text[:-1]), token])
    return TextStep(
        tokens=[token_text(tokenizer, path[:-1], path[-1]) for path in paths],
        parents=step.parents,
        path=step.path,
        bonus=token_text(tokenizer, text + step.tokens[:-1], step.tokens[-1]),
        num_copied=step.num_copied,
    )

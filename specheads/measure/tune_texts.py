"""Texts to tune a head on: the base's continuations, and their ranks among the head's guesses."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from specheads.base.model import FrozenBase
from specheads.config import Data
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.data.prompts import Prompt, held_out
from specheads.decoding.sampling import each_prompt
from specheads.measure.counts import number_sources
from specheads.measure.generation import GenerationSettings, write_alone
from specheads.measure.offline import guess_ranks
from specheads.measure.tune_trees import WIDTH
from specheads.runs.progress import bar


@dataclass(frozen=True, slots=True)
class TuningTexts:
    """Prompts with the base's continuations, for steps at one context length."""

    context: int
    """Tokens of the rows whose steps are timed."""
    prompts: Sequence[list[int]]
    continuations: Sequence[list[int]]
    ranks: Sequence[Tensor]
    """Output of `guess_ranks` for each continuation."""
    sources: Sequence[str]
    """Document that each prompt was cut from: see `GenerationSettings.sources`."""

    @property
    def grown(self) -> "TuningTexts":
        """Return the half that trees are built from."""
        return self._half(0)

    @property
    def judged(self) -> "TuningTexts":
        """Return the half that trees are judged by; a single text serves both."""
        return self._half(1) if len(self.prompts) > 1 else self

    def _half(self, first: int) -> "TuningTexts":
        """Return the texts of every other source, or every other text of a single source."""
        numbers = number_sources(self.sources)
        if not any(numbers):
            numbers = range(len(self.sources))
        half = [number % 2 == first for number in numbers]
        return TuningTexts(
            self.context,
            [*compress(self.prompts, half)],
            [*compress(self.continuations, half)],
            [*compress(self.ranks, half)],
            [*compress(self.sources, half)],
        )

    def pairs(self) -> list[tuple[list[int], list[int]]]:
        """Return each prompt with its continuation."""
        return list(zip(self.prompts, self.continuations, strict=True))

    def rows(self, batch: int, first: int = 0) -> list[list[int]]:
        """Return `batch` rows of exactly `context` tokens, from judged text `first` on.

        A row ends in the middle of its continuation. If that is too short, other texts precede it:
        a repeated text would give prompt lookup too much to copy.
        """
        texts = [prompt + text[: len(text) // 2] for prompt, text in self.judged.pairs()]
        found = []
        for place in range(first, first + batch):
            row, before = list[int](), place
            while len(row) < self.context:
                row, before = texts[before % len(texts)] + row, before - 1
            found.append(row[-self.context :])
        return found


def validation_prompts(
    data: Data, tokenizer: PreTrainedTokenizerBase, length: int, number: int, seed: int
) -> list[Prompt]:
    """Return validation prompts: trees are chosen on them, heads are not measured on them."""
    wanted = tokenizer, length, number, seed
    try:
        return held_out(data, "validation", *wanted)
    except InputError:
        # with few documents there may be no validation text, or none of this length
        return held_out(data, "train", *wanted)


def write_texts(
    base: FrozenBase,
    head: Head,
    prompts: list[list[int]],
    context: int,
    generation: GenerationSettings,
) -> TuningTexts:
    """Continue prompts with the base alone, and rank its tokens among the head's guesses.

    Above temperature zero `coupled` decides whether the head sees the noise.
    """
    if not prompts:
        raise InputError(
            "a tree is chosen on prompts, got none; lower prompt_tokens or give longer documents"
        )
    texts = write_alone(base, prompts, replace(generation, batch_size=8))
    each = zip(prompts, texts, each_prompt(generation.sampling, len(prompts)), strict=True)
    ranks = [
        guess_ranks(base, head, *text, width=WIDTH, sampling=one, coupled=generation.coupled)
        for *text, one in bar(list(each), "guesses", generation.progress)
    ]
    return TuningTexts(context, prompts, texts, ranks, generation.sources_of(prompts))

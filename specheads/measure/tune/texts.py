"""Texts that a head is tuned on: what the base wrote, and how the head ranks what it said."""

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
from specheads.decoding.acceptance.sampling import each_prompt
from specheads.measure.counts import number_sources
from specheads.measure.how import How
from specheads.measure.offline import guess_ranks
from specheads.measure.online import write_alone
from specheads.measure.tune.acceptance import WIDTH
from specheads.runs.progress import bar


@dataclass(frozen=True, slots=True)
class Texts:
    """What the base wrote after prompts, for steps at a context."""

    context: int
    """Tokens of the rows whose steps are timed."""
    prompts: Sequence[list[int]]
    continuations: Sequence[list[int]]
    ranks: Sequence[Tensor]
    """Of each continuation: see `guess_ranks`."""
    sources: Sequence[str]
    """What each prompt was cut from: see `How.sources`."""

    @property
    def grown(self) -> "Texts":
        """Return the half that trees are grown from."""
        return self._from(0)

    @property
    def judged(self) -> "Texts":
        """Return the half that trees are judged by; a single text does both."""
        return self._from(1) if len(self.prompts) > 1 else self

    def _from(self, first: int) -> "Texts":
        """Return the texts of every other source; where there is one, every other text."""
        numbers = number_sources(self.sources)
        if not any(numbers):
            numbers = range(len(self.sources))
        half = [number % 2 == first for number in numbers]
        return Texts(
            self.context,
            [*compress(self.prompts, half)],
            [*compress(self.continuations, half)],
            [*compress(self.ranks, half)],
            [*compress(self.sources, half)],
        )

    def pairs(self) -> list[tuple[list[int], list[int]]]:
        """Return each prompt with what the base wrote after it."""
        return list(zip(self.prompts, self.continuations, strict=True))

    def rows(self, batch: int, first: int = 0) -> list[list[int]]:
        """Return so many rows of exactly this context, from a judged text on, over and over.

        Each ends where half of its text is written. Where that is too short others stand before
        it: one that repeats itself would have more to copy than it has.
        """
        texts = [prompt + text[: len(text) // 2] for prompt, text in self.judged.pairs()]
        found = []
        for place in range(first, first + batch):
            row, before = list[int](), place
            while len(row) < self.context:
                row, before = texts[before % len(texts)] + row, before - 1
            found.append(row[-self.context :])
        return found


def prompts_for(
    data: Data, tokenizer: PreTrainedTokenizerBase, length: int, number: int, seed: int
) -> list[Prompt]:
    """Return validation prompts, which trees are chosen on and heads are not measured on."""
    asked = tokenizer, length, number, seed
    try:
        return held_out(data, "validation", *asked)
    except InputError:
        # of few documents none may be held out, or none is as long
        return held_out(data, "train", *asked)


def write(base: FrozenBase, head: Head, prompts: list[list[int]], context: int, how: How) -> Texts:
    """Have the base continue prompts; rank what it says among the head's guesses.

    Above temperature zero guesses are ranked as `how` lets drafts see the noise. It says what the
    prompts were cut from, too.
    """
    if not prompts:
        raise InputError(
            "a tree is chosen on prompts, got none; lower prompt_tokens or give longer documents"
        )
    texts = write_alone(base, prompts, replace(how, batch_size=8))
    each = zip(prompts, texts, each_prompt(how.sampling, len(prompts)), strict=True)
    ranks = [
        guess_ranks(base, head, *text, width=WIDTH, sampling=one, coupled=how.coupled)
        for *text, one in bar(list(each), "guesses", how.progress)
    ]
    return Texts(context, prompts, texts, ranks, how.sources_of(prompts))

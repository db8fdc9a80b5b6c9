"""Texts that a head is tuned on: what the base wrote, and how the head ranks what it said."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from specheads.base.model import FrozenBase
from specheads.config import Data
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.data.prompts import held_out
from specheads.decoding.acceptance.sampling import each_prompt
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

    @property
    def grown(self) -> "Texts":
        """Return the half that trees are grown from."""
        return self._from(0)

    @property
    def judged(self) -> "Texts":
        """Return the half that trees are judged by; a single text does both."""
        return self._from(1) if len(self.prompts) > 1 else self

    def _from(self, first: int) -> "Texts":
        every = slice(first, None, 2)
        parts = self.prompts[every], self.continuations[every], self.ranks[every]
        return Texts(self.context, *parts)

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
) -> list[list[int]]:
    """Return the token ids of validation prompts, which trees are chosen on and not judged."""
    asked = tokenizer, length, number, seed
    try:
        found = held_out(data, "validation", *asked)
    except InputError:
        # of few documents none may be held out, or none is as long
        found = held_out(data, "train", *asked)
    return [prompt.tokens for prompt in found]


def write(base: FrozenBase, head: Head, prompts: list[list[int]], context: int, how: How) -> Texts:
    """Have the base continue prompts; rank what it says among the head's guesses.

    Above temperature zero guesses are ranked as `how` lets drafts see the noise.
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
    return Texts(context, prompts, texts, ranks)

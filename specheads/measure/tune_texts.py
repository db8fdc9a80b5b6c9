"""Texts to tune a head on: the base's continuations, and their ranks among the head's guesses."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

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
class TuningText:
    """A prompt with the base's continuation."""

    prompt: list[int]
    continuation: list[int]
    ranks: Tensor
    """Output of `guess_ranks` for the continuation."""
    source: str
    """Document that the prompt was cut from: see `GenerationSettings.sources`."""


@dataclass(frozen=True, slots=True)
class TuningTexts:
    """Texts for steps at one context length."""

    context: int
    """Tokens of the rows whose steps are timed."""
    grown: Sequence[TuningText]
    """The half that trees are built from."""
    judged: Sequence[TuningText]
    """The half that trees are judged by; a single text serves both."""

    def rows(self, batch: int, first: int = 0) -> list[list[int]]:
        """Return `batch` rows of exactly `context` tokens, from judged text `first` on.

        A row ends in the middle of its continuation. If that is too short, other texts precede it:
        a repeated text would give prompt lookup too much to copy.
        """
        texts = [one.prompt + one.continuation[: len(one.continuation) // 2] for one in self.judged]
        rows = []
        for place in range(first, first + batch):
            row = list[int]()
            while len(row) < self.context:
                row, place = texts[place % len(texts)] + row, place - 1
            rows.append(row[-self.context :])
        return rows


def validation_prompts(
    corpus: Data, base: FrozenBase, length: int, number: int, *, longest: int, seed: int
) -> list[Prompt]:
    """Return whole validation prompts of about `length` tokens, and at most `longest`.

    Trees are chosen on them, heads are not measured on them. Windows of a corpus have exactly this
    length. Questions of users have any length, so the nearest of four times as many are taken: a
    truncated prompt has less to copy.
    """
    if base.tokenizer is None:
        raise InputError(f"tuning reads text: the base {base.name} needs a tokenizer")
    wanted = base.tokenizer, length, 4 * number, seed
    try:
        found = held_out(corpus, "validation", *wanted)
    except InputError:
        # with few documents there may be no validation text, or none of this length
        found = held_out(corpus, "train", *wanted)
    found = [one for one in found if len(one.tokens) <= longest]
    if not found:
        raise InputError(
            f"a tree is chosen on prompts of at most {longest} tokens, got none; lower contexts or "
            "prompt_tokens, or choose other data"
        )
    nearest = sorted(range(len(found)), key=lambda place: abs(len(found[place].tokens) - length))
    return [found[place] for place in sorted(nearest[:number])]


def write_texts(
    base: FrozenBase,
    head: Head,
    prompts: Sequence[Prompt],
    context: int,
    generation: GenerationSettings,
) -> TuningTexts:
    """Continue prompts with the base alone, and rank its tokens among the head's guesses.

    Above temperature zero `coupled` decides whether the head sees the noise. Texts of one source
    go to the same half.
    """
    tokens, sources = [one.tokens for one in prompts], [one.source for one in prompts]
    written = write_alone(base, tokens, replace(generation, batch_size=8))
    each = zip(tokens, written, each_prompt(generation.sampling, len(tokens)), strict=True)
    ranks = [
        guess_ranks(base, head, *text, width=WIDTH, sampling=one, coupled=generation.coupled)
        for *text, one in bar(list(each), "guesses", generation.progress)
    ]
    numbers = number_sources(sources)
    if not any(numbers):
        numbers = range(len(sources))
    texts = [*map(TuningText, tokens, written, ranks, sources)]
    grown, judged = (
        [text for text, number in zip(texts, numbers, strict=True) if number % 2 == half]
        for half in (0, 1)
    )
    return TuningTexts(context, grown, judged or grown)

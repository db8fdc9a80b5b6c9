"""Decode a few texts for people to look at, with the text of every token of every tree."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from specheads.base.model import FrozenBase
from specheads.core.drafter import Drafter
from specheads.data.prompts import Prompt
from specheads.decoding.acceptance.sampling import each_prompt
from specheads.decoding.detokenize import token_text
from specheads.decoding.generate import generate
from specheads.decoding.loop import Step
from specheads.measure.how import How
from specheads.measure.texts import DecodedText, Texts, TextStep

NUM_TEXTS = 3
"""Texts that are kept: those of the first prompts, so that nobody chose them."""


def decode_texts(
    base: FrozenBase, drafter: Drafter, prompts: Sequence[Prompt], how: How
) -> Texts | None:
    """Decode the first prompts, each by itself; None where the base has no tokenizer."""
    tokenizer = base.tokenizer
    if tokenizer is None:
        return None
    seeds = each_prompt(how.sampling, len(prompts))
    texts = []
    for prompt, sampling in zip(prompts[:NUM_TEXTS], seeds, strict=False):
        out = generate(
            base,
            drafter,
            [prompt.tokens],
            max_new_tokens=how.max_new_tokens,
            sampling=[sampling],
            tree=how.tree,
            acceptance=how.acceptance,
            stop_at_eos=how.stop_at_eos,
            coupled=how.coupled,
        )
        texts.append(_text(tokenizer, prompt, out.tokens[0], out.steps[0]))
    return Texts(texts=texts)


def _text(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, tokens: list[int], steps: list[Step]
) -> DecodedText:
    before, shown = [*prompt.tokens, tokens[0]], []
    for step in steps:
        shown.append(_step(tokenizer, before, step))
        before += step.tokens
    return DecodedText(
        category=prompt.category,
        prompt=str(tokenizer.decode(prompt.tokens, clean_up_tokenization_spaces=False)),
        first=token_text(tokenizer, prompt.tokens, tokens[0]),
        steps=shown,
        num_tokens=len(tokens),
    )


def _step(tokenizer: PreTrainedTokenizerBase, before: list[int], step: Step) -> TextStep:
    """Return a step with texts for tokens: those of a node follow those of its ancestors."""
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

"""Prompts at several lengths: text in front of the same questions."""

from collections.abc import Sequence
from dataclasses import replace

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from specheads.config.data import SourceSettings
from specheads.core.errors import InputError
from specheads.data.encode import encode_text
from specheads.data.prompts import Prompt, PromptSet
from specheads.data.sources import read_source


def prepend_context(
    prompts: PromptSet, contexts: Sequence[int], source: str, tokenizer: PreTrainedTokenizerBase
) -> list[PromptSet]:
    """Return the prompts at each of these lengths, filled with text in front of their questions.

    Every question has a stretch of the text of its own. A longer context adds text before the same
    end of that stretch, so the prompts of two lengths are paired. `contexts` ascend. `source` is a
    file or folder of text, or "python_stdlib", of which files are used that are never trained on.
    """
    between = encode_text(tokenizer, "\n\n", add_special_tokens=False)
    needed = max(len(one.tokens) for one in prompts.prompts) + len(between)
    if contexts[0] < needed:
        raise InputError(
            f"a context must hold the longest prompt and a blank line, {needed} tokens, got "
            f"{contexts[0]}; leave it out, or choose shorter prompts"
        )
    stdlib, ids = source == "python_stdlib", list[int]()
    files = SourceSettings(source=source) if stdlib else SourceSettings(source="files", path=source)
    most, gaps = contexts[-1], max(len(prompts.prompts) - 1, 1)
    for split, _, row in read_source(files):
        if split == "prompts" or not stdlib:
            ids += encode_text(tokenizer, f"{row['text']}\n\n", add_special_tokens=False)
        if len(ids) >= most * (gaps + 1):
            break
    if len(ids) < most:
        raise InputError(
            f"the text in front of the questions must fill the longest context, {source} has "
            f"{len(ids)} tokens for {most}; name more text in context_text, or lower contexts"
        )
    ends = [most + place * (len(ids) - most) // gaps for place in range(len(prompts.prompts))]

    def filled(prompt: Prompt, length: int, end: int) -> Prompt:
        begin = end - (length - len(prompt.tokens) - len(between))
        text, at = ids[begin:end] + between, prompt.question
        return replace(prompt, tokens=prompt.tokens[:at] + text + prompt.tokens[at:])

    return [
        PromptSet.of(
            prompts.name,
            [filled(one, length, end) for one, end in zip(prompts.prompts, ends, strict=True)],
        )
        for length in contexts
    ]

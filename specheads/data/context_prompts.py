"""Prompts at several lengths: text in front of the same questions."""

from collections.abc import Sequence
from dataclasses import replace

from specheads.config.data import SourceSettings
from specheads.core.errors import InputError
from specheads.data.encode import Tokenizer, encode_text
from specheads.data.prompts import Prompt, PromptSet
from specheads.data.sources import read_source


def prepend_context(
    prompts: PromptSet, contexts: Sequence[int], source: str, tokenizer: Tokenizer
) -> list[PromptSet]:
    """Return the prompts at each of these lengths, filled with text in front of their questions.

    Every question has a stretch of the text of its own. A longer context adds text before the same
    end of that stretch, so the prompts of two lengths are paired. `contexts` ascend. `source` is a
    file or folder of text, or "python_stdlib", of which files are used that are never trained on.
    """
    separator = encode_text(tokenizer, "\n\n", add_special_tokens=False)
    needed = max(len(prompt.tokens) for prompt in prompts.prompts) + len(separator)
    if contexts[0] < needed:
        raise InputError(
            f"a context must hold the longest prompt and a blank line, {needed} tokens, got "
            f"{contexts[0]}; leave it out, or choose shorter prompts"
        )
    longest, gaps = contexts[-1], max(len(prompts.prompts) - 1, 1)
    ids = _read_tokens(source, tokenizer, longest * (gaps + 1))
    if len(ids) < longest:
        raise InputError(
            f"the text in front of the questions must fill the longest context, {source} has "
            f"{len(ids)} tokens for {longest}; name more text in context_text, or lower contexts"
        )
    num_prompts = len(prompts.prompts)
    ends = [longest + index * (len(ids) - longest) // gaps for index in range(num_prompts)]

    def fill(prompt: Prompt, length: int, end: int) -> Prompt:
        begin = end - (length - len(prompt.tokens) - len(separator))
        text, question = ids[begin:end] + separator, prompt.question_start
        return replace(prompt, tokens=prompt.tokens[:question] + text + prompt.tokens[question:])

    return [
        PromptSet.of(
            prompts.name,
            [fill(prompt, length, end) for prompt, end in zip(prompts.prompts, ends, strict=True)],
        )
        for length in contexts
    ]


def _read_tokens(source: str, tokenizer: Tokenizer, num_tokens: int) -> list[int]:
    """Return the first tokens of a source: at least `num_tokens`, or all that it has."""
    is_stdlib, ids = source == "python_stdlib", list[int]()
    files = SourceSettings(
        source=source if is_stdlib else "files", path="" if is_stdlib else source
    )
    for split, _, document in read_source(files):
        if split == "prompts" or not is_stdlib:
            ids += encode_text(tokenizer, f"{document['text']}\n\n", add_special_tokens=False)
        if len(ids) >= num_tokens:
            break
    return ids

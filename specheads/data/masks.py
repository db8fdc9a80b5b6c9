"""Loss masks of conversations: check them against the answers, and show them to people."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from specheads.data.encode import Tokenizer

OPEN, CLOSE = "⟦", "⟧"
"""Brackets around tokens in the loss, for output without colour."""


def find_mask_fault(
    tokenizer: Tokenizer,
    tokens: Sequence[int],
    loss_mask: Sequence[bool],
    answers: Sequence[str],
    *,
    is_next: bool,
) -> str:
    """Return why a loss mask is wrong, as a phrase ("it counts 'a'"); empty if it is right.

    The mask must count exactly these answers with their end tokens, in their order. With `is_next`
    an answer also has the token that opens the next turn, if there is one.
    """
    spans = list(_label_spans(loss_mask))
    if len(spans) != len(answers):
        return f"it counts {len(spans)} stretches, and there are {len(answers)} answers"
    for (begin, stop), answer in zip(spans, answers, strict=True):
        # some tokenizers decode the first token of a text in another way
        first, end = max(0, begin - 1), stop - (is_next and stop < len(tokens))
        before = decode_ids(tokenizer, tokens[first:begin])
        text = decode_ids(tokenizer, tokens[first:end]).removeprefix(before)
        # a token may begin in the prompt and contain the begin of the answer
        begin_in_prompt = answer.removesuffix(text)
        is_cut = bool(text) and begin_in_prompt != before and before.endswith(begin_in_prompt)
        if not (is_cut or text == answer or text == _normalise(tokenizer, answer)):
            return f"it counts {text!r:.60} for the answer {answer!r:.60}"
    return ""


def contains_answer(text: str, answer: dict[str, Any]) -> bool:
    """Return whether a text has an answer, and the name and the arguments of each of its calls.

    A template may remove the thought, and may write arguments as JSON, XML or Python.
    """
    text, calls = strip_spaces(text), [call["function"] for call in answer.get("tool_calls", ())]
    names = Counter(strip_spaces(call["name"]) for call in calls)
    values = [answer["content"].rpartition("</think>")[2]]
    values += [value for call in calls for value in _keys_and_values(call["arguments"])]
    return all(text.count(name) >= count for name, count in names.items()) and all(
        any(strip_spaces(spelling) in text for spelling in _spellings(value)) for value in values
    )


def strip_spaces(text: str) -> str:
    """Return a text without whitespace, which templates add and remove."""
    return re.sub(r"\s", "", text)


def decode_ids(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return the text of token ids, with special tokens."""
    return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))


def _normalise(tokenizer: Tokenizer, text: str) -> str:
    """Return a text as the tokenizer reads it."""
    ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    return decode_ids(tokenizer, ids)


def _keys_and_values(value: Any) -> Iterator[Any]:
    """Yield the keys and the values in nested JSON."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _keys_and_values(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _keys_and_values(inner)
    else:
        yield value


def _spellings(value: Any) -> list[str]:
    """Return the ways in which a template may write a value."""
    if isinstance(value, str):
        escaped = (json.dumps(value), json.dumps(value, ensure_ascii=False), repr(value))
        return [value, *(spelling[1:-1] for spelling in escaped)]
    return [str(value), json.dumps(value)]


def _label_spans(loss_mask: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Yield (begin, stop) of each run of counted tokens."""
    stop = 0
    for is_label, run in groupby(loss_mask):
        begin, stop = stop, stop + len(list(run))
        if is_label:
            yield begin, stop


def marked(tokenizer: Tokenizer, tokens: Iterable[int], loss_mask: Iterable[bool]) -> str:
    """Return a text with brackets around every run of tokens in the loss.

    Runs are decoded one by one, so a character whose bytes are in two runs shows as unknown.
    """
    text = ""
    labelled = zip(tokens, loss_mask, strict=True)
    for is_label, run in groupby(labelled, lambda pair: bool(pair[1])):
        run_text = str(tokenizer.decode([int(token) for token, _ in run]))
        text += f"{OPEN}{run_text}{CLOSE}" if is_label else run_text
    return text

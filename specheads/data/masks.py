"""Loss masks of conversations: check them against the answers, and show them to people."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

OPEN, CLOSE = "⟦", "⟧"
"""Brackets around tokens in the loss, for output without colour."""


def added_token_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the special tokens and all other added tokens."""
    known: Any = tokenizer
    return {*known.all_special_ids, *known.added_tokens_decoder}


def wrong_mask(
    tokenizer: PreTrainedTokenizerBase,
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
    spans = list(_spans(loss_mask))
    if len(spans) != len(answers):
        return f"it counts {len(spans)} stretches, and there are {len(answers)} answers"
    for (begin, stop), answer in zip(spans, answers, strict=True):
        # some tokenizers decode the first token of a text in another way
        first, end = max(0, begin - 1), stop - (is_next and stop < len(tokens))
        before = decoded(tokenizer, tokens[first:begin])
        written = decoded(tokenizer, tokens[first:end]).removeprefix(before)
        # a token may begin in the prompt and contain the begin of the answer
        cut = answer.removesuffix(written)
        is_cut = bool(written) and cut != before and before.endswith(cut)
        if not is_cut and written != answer and written != _normalised(tokenizer, answer):
            return f"it counts {written!r:.60} for the answer {answer!r:.60}"
    return ""


def says_all(text: str, answer: dict[str, Any]) -> bool:
    """Return whether a text has an answer, and the name and the arguments of each of its calls.

    A template may remove the thought, and may write arguments as JSON, XML or Python.
    """
    text, calls = squeezed(text), [call["function"] for call in answer.get("tool_calls", ())]
    names = Counter(squeezed(call["name"]) for call in calls)
    parts = [answer["content"].rpartition("</think>")[2]]
    parts += [part for call in calls for part in _leaves(call["arguments"])]
    return all(text.count(name) >= count for name, count in names.items()) and all(
        any(squeezed(form) in text for form in _forms(part)) for part in parts
    )


def squeezed(text: str) -> str:
    """Return a text without whitespace, which templates add and remove."""
    return re.sub(r"\s", "", text)


def decoded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Return the text of token ids, with special tokens."""
    return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))


def _normalised(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """Return a text as the tokenizer reads it."""
    ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    return decoded(tokenizer, ids)


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the keys and the values in nested JSON."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner)
    else:
        yield value


def _forms(value: Any) -> list[str]:
    """Return the ways in which a template may write a value."""
    if isinstance(value, str):
        escaped = (json.dumps(value), json.dumps(value, ensure_ascii=False), repr(value))
        return [value, *(form[1:-1] for form in escaped)]
    return [str(value), json.dumps(value)]


def _spans(loss_mask: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Yield (begin, stop) of each run of counted tokens."""
    place = 0
    for is_counted, run in groupby(loss_mask):
        begin, place = place, place + len(list(run))
        if is_counted:
            yield begin, place


def marked(
    tokenizer: PreTrainedTokenizerBase, tokens: Iterable[int], loss_mask: Iterable[bool]
) -> str:
    """Return a text with brackets around every run of tokens in the loss.

    Runs are decoded one by one, so a character whose bytes are in two runs shows as unknown.
    """
    out = ""
    for is_counted, run in groupby(zip(tokens, loss_mask, strict=True), lambda one: bool(one[1])):
        text = str(tokenizer.decode([int(token) for token, _ in run]))
        out += f"{OPEN}{text}{CLOSE}" if is_counted else text
    return out

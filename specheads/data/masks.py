"""Loss masks of conversations: check them against the answers, and show them to people."""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

OPENING_TOKENS = 32
"""Tokens before an answer that are decoded: no template opens an answer with more."""

TAG = r"</?think>"
"""Tags that templates write around thoughts, also around empty ones."""

OPEN, CLOSE = "⟦", "⟧"
"""Brackets around tokens in the loss, for output without colour."""


def added_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the special tokens and all other added tokens."""
    known: Any = tokenizer
    return {*known.all_special_ids, *known.added_tokens_decoder}


def wrong_mask(
    tokenizer: PreTrainedTokenizerBase,
    tokens: Sequence[int],
    loss_mask: Sequence[bool],
    answers: Sequence[tuple[dict[str, Any], str]],
    *,
    end: str,
    opening: str,
) -> str:
    """Return why a loss mask is wrong, as a phrase ("it counts nothing"); empty if it is right.

    The mask must count these answers in their order, each as its template writes it (the second
    text), `end` included. If `end` is empty, the token that opens the next turn ends an answer. An
    answer follows `opening` or an added token, such as the one that closes a tool's result.
    """
    spans = list(_spans(loss_mask))
    if not any(loss_mask):
        return "it counts nothing"
    if all(loss_mask):
        return "it counts everything"
    if len(spans) != len(answers):
        return f"it counts {len(spans)} stretches, and there are {len(answers)} answers"
    added = added_ids(tokenizer)
    for (begin, stop), (answer, expected) in zip(spans, answers, strict=True):
        is_ended = tokens[stop - 1] in added
        body = _text(tokenizer, tokens[begin : stop - is_ended])
        whole = _text(tokenizer, tokens[begin:stop])
        if not is_ended and (end or stop < len(tokens)):
            return f"it counts {_cut(whole)}, which does not end with {end or 'a special token'}"
        before = _text(tokenizer, tokens[max(0, begin - OPENING_TOKENS) : begin])
        is_opened = opening and squeezed(before).endswith(squeezed(opening))
        if not is_opened and (not begin or tokens[begin - 1] not in added):
            return f"it counts {_cut(body)}, which follows {_cut(before[-40:])}"
        if not any(_matches(tokenizer, text, answer, expected) for text in (whole, body)):
            called = [call["function"]["name"] for call in answer.get("tool_calls", ())]
            written = answer.get("reasoning_content", "") + answer["content"]
            wanted = " and calls ".join([_cut(written), *called])
            return f"it counts {_cut(body)} for the answer {wanted}"
    return ""


def squeezed(text: str) -> str:
    """Return a text without whitespace and thinking tags, which templates add and remove."""
    return re.sub(rf"\s|{TAG}", "", text)


def _matches(
    tokenizer: PreTrainedTokenizerBase, text: str, answer: dict[str, Any], expected: str
) -> bool:
    read = squeezed(text)
    if calls := answer.get("tool_calls"):
        place = 0
        for part in (answer["content"], *(call["function"]["name"] for call in calls)):
            place = read.find(squeezed(part), place)
            if place < 0:
                return False
        return True
    if read != squeezed(expected):
        # a tokenizer may normalise text
        ids: Any = tokenizer(expected, add_special_tokens=False, verbose=False)["input_ids"]
        return read == squeezed(_text(tokenizer, ids))
    return True


def _spans(loss_mask: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Yield (begin, stop) of each run of counted tokens."""
    place = 0
    for is_counted, run in groupby(loss_mask):
        begin, place = place, place + len(list(run))
        if is_counted:
            yield begin, place


def _text(tokenizer: PreTrainedTokenizerBase, ids: Any) -> str:
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def _cut(text: str) -> str:
    return f"{text!r:.60}"


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

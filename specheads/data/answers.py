"""What a mask counts, read back from its tokens and held against what the assistant said."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from specheads.data.shown import added_ids

OPENING_TOKENS = 32
"""Tokens before an answer that are read back: no template opens an answer with more."""


def wrong_mask(
    tokenizer: PreTrainedTokenizerBase,
    tokens: Sequence[int],
    loss_mask: Sequence[bool],
    answers: Sequence[dict[str, Any]],
    *,
    end: str,
    opening: str,
) -> str:
    """Return what is wrong with a mask, behind the name of its text; empty where nothing is.

    It must count these messages, each with the token that ends it, in their order. An answer stands
    behind `opening`, or behind an added token, as a tool's result may be closed by one.
    """
    spans = list(_spans(loss_mask))
    if not any(loss_mask):
        return "it counts nothing"
    if all(loss_mask):
        return "it counts everything"
    if len(spans) != len(answers):
        return f"it counts {len(spans)} stretches, and there are {len(answers)} answers"
    added = added_ids(tokenizer)
    for (begin, stop), answer in zip(spans, answers, strict=True):
        body, found, rest = _text(tokenizer, tokens[begin:stop]).rpartition(end)
        if not found or rest:
            return f"it counts {_cut(body + found + rest)}, which does not end with {end}"
        before = _text(tokenizer, tokens[max(0, begin - OPENING_TOKENS) : begin])
        opened = squeezed(before).endswith(squeezed(opening))
        if not opened and (not begin or tokens[begin - 1] not in added):
            return f"it counts {_cut(body)}, which stands behind {_cut(before[-40:])}"
        if not _says(tokenizer, body, answer):
            called = [call["function"]["name"] for call in answer.get("tool_calls", ())]
            says = " and calls ".join([_cut(_said(answer)), *called])
            return f"it counts {_cut(body)} for an answer that says {says}"
    return ""


def squeezed(text: str) -> str:
    """Return a text without whitespace and thinking tags, which templates add and trim."""
    return re.sub(r"\s|</?think>", "", text)


def _says(tokenizer: PreTrainedTokenizerBase, body: str, answer: dict[str, Any]) -> bool:
    said, read = squeezed(_said(answer)), squeezed(body)
    if not read.startswith(said):
        # a tokenizer may normalise what it reads
        ids: Any = tokenizer(_said(answer), add_special_tokens=False, verbose=False)["input_ids"]
        said = squeezed(_text(tokenizer, ids))
    calls = answer.get("tool_calls")
    if not calls:
        return read == said
    place = len(said)
    for call in calls:
        place = read.find(squeezed(call["function"]["name"]), place)
        if place < 0:
            return False
    return read.startswith(said)


def _said(answer: dict[str, Any]) -> str:
    return answer.get("reasoning_content", "") + answer["content"]


def _spans(loss_mask: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Yield where each stretch of counted tokens begins and stops."""
    begin = None
    for place, one in enumerate([*loss_mask, False]):
        if one and begin is None:
            begin = place
        elif not one and begin is not None:
            yield begin, place
            begin = None


def _text(tokenizer: PreTrainedTokenizerBase, ids: Any) -> str:
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def _cut(text: str) -> str:
    return f"{text!r:.60}"

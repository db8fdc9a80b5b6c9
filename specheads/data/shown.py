"""Token ids with their mask, as people can read them."""

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

OPEN, CLOSE = "⟦", "⟧"
"""Around what is counted, where there is no colour."""


def added_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the tokens that are no text: special ones, and what was added like them."""
    known: Any = tokenizer
    return {*known.all_special_ids, *known.added_tokens_decoder}


def pieces(
    tokenizer: PreTrainedTokenizerBase, tokens: Iterable[int], loss_mask: Iterable[bool]
) -> Iterator[tuple[str, bool, bool]]:
    """Yield stretches of a text: what it says, whether it is counted, whether a special token.

    Stretches are decoded on their own, so a character whose bytes are parted shows as unknown.
    """
    special = added_ids(tokenizer)
    numbered = enumerate(zip(tokens, loss_mask, strict=True))
    # special tokens stand alone, all others together with their likes
    alike = groupby(numbered, lambda one: (bool(one[1][1]), one[0] if one[1][0] in special else -1))
    for (is_counted, alone), run in alike:
        ids = [int(token) for _, (token, _) in run]
        yield str(tokenizer.decode(ids)), is_counted, alone >= 0


def marked(
    tokenizer: PreTrainedTokenizerBase, tokens: Iterable[int], loss_mask: Iterable[bool]
) -> str:
    """Return a text with brackets around every stretch that is counted."""
    out, inside = [], False
    for text, is_counted, _ in pieces(tokenizer, tokens, loss_mask):
        if is_counted != inside:
            out.append(OPEN if is_counted else CLOSE)
        out.append(text)
        inside = is_counted
    return "".join([*out, CLOSE if inside else ""])

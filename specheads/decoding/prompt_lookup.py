"""Prompt lookup: copy what followed the last few tokens at an earlier place in the text.

Source: Saxena 2023, apoorvumang/prompt-lookup-decoding. The longest suffix has 3 tokens there and
here, and 2 in transformers. Both copy from the first place, not from the most recent one.
"""

from bisect import bisect_right
from collections.abc import Iterable
from itertools import takewhile
from operator import eq

MAX_NGRAM = 3
"""Length of the longest suffix that is looked for."""


class LookupText:
    """One growing text on the host, prompt and new tokens, with an index of its n-grams."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._text = list(tokens)
        self._num_indexed = 0
        # for n-grams of 1, 2, ... tokens: the places of their last tokens, except the text's end
        self._ends: list[dict[tuple[int, ...], list[int]]] = [{} for _ in range(MAX_NGRAM)]

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        self._text += tokens

    def find(self, copied: int) -> tuple[int, list[int]]:
        """Return the length of the longest suffix that occurs earlier, and what followed it there.

        Prefer the most recent match that at least `copied` tokens follow, else the longest
        continuation. Without a match, return zero and an empty list.
        """
        last = len(self._text) - 1
        for end in range(self._num_indexed, last):
            for length in range(1, min(MAX_NGRAM, end + 1) + 1):
                ngram = tuple(self._text[end + 1 - length : end + 1])
                self._ends[length - 1].setdefault(ngram, []).append(end)
        self._num_indexed = max(last, 0)
        for length in range(min(MAX_NGRAM, last), 0, -1):
            if ends := self._ends[length - 1].get(tuple(self._text[-length:])):
                full = bisect_right(ends, last - copied)
                begin = ends[max(full - 1, 0)] + 1
                return length, self._text[begin : begin + copied]
        return 0, []


def common_prefix_length(copied: Iterable[int], decoded: Iterable[int]) -> int:
    """Return how many leading tokens are equal."""
    return sum(takewhile(bool, map(eq, copied, decoded)))

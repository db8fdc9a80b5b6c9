"""What prompt lookup is about to copy, known on the host before a step: see `prompt_lookup`."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import takewhile
from operator import eq

from specheads.decoding.prompt_lookup import MAX_NGRAM, MIN_NGRAM


class Matches:
    """A text as it grows, and where its last tokens stood in it before.

    It finds what `prompt_lookup.continuation` finds in the same text, in a time that does not grow
    with it.
    """

    def __init__(
        self, tokens: Sequence[int], *, max_ngram: int = MAX_NGRAM, min_ngram: int = MIN_NGRAM
    ) -> None:
        self.min_ngram, self._text = min_ngram, list[int]()
        # of 1, 2, ... tokens in a row, the places of their last, but for the end of the text
        self._ends: list[dict[tuple[int, ...], list[int]]] = [{} for _ in range(max_ngram)]
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in what follows."""
        for token in tokens:
            last = len(self._text) - 1
            for length, ends in enumerate(self._ends, start=1):
                if length <= len(self._text):
                    ends.setdefault(tuple(self._text[-length:]), []).append(last)
            self._text.append(token)

    def find(self, copied: int) -> tuple[int, list[int]]:
        """Return how many of the last tokens stood together before, and what followed them there.

        Of several places the most recent with so many tokens behind it, or else the one with most.
        Where there is none it is zero, and nothing.
        """
        for length in range(len(self._ends), self.min_ngram - 1, -1):
            if length > len(self._text):
                continue
            if ends := self._ends[length - 1].get(tuple(self._text[-length:])):
                whole = bisect_right(ends, len(self._text) - 1 - copied)
                begin = ends[max(whole - 1, 0)] + 1
                return length, self._text[begin : begin + copied]
        return 0, []


def agreed(copied: Iterable[int], said: Iterable[int]) -> int:
    """Return how many leading tokens of both are the same."""
    return sum(takewhile(bool, map(eq, copied, said)))

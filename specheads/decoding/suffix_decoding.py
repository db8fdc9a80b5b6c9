"""Suffix decoding: copy what followed the longest suffix of the text at other places.

A suffix automaton finds the longest suffix that occurs elsewhere, in bounded time per token. Of
several tokens that followed it the most frequent one is copied, the most recent one of equals, and
the copy ends where the frequencies make it unlikely. Places are those of the text itself, which is
prompt lookup, or also those of every text that an automaton shared by requests has read.

Source: Oliaro et al. 2024, arXiv:2411.04975, with an automaton in place of suffix trees; Saxena
2023, apoorvumang/prompt-lookup-decoding, for copies of the text itself; Blumer et al. 1985, The
smallest automaton recognizing the subwords of a text.
"""

from collections.abc import Iterable
from itertools import takewhile
from operator import eq

MAX_MATCH = 3
"""Longest match with acceptance rates of its own; longer ones count as matches of this length."""
MIN_PROBABILITY = 0.1
"""A copy ends where its tokens followed one another in less than this share of the places."""
MAX_TOKENS = 2**18
"""New tokens after which an automaton forgets all texts but the growing ones; about 200 MB."""
MAX_COUNTED = 256
"""Suffixes, longest first, that a token is counted for. A text that repeats itself has as many as
tokens, others far fewer."""


class SuffixAutomaton:
    """The substrings of texts that grow, each with its number of places and the most recent one.

    A state is a set of strings with the same places. `links` lead to the longest suffix that has
    more places.
    """

    def __init__(self) -> None:
        self.num_resets = -1
        self.reset()

    def reset(self) -> None:
        """Forget all texts."""
        self.num_resets += 1
        self.num_tokens, self.max_tokens = 0, MAX_TOKENS
        self.children: list[dict[int, int]] = [{}]
        self.links, self.lengths, self.counts, self.ends = [-1], [0], [0], [0]

    def extend(self, state: int, token: int) -> int:
        """Append a token to the text that ends at `state`; return the state of its new end."""
        self.num_tokens += 1
        if token in self.children[state]:
            end = self._split(state, token)
        else:
            end = self._add_state(self.lengths[state] + 1, {}, 0, 0, 0)
            while state >= 0 and token not in self.children[state]:
                self.children[state][token] = end
                state = self.links[state]
            if state >= 0:
                self.links[end] = self._split(state, token)
        suffix = end
        for _ in range(MAX_COUNTED):
            if not suffix:
                break
            self.counts[suffix] += 1
            self.ends[suffix] = self.num_tokens
            suffix = self.links[suffix]
        return end

    def find_match(self, state: int) -> int:
        """Return the state of the longest suffix after which a token is known, zero for none."""
        while state > 0 and not self.children[state]:
            state = self.links[state]
        return state

    def predict(self, state: int, num_tokens: int) -> list[int]:
        """Return the tokens that followed most often, after a match, while they are likely."""
        tokens, probability = [], 1.0
        # where a text ends, a shorter suffix continues
        while len(tokens) < num_tokens and (state := self.find_match(state)) > 0:
            children, counts, ends = self.children[state], self.counts, self.ends
            token = max(children, key=lambda key: (counts[children[key]], ends[children[key]]))
            state = children[token]
            probability *= counts[state] / sum(counts[child] for child in children.values())
            if probability < MIN_PROBABILITY:
                break
            tokens.append(token)
        return tokens

    def _add_state(
        self, length: int, children: dict[int, int], link: int, count: int, end: int
    ) -> int:
        self.children.append(children)
        self.links.append(link)
        self.lengths.append(length)
        self.counts.append(count)
        self.ends.append(end)
        return len(self.links) - 1

    def _split(self, state: int, token: int) -> int:
        """Return the state of the longest string of `state` with the token, and no longer one."""
        child, length = self.children[state][token], self.lengths[state] + 1
        if self.lengths[child] == length:
            return child
        copy = self._add_state(
            length,
            self.children[child].copy(),
            self.links[child],
            self.counts[child],
            self.ends[child],
        )
        self.links[child] = copy
        while state >= 0 and self.children[state].get(token) == child:
            self.children[state][token] = copy
            state = self.links[state]
        return copy


class LookupText:
    """One growing text on the host, prompt and new tokens, in its own or in a shared automaton.

    The automaton reads it when it is looked up.
    """

    def __init__(self, tokens: Iterable[int] = (), memory: SuffixAutomaton | None = None) -> None:
        self._text = list(tokens)
        self._automaton = SuffixAutomaton() if memory is None else memory
        self._num_read = self._state = 0
        self._num_resets = self._automaton.num_resets

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        self._text += tokens

    def find(self, copied: int) -> tuple[int, list[int]]:
        """Return the length of the match, at most `MAX_MATCH`, and up to `copied` tokens after it.

        Without a match, return zero and an empty list.
        """
        automaton = self._automaton
        if automaton.num_tokens > automaton.max_tokens:
            automaton.reset()
        if automaton.num_resets != self._num_resets:
            self._num_read, self._state = 0, 0
            self._num_resets = automaton.num_resets
            # read again: it is not new, and would make the automaton forget at every step
            automaton.max_tokens += len(self._text)
        for token in self._text[self._num_read :]:
            self._state = automaton.extend(self._state, token)
        self._num_read = len(self._text)
        tokens = automaton.predict(self._state, copied)
        length = automaton.lengths[automaton.find_match(self._state)] if tokens else 0
        return min(length, MAX_MATCH), tokens


def common_prefix_length(copied: Iterable[int], decoded: Iterable[int]) -> int:
    """Return how many leading tokens are equal."""
    return sum(takewhile(bool, map(eq, copied, decoded)))

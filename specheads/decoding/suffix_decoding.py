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
from dataclasses import dataclass, field, replace
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


@dataclass(slots=True)
class SuffixState:
    """A set of strings with the same places."""

    length: int = 0
    """Length of the longest of them."""
    link: int = 0
    """Index of the state of the longest suffix that has more places."""
    children: dict[int, int] = field(default_factory=dict)
    """Index of the state after each token that has followed."""
    count: int = 0
    """Number of places."""
    end: int = 0
    """The most recent place."""


class SuffixAutomaton:
    """The substrings of texts that grow, each with its number of places and the most recent one."""

    def __init__(self) -> None:
        self.num_resets = -1
        self.reset()

    def reset(self) -> None:
        """Forget all texts."""
        self.num_resets += 1
        self.num_tokens, self.max_tokens = 0, MAX_TOKENS
        self.states = [SuffixState(link=-1)]

    def extend(self, index: int, token: int) -> int:
        """Append a token to the text that ends at state `index`; return that of its new end."""
        states = self.states
        self.num_tokens += 1
        if token in states[index].children:
            end = self._split(index, token)
        else:
            end = len(states)
            states.append(SuffixState(states[index].length + 1))
            while index >= 0 and token not in states[index].children:
                states[index].children[token] = end
                index = states[index].link
            if index >= 0:
                states[end].link = self._split(index, token)
        suffix = end
        for _ in range(MAX_COUNTED):
            if not suffix:
                break
            state = states[suffix]
            state.count += 1
            state.end = self.num_tokens
            suffix = state.link
        return end

    def find_match(self, index: int) -> int:
        """Return the state of the longest suffix after which a token is known, zero for none."""
        while index > 0 and not self.states[index].children:
            index = self.states[index].link
        return index

    def predict(self, index: int, num_tokens: int) -> list[int]:
        """Return the tokens that followed most often, after a match, while they are likely."""
        tokens, probability = [], 1.0
        # where a text ends, a shorter suffix continues
        while len(tokens) < num_tokens and (index := self.find_match(index)) > 0:
            children = self.states[index].children
            states = {token: self.states[child] for token, child in children.items()}
            token = max(states, key=lambda key: (states[key].count, states[key].end))
            index = children[token]
            probability *= states[token].count / sum(state.count for state in states.values())
            if probability < MIN_PROBABILITY:
                break
            tokens.append(token)
        return tokens

    def _split(self, index: int, token: int) -> int:
        """Return the state of the longest string of a state with the token, and no longer one."""
        states, child = self.states, self.states[index].children[token]
        old, length = states[child], states[index].length + 1
        if old.length == length:
            return child
        copy = len(states)
        states.append(replace(old, length=length, children=old.children.copy()))
        old.link = copy
        while index >= 0 and states[index].children.get(token) == child:
            states[index].children[token] = copy
            index = states[index].link
        return copy


class LookupText:
    """One growing text on the host, prompt and new tokens, in its own or in a shared automaton.

    The automaton reads it when it is looked up.
    """

    def __init__(self, tokens: Iterable[int] = (), memory: SuffixAutomaton | None = None) -> None:
        self._text = list(tokens)
        self._automaton = SuffixAutomaton() if memory is None else memory
        self._num_read = self._end = 0
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
            self._num_read, self._end, self._num_resets = 0, 0, automaton.num_resets
            # read again: it is not new, and would make the automaton forget at every step
            automaton.max_tokens += len(self._text)
        for token in self._text[self._num_read :]:
            self._end = automaton.extend(self._end, token)
        self._num_read = len(self._text)
        tokens = automaton.predict(self._end, copied)
        length = automaton.states[automaton.find_match(self._end)].length if tokens else 0
        return min(length, MAX_MATCH), tokens


def common_prefix_length(copied: Iterable[int], decoded: Iterable[int]) -> int:
    """Return how many leading tokens are equal."""
    return sum(takewhile(bool, map(eq, copied, decoded)))

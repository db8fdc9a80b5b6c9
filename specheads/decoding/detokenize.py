"""From tokens to text, one token at a time, and what of both is certain already."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import cast

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

_CONTEXT = 5
"""Tokens decoded before a new one: its text may depend on what it follows, and it may hold the
end of a character that begins up to three tokens earlier."""

_BROKEN = "\N{REPLACEMENT CHARACTER}"
"""What decoders give for bytes that are no character, or none yet."""

_MOST_BROKEN = 3
"""Number of these that an incomplete character can be decoded to: one a byte."""

_BYTES = {letter: byte for byte, letter in bytes_to_unicode().items()}
"""The byte that each letter of a byte-level vocabulary stands for."""


class TextStream:
    """A text that is being written, and where it stops.

    A character may be cut by a token boundary, and so may a stop string. So the newest text may
    have to wait, or to be taken back: not what `settled` counts. The prompt, which it
    continues, is no part of it, and it ends before the first stop string that is complete.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt: list[int], stop: tuple[str, ...] = ()
    ) -> None:
        self.tokenizer, self.stop = tokenizer, stop
        self.written, self.is_over = "", False
        self._longest = max(map(len, stop), default=0)
        # where the text of each token ends at least
        self._ends: list[int] = []
        self._window = prompt[-_CONTEXT:]
        # characters of the window that were written, or belong to the prompt
        self._shown = len(self._decode(self._window)[0])

    @property
    def num_tokens(self) -> int:
        """Tokens read."""
        return len(self._ends)

    def push(self, token: int) -> None:
        """Read one token more, which may bring no text, or some, or the end; then no other may."""
        self._window.append(token)
        whole, held = self._decode(self._window)
        new = whole[self._shown :]
        self._ends.append(len(self.written) + len(new) + bool(held))
        self._write(new)
        self._shown = len(whole)
        if len(self._window) > 2 * _CONTEXT:
            recent = self._window[-_CONTEXT:]
            whole, waiting = self._decode(recent)
            # not where it would cut what waits
            if waiting == held:
                self._window, self._shown = recent, len(whole)

    def close(self) -> None:
        """End the text: nothing waits any more."""
        if not self.is_over:
            self._write(self._decode(self._window)[1])
            self.is_over = True

    def settled(self) -> tuple[int, int]:
        """Return how many tokens and characters stand, whatever follows.

        A token stands once all of its text does.
        """
        length = len(self.written) - (0 if self.is_over else self._may_stop())
        return bisect_right(self._ends, length), length

    def _decode(self, tokens: list[int]) -> tuple[str, str]:
        """Return their text, and apart from it what may be an incomplete character."""
        text = self.tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        whole = cast(str, text)
        held = min(len(whole) - len(whole.rstrip(_BROKEN)), _MOST_BROKEN)
        return whole[: len(whole) - held], whole[len(whole) - held :]

    def _write(self, new: str) -> None:
        # a stop string that ends in the new text may have begun in the old
        first = max(len(self.written) - self._longest + 1, 0)
        self.written += new
        found = [self.written.find(stop, first) for stop in self.stop]
        if places := [place for place in found if place >= 0]:
            self.written = self.written[: min(places)]
            self.is_over = True

    def _may_stop(self) -> int:
        """Return how many of the last characters may be the beginning of a stop string."""
        for length in range(min(self._longest - 1, len(self.written)), 0, -1):
            if any(stop.startswith(self.written[-length:]) for stop in self.stop):
                return length
        return 0


def token_text(tokenizer: PreTrainedTokenizerBase, before: Sequence[int], token: int) -> str:
    r"""Return what one token adds to the text before it, for people to look at.

    A character in pieces comes with its last piece. A token that adds nothing, such as the other
    pieces and special tokens, is told by name: `⟨\xe2\x82⟩`, `⟨<|endoftext|>⟩`.
    """
    text = TextStream(tokenizer, list(before))
    text.push(token)
    return text.written or f"⟨{_name(tokenizer, token)}⟩"


def _name(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """Return what the vocabulary calls a token, byte by byte where it is no text."""
    name = str(tokenizer.convert_ids_to_tokens(token))
    try:
        raw = bytes(_BYTES[letter] for letter in name)
    except KeyError:
        # no name of a byte-level vocabulary
        return name
    return raw.decode(errors="backslashreplace")

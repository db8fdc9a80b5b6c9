"""Detokenise one token at a time, and tell final text from text that may still change."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import cast

from transformers import PreTrainedTokenizerBase

_CONTEXT = 5
"""Tokens decoded before a new one: its text may depend on the tokens before it, and a character may
begin up to three tokens earlier."""
_BROKEN = "\N{REPLACEMENT CHARACTER}"
"""What decoders return for bytes that are not a complete character."""
_MOST_BROKEN = 3
"""How many of them an incomplete character can be decoded to: one for each byte."""


class TextStream:
    """Generated text that grows token by token, and ends before the first stop string.

    A token boundary can split a character or a stop string, so the newest text may have to wait or
    be removed again. `settled` counts what is final.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt: list[int], stop: tuple[str, ...] = ()
    ) -> None:
        self.tokenizer, self.stop = tokenizer, stop
        self.written, self.is_over = "", False
        self._longest = max(map(len, stop), default=0)
        # the smallest length at which the text of each token is complete
        self._ends: list[int] = []
        self._window = prompt[-_CONTEXT:]
        # characters of the window that were written or are part of the prompt
        self._shown = len(self._decode(self._window)[0])

    @property
    def num_tokens(self) -> int:
        """Number of tokens read."""
        return len(self._ends)

    def push(self, token: int) -> None:
        """Read one token. Do not call this after the text has ended."""
        self._window.append(token)
        whole, held = self._decode(self._window)
        new = whole[self._shown :]
        self._ends.append(len(self.written) + len(new) + bool(held))
        self._write(new)
        self._shown = len(whole)
        if len(self._window) > 2 * _CONTEXT:
            recent = self._window[-_CONTEXT:]
            whole, waiting = self._decode(recent)
            # do not split an incomplete character
            if waiting == held:
                self._window, self._shown = recent, len(whole)

    def close(self) -> None:
        """End the text and write what was waiting."""
        if not self.is_over:
            self._write(self._decode(self._window)[1])
            self.is_over = True

    def settled(self) -> tuple[int, int]:
        """Return how many tokens and characters are final, whatever follows."""
        length = len(self.written) - (0 if self.is_over else self._may_stop())
        return bisect_right(self._ends, length), length

    def _decode(self, tokens: list[int]) -> tuple[str, str]:
        """Return the text of tokens, and separately what may be an incomplete character."""
        text = self.tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        whole = cast(str, text)
        held = min(len(whole) - len(whole.rstrip(_BROKEN)), _MOST_BROKEN)
        return whole[: len(whole) - held], whole[len(whole) - held :]

    def _write(self, new: str) -> None:
        # a stop string may begin in the old text and end in the new text
        first = max(len(self.written) - self._longest + 1, 0)
        self.written += new
        found = [self.written.find(stop, first) for stop in self.stop]
        if places := [place for place in found if place >= 0]:
            self.written = self.written[: min(places)]
            self.is_over = True

    def _may_stop(self) -> int:
        """Return how many of the last characters could begin a stop string."""
        for length in range(min(self._longest - 1, len(self.written)), 0, -1):
            if any(stop.startswith(self.written[-length:]) for stop in self.stop):
                return length
        return 0


def token_text(tokenizer: PreTrainedTokenizerBase, before: Sequence[int], token: int) -> str:
    """Return the text that one token adds, for display.

    The last token of a split character adds that character. A token that adds no text, such as the
    other parts and special tokens, gets its name in the vocabulary: `⟨<|endoftext|>⟩`.
    """
    text = TextStream(tokenizer, list(before))
    text.push(token)
    return text.written or f"⟨{tokenizer.convert_ids_to_tokens(token)}⟩"

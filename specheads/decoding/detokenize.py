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
_MAX_BROKEN = 3
"""How many of them an incomplete character can be decoded to: one for each byte."""


class TextStream:
    """Generated text that grows token by token, and ends before the first stop string.

    A token boundary can split a character or a stop string, so the newest text may have to wait or
    be removed again. `count_final` counts what is final.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt: list[int], stop: tuple[str, ...] = ()
    ) -> None:
        self.tokenizer, self.stop = tokenizer, stop
        self.written, self.is_over = "", False
        self._longest_stop = max(map(len, stop), default=0)
        # the smallest length at which the text of each token is complete
        self._ends: list[int] = []
        self._window = prompt[-_CONTEXT:]
        # characters of the window that were written or are part of the prompt
        self._num_written = len(self._decode(self._window)[0])

    @property
    def num_tokens(self) -> int:
        """Number of tokens read."""
        return len(self._ends)

    def push(self, token: int) -> None:
        """Read one token. Do not call this after the text has ended."""
        self._window.append(token)
        text, incomplete = self._decode(self._window)
        new_text = text[self._num_written :]
        self._ends.append(len(self.written) + len(new_text) + bool(incomplete))
        self._write(new_text)
        self._num_written = len(text)
        if len(self._window) > 2 * _CONTEXT:
            window = self._window[-_CONTEXT:]
            text, window_incomplete = self._decode(window)
            # do not split an incomplete character
            if window_incomplete == incomplete:
                self._window, self._num_written = window, len(text)

    def close(self) -> None:
        """End the text and write what was waiting."""
        if not self.is_over:
            self._write(self._decode(self._window)[1])
            self.is_over = True

    def count_final(self) -> tuple[int, int]:
        """Return how many tokens and characters are final, whatever follows."""
        length = len(self.written) - (0 if self.is_over else self._pending_stop())
        return bisect_right(self._ends, length), length

    def _decode(self, tokens: list[int]) -> tuple[str, str]:
        """Return the text of tokens, and separately what may be an incomplete character."""
        text = self.tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        text = cast(str, text)
        end = len(text) - min(len(text) - len(text.rstrip(_BROKEN)), _MAX_BROKEN)
        return text[:end], text[end:]

    def _write(self, new_text: str) -> None:
        # a stop string may begin in the old text and end in the new text
        first = max(len(self.written) - self._longest_stop + 1, 0)
        self.written += new_text
        starts = [self.written.find(stop, first) for stop in self.stop]
        if any(start >= 0 for start in starts):
            self.written = self.written[: min(start for start in starts if start >= 0)]
            self.is_over = True

    def _pending_stop(self) -> int:
        """Return how many of the last characters could begin a stop string."""
        for length in range(min(self._longest_stop - 1, len(self.written)), 0, -1):
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

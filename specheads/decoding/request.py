"""Requests, their checks, and the streams that return their output."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from specheads.core.errors import InputError, require_integer
from specheads.decoding.detokenize import TextStream
from specheads.decoding.loop import DecodingStep
from specheads.decoding.sampling import GREEDY, Sampling


def token_ids(given: Any, name: str) -> list[int]:
    """Return token ids as a list of ints; `name` is used in error messages."""
    given = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        raise InputError(
            f"{name} must be a list of token ids, got {type(given).__name__} {given!r:.60}; "
            "tokenise text with base.tokenizer(text).input_ids, and give a list for each prompt"
        )
    return [require_integer(one, f"token {place} of {name}") for place, one in enumerate(given)]


FinishReason = Literal["eos", "stop", "length", "context", "cancelled", "failed"]
"""An end-of-text token, a stop string, the request's limit, a full context, `cancel`, or an error
in a step of this request."""
SPREAD, SHORT = 1.5, 64
"""Largest ratio of the longest to the shortest prompt that are read together, and the length that a
shorter one counts as."""
FULL, FULL_SPREAD = 512, 1.1
"""Number of tokens from which on the time of a forward is proportional to its tokens with padding,
and the largest ratio of prompt lengths in such a forward."""


@dataclass(slots=True, kw_only=True)
class Request:
    """A prompt and how to continue it."""

    prompt: list[int]
    """Token ids: a list, tuple, range, array or tensor of integers."""
    max_new_tokens: int = 64
    """Limit of new tokens; zero ends at once."""
    sampling: Sampling = GREEDY
    stop: tuple[str, ...] = ()
    """Stop strings: the text ends before the first complete one. A special token acts as one of
    `eos_ids`."""
    eos_ids: tuple[int, ...] | None = None
    """Tokens that end the text and are its last token; None uses the base's."""

    def __post_init__(self) -> None:
        self.prompt = token_ids(self.prompt, "a prompt")
        if not self.prompt:
            raise InputError("a prompt needs at least one token, got none")
        self.max_new_tokens = require_integer(self.max_new_tokens, "max_new_tokens")
        if not isinstance(self.sampling, Sampling):
            raise InputError(f"sampling must be a Sampling(...), got {self.sampling!r:.80}")
        if not isinstance(self.stop, tuple | list) or not all(
            isinstance(one, str) and one for one in self.stop
        ):
            raise InputError(f"stop must be a tuple of non-empty strings, got {self.stop!r:.80}")
        self.stop = tuple(self.stop)
        if self.eos_ids is not None:
            self.eos_ids = tuple(token_ids(self.eos_ids, "eos_ids"))


class Stream:
    """Output of one request. Iterating over it steps the engine, for all requests.

    `limit` is the number of new tokens that request and context allow, `num_blocks` the number of
    blocks of the pool that it may need.
    """

    def __init__(self, request: Request, engine: Any, limit: int, num_blocks: int) -> None:
        self.request, self.num_blocks, self._engine = request, num_blocks, engine
        self.steps: list[DecodingStep] = []
        """Steps of this request, without the prefill."""
        self.finish_reason: FinishReason | None = None
        """None while it is not done."""
        self._limit, base = limit, engine.base
        self._tokenizer = base.tokenizer
        self._stop, special = split_stop(request.stop, base.tokenizer)
        self._eos = {*(base.eos_ids if request.eos_ids is None else request.eos_ids), *special}
        self._text: TextStream | None = None
        self._tokens: list[int] = []
        self._yielded = 0, 0
        self._limit_reason: FinishReason = (
            "length" if limit == request.max_new_tokens else "context"
        )
        if not limit:
            self.finish_reason = self._limit_reason

    @property
    def tokens(self) -> list[int]:
        """Final new tokens, with an end-of-text token and without any part of a stop string."""
        # only a stop string can remove tokens
        text = self._read() if self._stop else None
        if text is None or self.finish_reason not in (None, "stop"):
            return self._tokens.copy()
        return self._tokens[: text.settled()[0]]

    @property
    def length(self) -> int:
        """Length of prompt and output, with tokens that a stop string may remove."""
        return len(self.request.prompt) + len(self._tokens)

    @property
    def all_tokens(self) -> list[int]:
        """Prompt and output, with tokens that a stop string may remove."""
        return self.request.prompt + self._tokens

    @property
    def room(self) -> int:
        """Largest number of further tokens."""
        return self._limit - len(self._tokens)

    @property
    def text(self) -> str:
        """Final text, without a stop string; empty if the base has no tokenizer."""
        text = self._read()
        return "" if text is None else text.written[: text.settled()[1]]

    def cancel(self) -> None:
        """Remove the request from the engine and release its memory."""
        self._engine.cancel(self)

    def __iter__(self) -> Iterator[tuple[list[int], str]]:
        """Yield new final tokens and their text, each once, after as many steps as needed."""
        while True:
            tokens, characters = self._yielded
            new, written = self.tokens[tokens:], self.text[characters:]
            if new or written:
                self._yielded = tokens + len(new), characters + len(written)
                yield new, written
            elif self.finish_reason is not None:
                return
            else:
                self._engine.step()

    def take(self, tokens: list[int]) -> None:
        """Append decoded tokens up to the end of the request."""
        for token in tokens:
            self._tokens.append(token)
            if token in self._eos:
                self.finish_reason = "eos"
            elif self._stop and (text := self._read()) and text.is_over:
                self.finish_reason = "stop"
            elif len(self._tokens) == self._limit:
                self.finish_reason = self._limit_reason
            if self.finish_reason is not None:
                break

    def _read(self) -> TextStream | None:
        """Return the text of all tokens except an end-of-text token."""
        if self._tokenizer is None:
            return None
        if self._text is None:
            self._text = TextStream(self._tokenizer, self.request.prompt, self._stop)
        end = len(self._tokens) - (self.finish_reason == "eos")
        for token in self._tokens[self._text.num_tokens : end]:
            self._text.push(token)
        if self.finish_reason is not None:
            self._text.close()
        return self._text


def split_stop(stop: tuple[str, ...], tokenizer: Any) -> tuple[tuple[str, ...], list[int]]:
    """Return the stop strings that text can have, and the ids of those that are special tokens.

    Raises:
        InputError: One has a special token among other characters, which text leaves out.
    """
    if not stop:
        return (), []
    added = tokenizer.added_tokens_decoder.items()
    special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    special |= {str(token): number for number, token in added if token.special}
    plain = tuple(one for one in stop if one not in special)
    for one in plain:
        if any(token in one for token in special):
            raise InputError(
                "a stop string must be a special token or have none, because text leaves them out, "
                f"got {one!r:.80}; name the token alone"
            )
    return plain, [special[one] for one in stop if one in special]


def alike(lengths: list[int]) -> list[list[int]]:
    """Group the indices of prompts by length, each group in order of arrival.

    A few prompts are read together even if their lengths differ; those that fill a forward are not.
    """
    lists: list[list[int]] = []
    shortest = tokens = 0
    for place in sorted(range(len(lengths)), key=lengths.__getitem__):
        length = lengths[place]
        most = SPREAD * max(shortest, SHORT) if tokens < FULL else FULL_SPREAD * shortest
        if not lists or length > most:
            lists.append([])
            shortest, tokens = length, 0
        lists[-1].append(place)
        tokens += length
    return [sorted(one) for one in lists]

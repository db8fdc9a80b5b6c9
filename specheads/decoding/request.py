"""Requests, their checks, and the streams that return their output."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from specheads.base.model import FrozenBase
from specheads.core.errors import InputError, whole
from specheads.decoding.detokenize import TextStream
from specheads.decoding.loop import DecodingStep
from specheads.decoding.sampling import GREEDY, Sampling


def token_ids(given: Any, name: str) -> list[int]:
    """Return token ids as a list of ints; `name` is used in error messages."""
    ids = _listed(given, name, "base.tokenizer(text).input_ids")
    for place, one in enumerate(ids):
        if type(one) is not int or one < 0:
            if getattr(one, "ndim", None) or (isinstance(one, Sequence) and not _is_text(one)):
                raise InputError(
                    f"{name} must be one list of token ids, got a list at place {place}; give "
                    "several prompts to generate, or a request for each"
                )
            ids[place] = whole(one, f"token {place} of {name}")
    return ids


def read_prompts(base: FrozenBase, given: Any) -> list[list[int]]:
    """Return prompts as lists of token ids; refuse the first id outside the vocabulary."""
    rows = _listed(given, "prompts", "[base.tokenizer(text).input_ids]")
    if rows and not _is_text(rows[0]) and not hasattr(rows[0], "__len__"):
        raise InputError(
            f"prompts must be a list of prompts, got one with {rows[0]!r:.80} in place of a list; "
            "for a single prompt of token ids give [prompt]"
        )
    prompts = [token_ids(row, f"prompt {number}") for number, row in enumerate(rows)]
    for number, prompt in enumerate(prompts):
        refuse_unknown(base, prompt, f"prompt {number}")
    return prompts


def refuse_unknown(base: FrozenBase, ids: list[int], name: str) -> None:
    """Refuse token ids outside the vocabulary."""
    size = len(base.embedding)
    if ids and max(ids) >= size:
        place = next(place for place, one in enumerate(ids) if one >= size)
        raise InputError(
            f"token ids must be below the base's vocabulary size {size}, got {ids[place]} at place "
            f"{place} of {name}; use this base's own tokenizer"
        )


def _is_text(given: Any) -> bool:
    return isinstance(given, str | bytes | bytearray)


def _listed(given: Any, name: str, remedy: str) -> list[Any]:
    if hasattr(given, "tolist"):
        given = given.tolist()
    if _is_text(given) or not isinstance(given, Sequence):
        raise InputError(
            f"{name} must be a list of token ids, got {type(given).__name__} {given!r:.60}; "
            f"tokenise text first: {remedy}"
        )
    return list(given)


FinishReason = Literal["eos", "stop", "length", "context", "cancelled", "failed"]
"""An end-of-text token, a stop string, the request's limit, a full context, `cancel`, or an error
in a step of this request."""

SPREAD, SHORT = 1.5, 64
"""Largest ratio of the longest to the shortest prompt that are read together, and the length that a
shorter one counts as."""

FULL, FULL_SPREAD = 512, 1.1
"""Number of tokens from which on the time of a forward is proportional to its tokens with padding,
and the largest ratio of prompt lengths in such a forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt and how to continue it."""

    prompt: list[int]
    """Token ids: a list, tuple, range, array or tensor of integers."""

    max_new_tokens: int = 64
    """Limit of new tokens; zero ends at once."""

    sampling: Sampling = GREEDY

    stop: tuple[str, ...] = ()
    """Stop strings: the text ends before the first complete one."""

    eos_ids: tuple[int, ...] | None = None
    """Tokens that end the text and are its last token; None uses the base's."""

    def __post_init__(self) -> None:
        keep = partial(object.__setattr__, self)
        keep("prompt", token_ids(self.prompt, "a prompt"))
        if not self.prompt:
            raise InputError("a prompt needs at least one token, got none")
        keep("max_new_tokens", whole(self.max_new_tokens, "max_new_tokens"))
        if not isinstance(self.sampling, Sampling):
            raise InputError(f"sampling must be a Sampling(...), got {self.sampling!r:.80}")
        if not isinstance(self.stop, tuple | list) or not all(
            isinstance(one, str) for one in self.stop
        ):
            raise InputError(f"stop must be a tuple of strings, got {self.stop!r:.80}")
        if "" in self.stop:
            raise InputError("a stop string needs at least one character; leave empty ones out")
        keep("stop", tuple(self.stop))
        if self.eos_ids is not None:
            keep("eos_ids", tuple(token_ids(self.eos_ids, "eos_ids")))


class Piece(NamedTuple):
    """New tokens and text of a stream."""

    tokens: list[int]
    text: str


class Stream:
    """Output of one request. Iterating over it steps the engine, for all requests.

    Args:
        number: Its index among all submitted requests, which its steps have as their row.
        limit: New tokens that request and context allow.
        num_blocks: Blocks of the pool that it may need.
        advance: Steps the engine.
        leave: Removes a stream from the engine.
    """

    def __init__(
        self,
        request: Request,
        base: FrozenBase,
        number: int,
        limit: int,
        num_blocks: int,
        *,
        advance: Callable[[], object],
        leave: Callable[["Stream"], None],
    ) -> None:
        self.request, self.number, self.num_blocks = request, number, num_blocks
        self.steps: list[DecodingStep] = []
        """Steps of this request, without the prefill."""
        self.finish_reason: FinishReason | None = None
        """None while it is not done."""
        self._limit, self._advance, self._leave = limit, advance, leave
        self._eos = base.eos_ids if request.eos_ids is None else request.eos_ids
        self._tokenizer = base.tokenizer
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
        return self._tokens[: self._num_tokens()]

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
        return self._text_from(0)

    def cancel(self) -> None:
        """Remove the request from the engine and release its memory."""
        self._leave(self)

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        """Return new final tokens and text, after as many steps as needed."""
        while True:
            tokens, characters = self._yielded
            piece = Piece(self._tokens[tokens : self._num_tokens()], self._text_from(characters))
            if piece.tokens or piece.text:
                self._yielded = tokens + len(piece.tokens), characters + len(piece.text)
                return piece
            if self.finish_reason is not None:
                raise StopIteration
            self._advance()

    def take(self, tokens: list[int]) -> None:
        """Append decoded tokens up to the end of the request."""
        for token in tokens:
            self._tokens.append(token)
            self.finish_reason = self._reason(token)
            if self.finish_reason is not None:
                break

    def _reason(self, newest: int) -> FinishReason | None:
        """Return why the request ends with its newest token, or None."""
        if newest in self._eos:
            return "eos"
        if self.request.stop and (text := self._read()) and text.is_over:
            return "stop"
        return self._limit_reason if len(self._tokens) == self._limit else None

    def _num_tokens(self) -> int:
        """Return the number of final tokens; only a stop string can remove tokens."""
        text = self._read() if self.request.stop else None
        if text is None or self.finish_reason not in (None, "stop"):
            return len(self._tokens)
        return text.settled()[0]

    def _text_from(self, first: int) -> str:
        text = self._read()
        return "" if text is None else text.written[first : text.settled()[1]]

    def _read(self) -> TextStream | None:
        """Return the text of all tokens except an end-of-text token."""
        if self._tokenizer is None:
            return None
        if self._text is None:
            self._text = TextStream(self._tokenizer, self.request.prompt, self.request.stop)
        end = len(self._tokens) - (self.finish_reason == "eos")
        for token in self._tokens[self._text.num_tokens : end]:
            self._text.push(token)
        if self.finish_reason is not None:
            self._text.close()
        return self._text


def alike(lengths: list[int]) -> list[list[int]]:
    """Group the indices of prompts by length, each group in order of arrival.

    Prompts that are read together are padded to the longest one. A few prompts are read together
    even if their lengths differ; prompts that fill a forward are not.
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

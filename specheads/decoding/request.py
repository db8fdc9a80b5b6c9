"""Requests and their checks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specheads.core.errors import InputError, require_integer
from specheads.decoding.sampling import GREEDY, Sampling


def token_ids(tokens: Any, name: str) -> list[int]:
    """Return token ids as a list of ints; `name` is used in error messages."""
    tokens = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    if isinstance(tokens, str | bytes) or not isinstance(tokens, Sequence):
        raise InputError(
            f"{name} must be a list of token ids, got {type(tokens).__name__} {tokens!r:.60}; "
            "tokenise text with base.tokenizer(text).input_ids, and give a list for each prompt"
        )
    return [
        require_integer(token, f"token {index} of {name}") for index, token in enumerate(tokens)
    ]


MAX_RATIO, MIN_LENGTH = 1.5, 64
"""Largest ratio of the longest to the shortest prompt that are read together, and the length that a
shorter one counts as."""
FULL_FORWARD, FULL_MAX_RATIO = 512, 1.1
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
            isinstance(string, str) and string for string in self.stop
        ):
            raise InputError(f"stop must be a tuple of non-empty strings, got {self.stop!r:.80}")
        self.stop = tuple(self.stop)
        if self.eos_ids is not None:
            self.eos_ids = tuple(token_ids(self.eos_ids, "eos_ids"))


def split_stop(stop: tuple[str, ...], tokenizer: Any) -> tuple[tuple[str, ...], list[int]]:
    """Return the stop strings that text can have, and the ids of those that are special tokens.

    Raises:
        InputError: One has a special token among other characters, which text leaves out.
    """
    if not stop:
        return (), []
    added = tokenizer.added_tokens_decoder.items()
    special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    special |= {str(token): token_id for token_id, token in added if token.special}
    strings = tuple(string for string in stop if string not in special)
    for string in strings:
        if any(token in string for token in special):
            raise InputError(
                "a stop string must be a special token or have none, because text leaves them out, "
                f"got {string!r:.80}; name the token alone"
            )
    return strings, [special[string] for string in stop if string in special]


def group_by_length(lengths: list[int]) -> list[list[int]]:
    """Group the indices of prompts by length, each group in order of arrival.

    A few prompts are read together even if their lengths differ; those that fill a forward are not.
    """
    groups: list[list[int]] = []
    shortest = num_tokens = 0
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        length = lengths[index]
        if num_tokens < FULL_FORWARD:
            longest = MAX_RATIO * max(shortest, MIN_LENGTH)
        else:
            longest = FULL_MAX_RATIO * shortest
        if not groups or length > longest:
            groups.append([])
            shortest, num_tokens = length, 0
        groups[-1].append(index)
        num_tokens += length
    return [sorted(group) for group in groups]

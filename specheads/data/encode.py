"""Texts to token ids: by the tokenizer, or by a faster one that has shown to agree with it."""

import json
import random
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from specheads.core.errors import InputError

try:
    import fastokens
except ImportError:
    # it has no wheel for some machines
    fastokens = None

COMPARED = 32
"""First documents of a corpus that both tokenizers read, and then one in a hundred."""


class DisagreementError(Exception):
    """The faster tokenizer read a text differently, or not at all."""


class Encoder:
    """Reads texts by the tokenizer, or by fastokens and tries that against it all the while.

    fastokens reads code some twenty times as fast, but it is another program: what it says of all
    added tokens, of the first texts and of one text in a hundred is held against the tokenizer.

    Raises:
        DisagreementError: The two differ, here or on a call: start anew with `is_fast=False`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, is_fast: bool = True) -> None:
        self._tokenizer = tokenizer
        self._fast = _fast(tokenizer) if is_fast else None
        self._num_read = 0
        self._random = random.Random(0)

    def __call__(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the token ids of each text, with what the tokenizer puts around every text."""
        if self._fast is None:
            return _plain(self._tokenizer, texts)
        found = _read(self._fast, texts)
        tried = [
            place
            for place in range(len(texts))
            if self._num_read + place < COMPARED or self._random.random() < 0.01
        ]
        self._num_read += len(texts)
        _compare(self._tokenizer, [(texts[place], found[place]) for place in tried])
        return found


def _fast(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return fastokens' own tokenizer where there is one; its added tokens are tried."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if fastokens is None or backend is None:
        return None
    # of these two the last call decides, and documents are whole
    rules = json.loads(backend.to_str()) | {"truncation": None, "padding": None}
    added = list(cast(Any, tokenizer).get_added_vocab())
    tried = ["", " ", *added, *(f"a{token}b {token} \n{token}1" for token in added), "".join(added)]
    try:
        fast = fastokens.Tokenizer.from_json_str(json.dumps(rules))
    # whatever a stranger's rules meet there
    except Exception as error:
        raise DisagreementError(str(error)) from error
    _compare(tokenizer, list(zip(tried, _read(fast, tried), strict=True)))
    return fast


def _read(fast: Any, texts: Sequence[str]) -> list[np.ndarray]:
    try:
        ids, ends = fast.encode_batch_flat(list(texts), add_special_tokens=True)
    except Exception as error:
        raise DisagreementError(str(error)) from error
    # every id is below 2**31
    values = np.frombuffer(ids, np.int32)
    return np.split(values, np.frombuffer(ends, np.int64)[1:-1])


def _compare(tokenizer: PreTrainedTokenizerBase, read: Sequence[tuple[str, np.ndarray]]) -> None:
    wanted_ids = _plain(tokenizer, [text for text, _ in read])
    for (text, ids), wanted in zip(read, wanted_ids, strict=True):
        if not np.array_equal(wanted, ids):
            raise DisagreementError(f"{text!r:.60}")


def _plain(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[np.ndarray]:
    if not texts:
        return []
    return [np.asarray(ids, np.int32) for ids in token_ids(tokenizer, list(texts))]


def token_ids(
    tokenizer: PreTrainedTokenizerBase, text: str | list[str], *, add_special_tokens: bool = True
) -> Any:
    """Return the token ids of a text, or of each of several."""
    return encoding(tokenizer, text, add_special_tokens=add_special_tokens)["input_ids"]


def encoding(tokenizer: PreTrainedTokenizerBase, text: str | list[str], **choices: Any) -> Any:
    """Return what a tokenizer makes of a text, or of several; `choices` are the tokenizer's own.

    Raises:
        ValueError: It fails on the text.
    """
    try:
        # verbose: whether a text fits the base's context is no matter of who reads it
        return tokenizer(text, return_attention_mask=False, verbose=False, **choices)
    except Exception as error:
        # tokenizers has no other class for what a vocabulary cannot do
        raise InputError(
            f"the tokenizer must read any text, and it fails on {text!r:.60}: {error}; give it a "
            "token for what is unknown"
        ) from error

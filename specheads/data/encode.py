"""Texts to token ids: by the tokenizer, or by fastokens while it agrees with the tokenizer."""

import hashlib
import json
import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

import numpy as np
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from specheads.core.errors import InputError

try:
    import fastokens
except ImportError:
    # it has no wheel for some platforms
    fastokens = None

COMPARED = 32
"""First texts that are compared with the tokenizer; after them, one in a hundred."""


class DisagreementError(Exception):
    """fastokens read a text differently from the tokenizer, or failed on it."""


class Encoder:
    """Encodes texts by fastokens and compares a sample with the tokenizer.

    fastokens reads code about 20 times as fast, but it is another implementation. All added
    tokens, the first texts and one text in a hundred are compared. Without fastokens, or with
    `is_fast=False`, the tokenizer reads everything.

    Raises:
        DisagreementError: The two differ, here or on a call: start again with `is_fast=False`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, is_fast: bool = True) -> None:
        self._tokenizer = tokenizer
        self._fast = _fast(tokenizer) if is_fast else None
        self._num_read = 0
        self._random = random.Random(0)

    def __call__(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the token ids of each text, with the tokenizer's special tokens."""
        if self._fast is None:
            return _plain(self._tokenizer, texts)
        found = _read(self._fast, texts)
        compared = [
            place
            for place in range(len(texts))
            if self._num_read + place < COMPARED or self._random.random() < 0.01
        ]
        self._num_read += len(texts)
        _compare(self._tokenizer, [(texts[place], found[place]) for place in compared])
        return found


def _fast(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return the fastokens tokenizer, or None; compare its added tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if fastokens is None or backend is None:
        return None
    # the last call of the tokenizer decides these two, and documents are never truncated
    rules = json.loads(backend.to_str()) | {"truncation": None, "padding": None}
    added = list(cast(Any, tokenizer).get_added_vocab())
    tried = ["", " ", *added, *(f"a{token}b {token} \n{token}1" for token in added), "".join(added)]
    try:
        fast = fastokens.Tokenizer.from_json_str(json.dumps(rules))
    # it can fail in any way on rules that it does not know
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
    expected = _plain(tokenizer, [text for text, _ in read])
    for (text, ids), wanted in zip(read, expected, strict=True):
        if not np.array_equal(wanted, ids):
            raise DisagreementError(f"{text!r:.60}")


def _plain(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[np.ndarray]:
    if not texts:
        return []
    return [np.asarray(ids, np.int32) for ids in token_ids(tokenizer, list(texts))]


def token_ids(
    tokenizer: PreTrainedTokenizerBase, text: str | list[str], *, add_special_tokens: bool = True
) -> Any:
    """Return the token ids of a text, or of each of several texts."""
    return encoding(tokenizer, text, add_special_tokens=add_special_tokens)["input_ids"]


def encoding(tokenizer: PreTrainedTokenizerBase, text: str | list[str], **choices: Any) -> Any:
    """Call a tokenizer on a text or a list of texts; `choices` are the tokenizer's own.

    Raises:
        InputError: The tokenizer fails on the text.
    """
    try:
        # verbose=False: no warning about texts longer than the context
        return tokenizer(text, return_attention_mask=False, verbose=False, **choices)
    except Exception as error:
        # tokenizers raises a bare Exception for text that a vocabulary cannot express
        raise InputError(
            f"the tokenizer must read any text, and it fails on {text!r:.60}: {error}; give it a "
            "token for what is unknown"
        ) from error


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return 32 hex digits that change if the tokenizer would read a text differently."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = json.dumps({"vocab": tokenizer.get_vocab()}) if backend is None else backend.to_str()
    rest = {
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "chat_template": tokenizer.chat_template,
    }
    return _digest(rules, json.dumps(rest))


@lru_cache(maxsize=4)
def _digest(rules: str, rest: str) -> str:
    """Return the digest of two JSON objects; for a large vocabulary it takes half a second."""
    known = json.loads(rules)
    # these two depend on the last call, not on the tokenizer
    kept = {name: known[name] for name in known if name not in ("truncation", "padding")}
    whole = {"rules": kept} | json.loads(rest)
    text = json.dumps(whole, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]

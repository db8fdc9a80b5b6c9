"""Texts to token ids: by the tokenizer, or by fastokens while it agrees with the tokenizer."""

import hashlib
import json
from collections.abc import Callable, Sequence
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

COMPARED_EVERY = 50
"""One in so many texts is compared with the tokenizer, and so is the first text of a call."""

Encode = Callable[[Sequence[str]], list[np.ndarray]]


class DisagreementError(Exception):
    """fastokens read a text differently from the tokenizer, or failed on it."""


def encoder(tokenizer: PreTrainedTokenizerBase, *, is_fast: bool = True) -> Encode:
    """Return a function from texts to token ids, with the tokenizer's special tokens.

    fastokens reads code about 20 times as fast, but it is another implementation. All added tokens
    and a sample of the texts are compared with the tokenizer. Without fastokens, or with
    `is_fast=False`, the tokenizer reads everything.

    Raises:
        DisagreementError: The two differ, here or on a call: start again with `is_fast=False`.
    """

    def plain(texts: Sequence[str]) -> list[np.ndarray]:
        found = token_ids(tokenizer, list(texts)) if texts else []
        return [np.asarray(ids, np.int32) for ids in found]

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if fastokens is None or backend is None or not is_fast:
        return plain
    # the last call of the tokenizer decides these two, and documents are never truncated
    rules = json.loads(backend.to_str()) | {"truncation": None, "padding": None}
    added = list(cast(Any, tokenizer).get_added_vocab())
    try:
        fast: Any = fastokens.Tokenizer.from_json_str(json.dumps(rules))
    # it can fail in any way on rules that it does not know
    except Exception as error:
        raise DisagreementError(str(error)) from error

    def compared(texts: Sequence[str], every: int = 0) -> list[np.ndarray]:
        try:
            ids, ends = fast.encode_batch_flat(list(texts), add_special_tokens=True)
        except Exception as error:
            raise DisagreementError(str(error)) from error
        # every id is below 2**31
        found = np.split(np.frombuffer(ids, np.int32), np.frombuffer(ends, np.int64)[1:-1])
        step = every or COMPARED_EVERY
        for text, wanted, read in zip(
            texts[::step], plain(texts[::step]), found[::step], strict=True
        ):
            if not np.array_equal(wanted, read):
                raise DisagreementError(f"{text!r:.60}")
        return found

    tried = ["", " ", *added, *(f"a{token}b {token} \n{token}1" for token in added), "".join(added)]
    compared(tried, every=1)
    return compared


def token_ids(
    tokenizer: PreTrainedTokenizerBase, text: str | list[str], *, add_special_tokens: bool = True
) -> Any:
    """Return the token ids of a text, or of each of several texts."""
    return encoding(tokenizer, text, add_special_tokens=add_special_tokens)["input_ids"]


def prompt_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the token ids of a text to continue, without an end token."""
    whole, plain = (
        token_ids(tokenizer, text, add_special_tokens=special) for special in (True, False)
    )
    ends = range(len(plain), len(whole) + 1)
    # what the tokenizer adds after a text is no part of a prompt
    end = next((end for end in ends if whole[end - len(plain) : end] == plain), len(whole))
    ids = whole[:end]
    while plain and ids[-1:] == [tokenizer.eos_token_id]:
        ids.pop()
    return ids


def affixes(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the tokens that the tokenizer adds before and after every text."""
    whole, plain = (
        token_ids(tokenizer, "a", add_special_tokens=special) for special in (True, False)
    )
    if not plain or plain[0] not in whole:
        raise InputError("text needs a tokenizer that reads any letter, this one cannot read 'a'")
    first = whole.index(plain[0])
    return whole[:first], whole[first + len(plain) :]


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

"""Texts to token ids, and the identity of a tokenizer."""

import hashlib
import json
from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase as Tokenizer

from specheads.core.errors import InputError


def encode_text(
    tokenizer: Tokenizer, text: str | list[str], *, add_special_tokens: bool = True
) -> Any:
    """Return the token ids of a text, or of each of several texts."""
    return call_tokenizer(tokenizer, text, add_special_tokens=add_special_tokens)["input_ids"]


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of a text to continue, without an end token."""
    ids, (_, closing) = encode_text(tokenizer, text), affix_ids(tokenizer)
    # what the tokenizer adds after a text is no part of a prompt
    if closing and ids[-len(closing) :] == closing:
        ids = ids[: -len(closing)]
    while text and ids[-1:] == [tokenizer.eos_token_id]:
        ids.pop()
    return ids


def affix_ids(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the tokens that the tokenizer adds before and after every text."""
    ids, plain_ids = (
        encode_text(tokenizer, "a", add_special_tokens=special) for special in (True, False)
    )
    if not plain_ids or plain_ids[0] not in ids:
        raise InputError("text needs a tokenizer that reads any letter, this one cannot read 'a'")
    first = ids.index(plain_ids[0])
    return ids[:first], ids[first + len(plain_ids) :]


def call_tokenizer(tokenizer: Tokenizer, text: str | list[str], **choices: Any) -> Any:
    """Call a tokenizer on a text or a list of texts; `choices` are the tokenizer's own."""
    try:
        # verbose=False: no warning about texts longer than the context
        return tokenizer(text, return_attention_mask=False, verbose=False, **choices)
    except Exception as error:
        # tokenizers raises a bare Exception for text that a vocabulary cannot express
        raise InputError(
            f"the tokenizer must read any text, and it fails on {text!r:.60}: {error}; give it a "
            "token for what is unknown"
        ) from error


def tokenizer_fingerprint(tokenizer: Tokenizer) -> str:
    """Return 32 hex digits that change if the tokenizer would read a text differently."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = {"vocab": tokenizer.get_vocab()} if backend is None else json.loads(backend.to_str())
    # these two depend on the last call, not on the tokenizer
    rules = {name: rules[name] for name in rules if name not in ("truncation", "padding")}
    identity = {
        "rules": rules,
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "chat_template": tokenizer.chat_template,
    }
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]

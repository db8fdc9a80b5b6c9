"""Fingerprints: whether text on disk was made by the settings a run asks for."""

import hashlib
import json
from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase


def text_fingerprint(**settings: Any) -> str:
    """Return 32 hex digits that change when any setting does, and do not with their order.

    Args:
        settings: Whatever determines the text: the base's fingerprint, sampling, the corpus. The
            values must fit JSON; tuples and lists are the same.
    """
    return _digest(settings)


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return 32 hex digits that change when the tokenizer would read a text differently."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        rules: dict[str, Any] = {"vocab": tokenizer.get_vocab()}
    else:
        # the other two remember the last call, not the tokenizer
        whole = json.loads(backend.to_str())
        rules = {name: whole[name] for name in whole if name not in ("truncation", "padding")}
    return _digest(
        {
            "rules": rules,
            "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
            "chat_template": tokenizer.chat_template,
        }
    )


def _digest(value: dict[str, Any]) -> str:
    written = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(written.encode()).hexdigest()[:32]

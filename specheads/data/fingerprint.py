"""Fingerprints: whether text on disk was made by the settings a run asks for."""

import hashlib
import json
from dataclasses import asdict
from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from specheads.config import Data


def text_identity(
    base: str, tokenizer: PreTrainedTokenizerBase, corpus: Data, documents: str
) -> dict[str, Any]:
    """Return what decides self-distilled text besides how it is written, each under its name.

    `base` is the fingerprint of the base that writes. That of the documents counts beside the
    settings of the corpus, under which they may have changed.
    """
    return {
        "base": base,
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "corpus": asdict(corpus),
        "documents": documents,
    }


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return 32 hex digits that change when the tokenizer would read a text differently."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        rules: dict[str, Any] = {"vocab": tokenizer.get_vocab()}
    else:
        # the other two remember the last call, not the tokenizer
        whole = json.loads(backend.to_str())
        rules = {name: whole[name] for name in whole if name not in ("truncation", "padding")}
    whole = {
        "rules": rules,
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "chat_template": tokenizer.chat_template,
    }
    written = json.dumps(whole, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(written.encode()).hexdigest()[:32]

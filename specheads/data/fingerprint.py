"""Fingerprints: whether text on disk was made by the settings a run asks for."""

import hashlib
import json
from dataclasses import asdict
from functools import lru_cache
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
    rules = json.dumps({"vocab": tokenizer.get_vocab()}) if backend is None else backend.to_str()
    said = {
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "chat_template": tokenizer.chat_template,
    }
    return _digest(rules, json.dumps(said))


@lru_cache(maxsize=4)
def _digest(rules: str, said: str) -> str:
    """Return the digest of two objects in JSON; of a large vocabulary it takes half a second."""
    known = json.loads(rules)
    # these two remember the last call, not the tokenizer
    kept = {name: known[name] for name in known if name not in ("truncation", "padding")}
    whole = {"rules": kept} | json.loads(said)
    written = json.dumps(whole, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(written.encode()).hexdigest()[:32]

"""What the base is asked, from the training data: conversations, or else plain text."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import pyarrow as pa

from specheads.base.model import FrozenBase
from specheads.config import Data, Distill
from specheads.core.errors import InputError
from specheads.data.chat import Template
from specheads.data.encode import tokenizer_fingerprint
from specheads.data.sources import read
from specheads.data.tokenise import tokenised
from specheads.training.distill.asks import Continuations, Conversations, Prompts
from specheads.training.distill.run import decoder


def prompts_of(data: Data, base: FrozenBase, settings: Distill, seed: int) -> Prompts:
    """Return what the base is asked of the training split.

    Of a mixture with conversations these are asked, and its plain text is not continued.

    Raises:
        ValueError: There is nothing to ask, or the tokenizer has no chat template for it.
    """
    tokenizer = base.tokenizer
    if tokenizer is None:
        raise InputError(f"what a base writes follows text: the base {base.name} needs a tokenizer")
    talks = Rows(_conversations(data, seed))
    if talks:
        template, decode = Template(tokenizer), decoder(base)
        return Conversations(talks, template, decode, fingerprint=talks.fingerprint, seed=seed)
    documents = tokenised(data, "train", tokenizer, seed)
    lengths = {"prompt_tokens": settings.prompt_tokens, "new_tokens": settings.new_tokens}
    return Continuations(documents, **lengths, seed=seed)


def identity_of(data: Data, base: FrozenBase, fingerprint: str, prompts: Prompts) -> dict[str, Any]:
    """Return what decides the text besides how it is written; `fingerprint` is the base's."""
    assert base.tokenizer is not None
    return {
        "base": fingerprint,
        "tokenizer": tokenizer_fingerprint(base.tokenizer),
        "corpus": asdict(data),
        # the settings of the corpus may name other documents than before
        "documents": prompts.fingerprint,
    }


class Rows(Sequence[Mapping[str, Any]]):
    """Rows of JSON, held as text: an object of each would take ten times the memory."""

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        written = (json.dumps(row, ensure_ascii=False, sort_keys=True) for row in rows)
        self._rows = pa.array(written, pa.large_string())
        digest = hashlib.sha256()
        for row in self._rows:
            digest.update(row.as_buffer())
            digest.update(b"\n")
        self.fingerprint = digest.hexdigest()[:32]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: Any) -> Any:
        return json.loads(self._rows[number].as_py())


def _conversations(data: Data, seed: int) -> Iterable[Mapping[str, Any]]:
    for _, row in read(data, "train", seed):
        if "messages" in row:
            yield {"messages": row["messages"], "tools": row.get("tools")}
        elif data.source != "mixture":
            # a source has rows of one sort
            return

"""Corpora as documents of token ids, with which of them the loss counts."""

from pathlib import Path

import pyarrow as pa
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from specheads.config import Data
from specheads.core.errors import InputError
from specheads.data.chat import Template, conversation
from specheads.data.corpora import load_corpus, texts_of
from specheads.data.documents import Documents
from specheads.data.jsonl import read_jsonl
from specheads.data.packing import token_ids

COLUMNS = pa.schema({"tokens": pa.list_(pa.int32()), "counted": pa.list_(pa.uint8())})


def tokenised(
    corpus: Data, split: str, tokenizer: PreTrainedTokenizerBase, seed: int = 0
) -> Documents:
    """Return a corpus as documents: of conversations the assistant's tokens count, of text all."""
    rows = []
    if corpus.source == "chat":
        template = Template(tokenizer)
        for where, row in read_jsonl(Path(corpus.path)):
            told = conversation(row, where)
            rows += [
                {"tokens": one.tokens, "counted": [*map(int, one.counted)]}
                for one in template.samples(told.messages, told.tools, where)
            ]
        if not rows:
            raise InputError(f"a corpus needs a conversation, {corpus.path} has none; give some")
    else:
        for text in texts_of(load_corpus(corpus, split, seed)):
            ids = [*token_ids(tokenizer, text or ""), tokenizer.eos_token_id]
            rows.append({"tokens": ids, "counted": [1] * len(ids)})
    return Documents(pa.Table.from_pylist(rows, COLUMNS))

"""Documents out of a corpus: each text as token ids, ended by the end-of-text token."""

import hashlib
from typing import Any

import pyarrow as pa
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from specheads.config import Data
from specheads.core.errors import InputError
from specheads.data.corpora import load_corpus
from specheads.data.documents import Documents
from specheads.data.fingerprint import documents_fingerprint, tokenizer_fingerprint
from specheads.data.packing import token_ids


def tokenised(
    corpus: Data, split: str, tokenizer: PreTrainedTokenizerBase, seed: int = 0
) -> Documents:
    """Return the documents of one split of a corpus, of which every token counts."""
    if tokenizer.eos_token_id is None:
        raise InputError(
            "packing needs a tokenizer with an end-of-text token, this one has none; set its "
            "eos_token"
        )
    end: Any = tokenizer.eos_token_id
    documents, columns = load_corpus(corpus, split, seed), []
    for batch in documents.iter(batch_size=1000):
        read = token_ids(tokenizer, list(dict(batch)["text"]))
        # some tokenizers end every text themselves
        whole = [ids if ids and ids[-1] == end else [*ids, end] for ids in read]
        columns.append(pa.array(whole, pa.list_(pa.int32())))
    known = documents_fingerprint(documents) + tokenizer_fingerprint(tokenizer)
    table = pa.table({"tokens": pa.chunked_array(columns, pa.list_(pa.int32()))})
    return Documents(table, hashlib.sha256(known.encode()).hexdigest()[:32])

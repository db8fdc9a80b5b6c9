"""Documents out of a corpus: every text once, ended once, all of it counted."""

from pathlib import Path

import pytest
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from specheads.config import Data
from specheads.data import tokenise
from specheads.data.tokenise import tokenised

BASE = Path(__file__).parents[2] / "recipes" / "tiny_code" / "base"
CORPUS = Data(source="python_stdlib")


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(BASE)


def give(texts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenise, "load_corpus", lambda *_: Dataset.from_dict({"text": texts}))


def test_each_text_is_a_document_that_the_end_token_ends(tokenizer, monkeypatch, caplog):
    texts = ["x = 1", "def f(): pass", "x = 1\n" * 2000]
    give(texts, monkeypatch)
    found = tokenised(CORPUS, "train", tokenizer)
    # one is longer than the context, which is no matter of who reads it
    assert found.lengths[2] > tokenizer.model_max_length
    assert caplog.records == []
    read = [found.tokens(number).tolist() for number in range(len(found))]
    assert read == [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    assert all(found.counted(number).all() for number in range(len(found)))


def test_a_fingerprint_is_that_of_texts_and_tokenizer(tokenizer, monkeypatch):
    give(["a", "b"], monkeypatch)
    first = tokenised(CORPUS, "train", tokenizer).fingerprint
    assert tokenised(CORPUS, "train", tokenizer).fingerprint == first
    tokenizer.add_tokens(["<new>"])
    assert tokenised(CORPUS, "train", tokenizer).fingerprint != first


def test_a_tokenizer_without_an_end_of_text_is_refused(tokenizer):
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="needs a tokenizer with an end-of-text token"):
        tokenised(CORPUS, "train", tokenizer)

"""Rows of a corpus, each with where it stands: plain text."""

from collections.abc import Iterator
from typing import Any

from specheads.config import Data
from specheads.data.corpora import load_corpus, texts_of


def read(corpus: Data, split: str, seed: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of one split."""
    for number, text in enumerate(texts_of(load_corpus(corpus, split, seed))):
        yield f"document {number}", {"text": text or ""}

"""A small tokenizer, and caches that tests do not share."""

import copy
import json
from functools import cache
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

BASE = Path(__file__).parents[2] / "recipes" / "tiny_code" / "base"
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@cache
def loaded() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(BASE)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return copy.deepcopy(loaded())


@pytest.fixture
def chat_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = CHAT
    return tokenizer


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets_cache")
    monkeypatch.setenv("SPECHEADS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_jsonl(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)

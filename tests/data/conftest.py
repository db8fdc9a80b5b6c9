"""A small tokenizer, and caches that tests do not share."""

import copy
import json
from functools import cache
from pathlib import Path

import pytest
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from specheads.data import files

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


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave a part of the standard library, which is faster to read."""
    paths = files.stdlib_files()[::12]
    monkeypatch.setattr(files, "stdlib_files", lambda: paths)


def write_jsonl(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


CATEGORIES, LENGTHS, ENTROPIES = ("coding", "roleplay"), ("2k", "16k"), ("low_entropy", "mixed")


def speed_bench(folder: Path, layout: str = "jsonl") -> Path:
    """Write made-up prompts as SPEED-Bench's scripts do: NeMo-Skills' jsonl, ModelOpt's parquet."""
    subsets = {"qualitative": CATEGORIES} | {
        f"throughput_{length}": ENTROPIES for length in LENGTHS
    }
    folder.mkdir()
    for subset, categories in subsets.items():
        rows = []
        for category in categories:
            turns = [f"{subset} {category}", *(["and then?"] if category == "roleplay" else [])]
            about = {"sub_category": "made up", "source": "here", "src_id": "1", "difficulty": None}
            row = {"question_id": f"{subset}{category}", "category": category, **about}
            rows.append(row | {"turns": turns, "multiturn": len(turns) > 1})
        if layout == "parquet":
            (folder / subset).mkdir()
            Dataset.from_list(rows).to_parquet(folder / subset / "test.parquet")
            continue
        for row in rows:
            turns = row.pop("turns")
            row["messages"] = [{"role": "user", "content": turn} for turn in turns]
        write_jsonl(folder / f"{subset}.jsonl", rows)
    return folder

"""Sources: which rows they have, and in which split."""

from typing import Any

import datasets
import pytest
from datasets import Dataset

from specheads.config.data import DataSettings
from specheads.core.errors import InputError
from specheads.data import files, sources
from specheads.data.sources import SPLITS, read_split, split_of
from tests.data.conftest import write_jsonl

TEXTS = [f"document {number}: " + "word " * (number % 7 + 1) for number in range(120)]


def load(source: str, split: str = "train", seed: int = 0, **choices) -> list[str]:
    return [
        row["text"] for _, row in read_split(DataSettings(source=source, **choices), split, seed)
    ]


def test_splits_are_disjoint_and_complete(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    splits = {split: set(load("jsonl", path=path, split=split)) for split in SPLITS}
    assert sum(map(len, splits.values())) == len(TEXTS)
    assert set().union(*splits.values()) == set(TEXTS)
    assert all(split_of(text) == split for split, texts in splits.items() for text in texts)


def test_every_local_source_gives_the_same_split(tmp_path):
    jsonl = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    parquet = tmp_path / "a.parquet"
    Dataset.from_dict({"code": TEXTS}).to_parquet(parquet)
    folder = tmp_path / "texts" / "deeper"
    folder.mkdir(parents=True)
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    (folder / "binary.bin").write_bytes(b"\xff\xfe\x00")
    loaded = [
        load("jsonl", path=jsonl),
        load("jsonl", path=str(tmp_path / "*.jsonl")),
        load("parquet", path=str(parquet), column="code"),
        load("parquet", path=str(tmp_path), column="code"),
    ]
    with pytest.warns(UserWarning, match=r"left out: 1 not in UTF-8 \(.*binary.bin\)"):
        loaded.append(load("files", path=str(tmp_path / "texts")))
    assert len({tuple(sorted(texts)) for texts in loaded}) == 1


def test_standard_library_skips_packages_tests_and_short_files(tmp_path, monkeypatch):
    code = "x = 1  # a line of code\n" * 40
    read_files = {"json/decoder.py": code + "# 1", "encodings/ascii.py": code + "# 2"}
    left_out = {
        "site-packages/numpy/core.py": code,
        "dist-packages/apt.py": code,
        "test/test_json.py": code,
        "lib2to3/tests/data/infinite.py": code,
        "idlelib/run.py": code,
        "this.py": "short",
    }
    for name, text in (read_files | left_out).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n" + code.encode())
    monkeypatch.setattr(files.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    monkeypatch.setattr(sources, "split_of", lambda _: "train")
    assert set(load("python_stdlib")) == set(read_files.values())


def test_max_documents_samples_by_the_seed(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "split_of", lambda _: "train")
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    sample, another_sample = (
        load("jsonl", path=path, max_documents=60, seed=seed) for seed in (0, 1)
    )
    assert len(sample) == len(another_sample) == 60
    assert sample != another_sample != TEXTS[:60]
    assert sample == [text for text in TEXTS if text in set(sample)]


def test_hub_data_set_with_max_documents_is_streamed(monkeypatch):
    options = {}

    def answer(path, **choices):
        options.update(choices, path=path)
        table = Dataset.from_dict({"content": TEXTS})
        return table.to_iterable_dataset() if choices["streaming"] else table

    monkeypatch.setattr(datasets, "load_dataset", answer)
    sample = load("hub", path="a/b", column="content", patterns=["x/*"], max_documents=30)
    assert options["streaming"]
    assert options["data_files"] == ["x/*"]
    assert 0 < len(sample) <= 30
    texts = load("hub", path="a/b", column="content")
    assert set(sample) < set(texts)


@pytest.mark.parametrize(
    ("splits", "split_name"),
    [
        (["train_sft", "test_sft"], "train_sft"),
        (["validation", "test"], "validation"),
        (["all"], "all"),
        (["dev", "train_prefs"], "train_prefs"),
        (["default.v2", "en-US"], "default.v2"),
    ],
)
@pytest.mark.parametrize("source", ["hub", "chat"])
def test_hub_split_is_named_in_the_error_and_by_data_split(monkeypatch, source, splits, split_name):
    turns = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hello."}]
    rows = [{"text": f"{number}", "messages": turns} for number in range(20)]
    if source == "chat":
        rows = [{"messages": row["messages"]} for row in rows]
    dataset = datasets.DatasetDict({split: Dataset.from_list(rows) for split in splits})

    def answer(_, split, **__):
        if split not in dataset:
            raise ValueError(f'Unknown split "{split}". Should be one of {splits}.')
        return dataset[split]

    monkeypatch.setattr(datasets, "load_dataset", answer)
    with pytest.raises(InputError, match=rf"one of .*{split_name}.*data\.split="):
        next(sources.read_source(DataSettings(source=source, path="a/b")))
    documents = sources.read_source(DataSettings(source=source, path="a/b", split=split_name))
    assert len(list(documents)) == 20


@pytest.mark.parametrize("name", ["split", "config", "revision"])
@pytest.mark.parametrize("source", ["chat", "jsonl"])
def test_settings_of_the_hub_are_refused_for_local_files(tmp_path, source, name):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    setting: Any = {name: "test"}
    data = DataSettings(source=source, path=path, **setting)
    with pytest.raises(InputError, match=rf"no {name}, got data.{name}='test' .*data.patterns="):
        next(read_split(data, "train"))


def test_loading_script_of_a_data_set_is_refused_and_not_run(tmp_path):
    folder, ran = tmp_path / "set", tmp_path / "ran"
    folder.mkdir()
    (folder / "set.py").write_text(f"open({str(ran)!r}, 'w')\n")
    with pytest.raises(InputError, match=r"Dataset scripts are no longer supported"):
        load("hub", path=str(folder))
    assert not ran.exists()

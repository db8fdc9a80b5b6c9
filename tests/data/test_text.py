import gzip
import json
import re
from pathlib import Path

import datasets
import pytest
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from specheads.config import Data
from specheads.core.errors import InputError
from specheads.data import files, sources
from specheads.data.encode import tokenizer_fingerprint
from specheads.data.prompts import PromptSet, load_prompts
from specheads.data.sources import SPLITS, read, split_of

BASE = Path(__file__).parents[2] / "recipes" / "tiny_code" / "base"
TEXTS = [f"document {number}: " + "word " * (number % 7 + 1) for number in range(120)]
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(BASE)


@pytest.fixture
def chat_tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    tokenizer.chat_template = CHAT
    return tokenizer


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets_cache")


def write_jsonl(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def load(source: str, split: str = "train", seed: int = 0, **choices) -> list[str]:
    return [row["text"] for _, row in read(Data(source=source, **choices), split, seed)]


def ids_of(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return list(tokenizer(text)["input_ids"])


# corpus


def test_splits_are_disjoint_and_complete(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    parts = {split: set(load("jsonl", path=path, split=split)) for split in SPLITS}
    assert sum(map(len, parts.values())) == len(TEXTS)
    assert set().union(*parts.values()) == set(TEXTS)
    assert all(split_of(text) == split for split, part in parts.items() for text in part)


def test_split_fractions():
    splits = [split_of(str(number)) for number in range(5000)]
    assert 0.04 < splits.count("prompts") / 5000 < 0.06
    assert 0.015 < splits.count("validation") / 5000 < 0.026


def test_every_local_source_gives_the_same_split(tmp_path):
    jsonl = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    parquet = tmp_path / "a.parquet"
    Dataset.from_dict({"code": TEXTS}).to_parquet(parquet)
    folder = tmp_path / "texts" / "deeper"
    folder.mkdir(parents=True)
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    (folder / "binary.bin").write_bytes(b"\xff\xfe\x00")
    found = [
        load("jsonl", path=jsonl),
        load("jsonl", path=str(tmp_path / "*.jsonl")),
        load("parquet", path=str(parquet), column="code"),
        load("parquet", path=str(tmp_path), column="code"),
        load("files", path=str(tmp_path / "texts")),
    ]
    assert len({tuple(sorted(one)) for one in found}) == 1


def test_standard_library_skips_packages_tests_and_short_files(tmp_path, monkeypatch):
    code = "x = 1  # a line of code\n" * 40
    kept = {"json/decoder.py": code + "# 1", "encodings/ascii.py": code + "# 2"}
    left_out = {
        "site-packages/numpy/core.py": code,
        "dist-packages/apt.py": code,
        "test/test_json.py": code,
        "lib2to3/tests/data/infinite.py": code,
        "idlelib/run.py": code,
        "this.py": "short",
    }
    for name, text in (kept | left_out).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n" + code.encode())
    monkeypatch.setattr(files.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    monkeypatch.setattr(sources, "split_of", lambda _: "train")
    assert set(load("python_stdlib")) == set(kept.values())


def test_standard_library_of_this_interpreter_is_found():
    text = Path(json.decoder.__file__).read_text(encoding="utf-8")
    assert text in load("python_stdlib", split=split_of(text))


def test_max_documents_samples_by_the_seed(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "split_of", lambda _: "train")
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    taken, other = (load("jsonl", path=path, max_documents=60, seed=seed) for seed in (0, 1))
    assert len(taken) == len(other) == 60
    assert taken != other != TEXTS[:60]
    assert taken == [text for text in TEXTS if text in set(taken)]
    assert load("jsonl", path=path, max_documents=60, streaming=True, seed=1) == TEXTS[:60]


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"source": "web"}, "python_stdlib, .* chat, mixture; got 'web'"),
        ({"source": "jsonl", "split": "test"}, "train, validation, prompts; got 'test'"),
        ({"source": "jsonl", "path": "missing.jsonl"}, "'missing.jsonl' is not there"),
        ({"source": "files", "path": "missing"}, "needs a folder of text files, got path"),
        ({"source": "hub"}, "needs the id of a dataset"),
    ],
)
def test_unknown_source_split_or_path_is_refused(choices, message):
    with pytest.raises(ValueError, match=message):
        load(**choices)


def test_chat_path_in_an_existing_folder_is_not_looked_up_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked: list[str] = []
    monkeypatch.setattr(
        sources, "hub_rows", lambda source, _: iter(asked.append(source.path) or ())
    )
    assert load("chat", path="data/talks") == []
    assert asked == ["data/talks"]
    Path("data").mkdir()
    with pytest.raises(InputError, match=r"path or an id: .* folder data here, without talks; "):
        load("chat", path="data/talks")
    assert asked == ["data/talks"]


def test_missing_column_lists_the_columns(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"body": "x", "size": 1}])
    with pytest.raises(ValueError, match="no column 'text'; it has body, size"):
        load("jsonl", path=path)
    with pytest.raises(ValueError, match=r"column 'size' of .* must hold text"):
        load("jsonl", path=path, column="size")


def test_blank_rows_are_skipped_and_broken_file_is_refused(tmp_path):
    blank = write_jsonl(tmp_path / "a.jsonl", [{"text": "  \n"}, {"text": ""}])
    assert load("jsonl", path=blank) == []
    broken = tmp_path / "b.jsonl"
    broken.write_text("no json\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"line 1 of .*b\.jsonl is none"):
        load("jsonl", path=str(broken))


def test_unreachable_hub_is_refused_in_one_line(monkeypatch):
    def unreachable(*_, **__):
        raise ConnectionError("no route\nmore lines")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(
        ValueError, match=r"'a/b' from the Hub: no route .* pass a local file"
    ) as told:
        load("hub", path="a/b")
    assert "\n" not in str(told.value)


def test_hub_data_set_with_max_documents_is_streamed(monkeypatch):
    asked = {}

    def answer(path, **choices):
        asked.update(choices, path=path)
        table = Dataset.from_dict({"content": TEXTS})
        return table.to_iterable_dataset() if choices["streaming"] else table

    monkeypatch.setattr(datasets, "load_dataset", answer)
    part = load("hub", path="a/b", column="content", patterns=["x/*"], max_documents=30)
    assert asked["streaming"]
    assert asked["data_files"] == ["x/*"]
    assert 0 < len(part) <= 30
    whole = load("hub", path="a/b", column="content")
    assert set(part) < set(whole)


# prompts


def test_every_held_out_file_gives_a_prompt_before_any_gives_two(tokenizer, tmp_path, monkeypatch):
    for number in range(6):
        lines = [f"value_{number} = {number}{line}" for line in range(60)]
        (tmp_path / f"{number}.py").write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.setattr(files.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    monkeypatch.setattr(sources, "split_of", lambda _: "prompts")

    def load(count: int) -> PromptSet:
        return load_prompts("python_stdlib", tokenizer, num_prompts=count, prompt_tokens=16)

    found = load(9)
    assert {len(prompt.tokens) for prompt in found.prompts} == {16}
    assert len({tuple(prompt.tokens) for prompt in found.prompts}) == 9
    numbers = [re.findall(r"value_(\d) =", prompt.text)[-1] for prompt in found.prompts]
    assert sorted(numbers[:6]) == list("012345")
    assert len(set(numbers[6:])) == 3
    assert load(9) == found
    assert load(6).prompts == found.prompts[:6]
    assert load(6).version != found.version


ROWS = [
    {"prompt": "def f(x):", "category": "code", "messages": None},
    {"turns": ["first question", "second question"], "category": "chat"},
    {"question": "how many?"},
]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_prompt_file_is_read_in_order(tokenizer, tmp_path, name):
    text = "".join(json.dumps(row) + "\n" for row in ROWS)
    opened = gzip.open if name.endswith("gz") else Path.open
    with opened(tmp_path / name, "wt") as file:
        file.write(text)
    found = load_prompts(str(tmp_path / name), tokenizer, num_prompts=10)
    assert found.name == name
    assert [prompt.text for prompt in found.prompts] == ["def f(x):", "first question", "how many?"]
    assert [prompt.category for prompt in found.prompts] == ["code", "chat", ""]
    assert all(prompt.tokens == ids_of(prompt.text, tokenizer) for prompt in found.prompts)


def test_all_turns_gives_a_prompt_for_each_turn(tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ROWS[1:2])
    found = load_prompts(path, tokenizer, num_prompts=10, all_turns=True)
    assert [prompt.text for prompt in found.prompts] == [
        "first question",
        "first question\n\nsecond question",
    ]


def test_chat_rows_use_the_template(chat_tokenizer, tokenizer, tmp_path):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": messages}, {"turns": ["hi"]}])
    found = load_prompts(path, chat_tokenizer, num_prompts=10)
    assert [prompt.text for prompt in found.prompts] == [
        "<system>be brief<user>hello<assistant>",
        "<user>hi<assistant>",
    ]
    assert found.prompts[0].tokens == ids_of(found.prompts[0].text, chat_tokenizer)
    with pytest.raises(ValueError, match=r"line 1 of .* has messages and this tokenizer has no"):
        load_prompts(path, tokenizer, num_prompts=10)


@pytest.mark.parametrize(
    "row",
    [
        {"question": "how many?", "answer": "4"},
        {"prompt": "how many?", "entry_point": "count", "task_id": "HumanEval/0"},
        {"text": "how many?", "code": "4", "test_list": ["assert count() == 4"]},
    ],
    ids=["gsm8k", "humaneval", "mbpp"],
)
def test_question_of_a_public_set_uses_the_template(row, chat_tokenizer, tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [row])
    (asked,) = load_prompts(path, chat_tokenizer, num_prompts=1).prompts
    assert asked.text == "<user>how many?<assistant>"
    assert asked.tokens == ids_of(asked.text, chat_tokenizer)
    (plain,) = load_prompts(path, tokenizer, num_prompts=1).prompts
    assert (plain.text, plain.tokens) == ("how many?", ids_of("how many?", tokenizer))


def test_text_to_continue_does_not_use_the_template(chat_tokenizer, tmp_path):
    rows = [{"prompt": "def f(x):"}, {"text": "def f(x):"}]
    found = load_prompts(write_jsonl(tmp_path / "a.jsonl", rows), chat_tokenizer, num_prompts=2)
    assert [prompt.text for prompt in found.prompts] == ["def f(x):"] * 2


def test_larger_set_is_sampled_by_the_seed(tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": text} for text in TEXTS])
    first, again, other = (
        load_prompts(path, tokenizer, num_prompts=20, seed=seed) for seed in (0, 0, 1)
    )
    assert first == again
    assert len(first.prompts) == 20
    assert first.version != other.version


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": " "}', "line 2 of .* has none; it has prompt"),
        ('{"prompt": "", "text": "x"}', "line 2 of .* has none; it has prompt, text"),
        ('{"turns": []}', "turns must be a list .* line 2 of"),
        ("[1]", "one JSON object a line; line 2 of"),
        ("{", "one JSON object a line; line 2 of"),
    ],
)
def test_row_without_prompt_is_refused_with_its_line(tokenizer, tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "x"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        load_prompts(str(path), tokenizer, num_prompts=10)


def test_unknown_or_empty_prompts_are_refused(tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"python_stdlib, stdlib_.*spec_bench, .* got 'human'"):
        load_prompts("human", tokenizer, num_prompts=1)
    with pytest.raises(ValueError, match="must be a file that exists"):
        load_prompts(str(tmp_path / "a.jsonl"), tokenizer, num_prompts=1)
    (tmp_path / "b.jsonl").touch()
    with pytest.raises(ValueError, match="holds no row"):
        load_prompts(str(tmp_path / "b.jsonl"), tokenizer, num_prompts=1)


def test_named_set_reads_its_hub_column(tokenizer, monkeypatch):
    def load(path, **choices):
        assert (path, choices["split"]) == ("HuggingFaceH4/mt_bench_prompts", "train")
        return Dataset.from_dict({"prompt": [["a b", "c d"]], "category": ["math"]})

    monkeypatch.setattr(datasets, "load_dataset", load)
    found = load_prompts("mt_bench", tokenizer, num_prompts=5)
    assert found.name == "mt_bench"
    assert [(prompt.text, prompt.category) for prompt in found.prompts] == [("a b", "math")]


# fingerprints


def test_tokenizer_fingerprint_depends_on_tokens_and_template_only(chat_tokenizer):
    first = tokenizer_fingerprint(AutoTokenizer.from_pretrained(BASE))
    used = AutoTokenizer.from_pretrained(BASE)
    used(["a", "a b c"], padding=True, truncation=True, max_length=2)
    assert tokenizer_fingerprint(used) == first
    assert tokenizer_fingerprint(chat_tokenizer) != first
    used.add_tokens(["<new>"])
    assert tokenizer_fingerprint(used) != first

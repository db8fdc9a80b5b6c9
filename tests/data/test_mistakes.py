"""What users' files can hold instead of text: one line with the file, the place and a remedy."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from datasets import Dataset
from pyarrow import parquet
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specheads.config.data import DataSettings
from specheads.core.errors import InputError
from specheads.data.files import read_jsonl
from specheads.data.prompts import load_prompts
from specheads.data.sources import split_of
from specheads.data.tokenise import tokenise_corpus

GOOD = "".join(json.dumps({"text": f"document {number}"}) + "\n" for number in range(40))
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
ROW = b'{"text": "a"}\n'


@pytest.fixture
def refused(tokenizer, cache_folder: Path):
    """Return what expects one line, and nothing left behind."""

    def expect(message: str, *, of: Path | str = "", **choices) -> None:
        with pytest.raises(InputError, match=message) as caught:
            tokenise_corpus(DataSettings(**choices), "train", tokenizer)
        assert str(of) in str(caught.value)
        assert not cache_folder.exists()

    return expect


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": \n', r"line 2 of .* is none, .*Expecting value.*: fix or remove the row"),
        (b'{"text": "cut', "line 2 of .*Unterminated string"),
        (b'{"text": "a\x00b"}\n', "line 2 of .*Invalid control character"),
        (b'{"text": "a\\ud800b"}\n', "line 2 of .*surrogates not allowed"),
        # pyarrow's parser ends the process here
        (b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n", "line 2 of .*recursion"),
        (b'{"text": ' + b"9" * 5000 + b"}\n", "line 2 of .*integer string conversion"),
        (b"3\n", "line 2 of .* is a int, 3"),
        (b'["a"]\n', "line 2 of .* is a list"),
        (b'{"text": "caf\xe9"}\n', "rows must be UTF-8; .* has another byte after"),
    ],
)
def test_bad_row_error_names_file_and_line(tmp_path: Path, content: bytes, message: str):
    file = tmp_path / "a.jsonl"
    file.write_bytes(ROW + content)
    with pytest.raises(InputError, match=message) as caught:
        list(read_jsonl(file))
    assert str(file) in str(caught.value)
    assert len(str(caught.value)) < 400


def test_byte_order_marks_blank_lines_and_line_ends_are_read(tmp_path: Path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + ROW + b"\r\n\n" + ROW.replace(b"\n", b"\r\n") + b" \n")
    assert [row["text"] for _, row in read_jsonl(file)] == ["a", "a"]
    file.write_text('{"text": "a \\ud83d\\ude00"}')
    assert [row["text"] for _, row in read_jsonl(file)] == ["a \U0001f600"]


@pytest.mark.parametrize("damage", ["truncated", "checksum", "garbage"])
def test_damaged_gzip_is_refused(tmp_path: Path, damage: str):
    content = gzip.compress(ROW * 100)
    damaged = {
        "truncated": content[:-20],
        "checksum": content[:-8] + bytes(8),
        "garbage": b"\x1f\x8b" + b"abc" * 40,
    }
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(damaged[damage])
    with pytest.raises(InputError, match="make it readable, or write it again"):
        list(read_jsonl(file))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("\n\n", "holds no row"),
        (GOOD + '{"text": 3}\n', "must hold text in 'text' .*line 41 of .* has int"),
        ('{"body": "a"}\n{"size": 1}\n', "must hold text .* line 1 of .* has body, line 2"),
        ("\x00\x01\x02" * 99, "is no text; unpack an archive"),
    ],
)
def test_corpus_without_text_is_refused(refused, tmp_path: Path, content: str, message: str):
    file = tmp_path / "a.jsonl"
    file.write_text(content)
    refused(message, of=file, source="jsonl", path=str(file))


@pytest.mark.parametrize("damage", ["truncated", "other", "empty", "numbers", "no text"])
def test_damaged_parquet_is_refused(refused, tmp_path: Path, damage: str):
    file = tmp_path / "a.parquet"
    Dataset.from_dict({"text": ["a", "b"]}).to_parquet(file)
    content = file.read_bytes()
    if damage == "numbers":
        Dataset.from_dict({"text": [1]}).to_parquet(file)
    elif damage == "no text":
        offsets = pyarrow.py_buffer(bytes([0, 0, 0, 0, 4, 0, 0, 0]))
        wrong = pyarrow.StringArray.from_buffers(1, offsets, pyarrow.py_buffer(b"\xff\xfeab"))
        parquet.write_table(pyarrow.table({"text": wrong}), file)
    else:
        file.write_bytes({"truncated": content[:-30], "other": b"no table", "empty": b""}[damage])
    message = "must hold text" if damage == "numbers" else "must be in a readable parquet file"
    refused(message, of=file, source="parquet", path=str(file))


def test_too_long_line_is_refused(refused, tmp_path: Path):
    file = tmp_path / "a.jsonl"
    with file.open("w") as stream:
        stream.write(GOOD + '{"text": "')
        for _ in range(100):
            stream.write("x" * 10**6)
    refused("line 41 of .* has more; write one JSON object a line", of=file, source="jsonl",
            path=str(file))  # fmt: skip


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("**x", "is no such glob"),
        ("x" * 300, "x{200} files, and .* has none"),
        ("*.rs", r"\*.rs files.* none"),
    ],
)
def test_pattern_without_match_is_refused(refused, tmp_path: Path, pattern: str, message: str):
    (tmp_path / "a.txt").write_text("text")
    refused(message, of=tmp_path, source="files", path=str(tmp_path), patterns=[pattern])
    (tmp_path / "a.jsonl").mkdir()
    refused("a source needs|name too long", source="jsonl", path=str(tmp_path / pattern))


def test_broken_hub_stream_is_refused_in_one_line(refused, monkeypatch: pytest.MonkeyPatch):
    def breaking():
        yield {"text": "a"}
        raise ConnectionError("no route\nmore")

    def answer(*_, **__):
        return datasets.IterableDataset.from_generator(breaking)

    monkeypatch.setattr(datasets, "load_dataset", answer)
    message = "cannot load 'a/b' from the Hub: no route more; .* or pass a local file"
    refused(message, source="hub", path="a/b", max_documents=5)


# prompts


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no\nsystem role') }}", "no system role"),
        ("{% for", "unexpected"),
        ("{{ 1 // 0 }}", "by zero"),
        ("", "needs a token, .*; line 1 of"),
    ],
)
def test_failing_chat_template_error_names_the_row(tokenizer, tmp_path, template, message):
    tokenizer.chat_template = template
    file = tmp_path / "a.jsonl"
    file.write_text('{"turns": ["hello"]}\n')
    with pytest.raises(InputError, match=message) as caught:
        load_prompts(str(file), tokenizer, num_prompts=1)
    assert f"line 1 of {file}" in str(caught.value)


def test_tokenizer_without_unknown_token_is_refused(tmp_path: Path):
    words = Tokenizer(models.WordLevel({"x": 0, "end": 1}))
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    narrow = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="end")
    rows = tmp_path / "a.jsonl"
    rows.write_text('{"text": "y"}\n')
    with pytest.raises(InputError, match="a token for what is unknown"):
        load_prompts(str(rows), narrow, num_prompts=1)
    with pytest.raises(InputError, match="a token for what is unknown"):
        tokenise_corpus(DataSettings(source="jsonl", path=str(rows)), "train", narrow)


# bad rows of a set are listed together

HI, HELLO = {"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hello."}
EMPTY = {"messages": [HI, HELLO | {"content": ""}]}


def talks(tmp_path: Path, bad: dict[int, Any]) -> str:
    """Write a set of 60 conversations, of which some lines are others."""
    good = {"messages": [HI, HELLO]}
    rows = [
        row if isinstance(row := bad.get(line, good), str) else json.dumps(row)
        for line in range(1, 61)
    ]
    (tmp_path / "talks.jsonl").write_text("\n".join(rows))
    return str(tmp_path / "talks.jsonl")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({3: EMPTY}, r"1 row of .*must not be empty \(1: line 3 of \S*talks.jsonl has one"),
        (
            dict.fromkeys(range(11, 31), EMPTY),
            r"20 rows .*\(20: line 11 of \S* has one that is, line 12, line 13, line 14, line 15\)",
        ),
        (
            {2: EMPTY, 4: "{", 9: "[]", 12: {"messages": [HI, HELLO], "hint": "x"}, 14: EMPTY},
            r"5 rows .*\(2: line 2 .*line 14\).*JSON object a line \(2: line 4 .*, line 9\)"
            r".*hint.* \(1: line 12 ",
        ),
        ({5: {"messages": [HI, HELLO, HELLO]}}, r"1 row .*roles alternate.* \(1: line 5 of"),
        (
            {7: {"messages": [HI]}, 8: {"a": 1}},
            r"2 rows .*\(1: line 8 .*needs an answer.*\(1: line 7 ",
        ),
        ({50: {"messages": [HI | {"role": "bot"}, HELLO]}}, r"1 row .*role.*\(1: line 50 .*'bot'"),
    ],
)
def test_bad_rows_are_listed_together_or_dropped(chat_tokenizer, tmp_path, bad, message):
    chat_tokenizer.chat_template = ALTERNATING
    data = DataSettings(source="chat", path=talks(tmp_path, bad))
    with pytest.raises(InputError, match=message) as caught:
        tokenise_corpus(data, "train", chat_tokenizer)
    assert str(caught.value).endswith("leave them out with data.bad_rows=drop")
    with pytest.warns(UserWarning, match=f"{message}.*they are left out"):
        documents = tokenise_corpus(
            replace(data, bad_rows="drop"), split_of('["Hi?"]'), chat_tokenizer
        )
    assert len(documents) == 60 - len(bad)

"""What users' files can hold instead of text: one line with the file, the place and a remedy."""

import gzip
import json
import tracemalloc
from pathlib import Path

import datasets
import pyarrow
import pytest
from datasets import Dataset
from pyarrow import parquet
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specheads.config import Data
from specheads.core.errors import InputError
from specheads.core.files import local_path
from specheads.data.files import MAX_LINE, read_jsonl, whole_files
from specheads.data.prompts import load_prompts
from specheads.data.sources import SPLITS, read
from specheads.data.tokenise import tokenised

GOOD = "".join(json.dumps({"text": f"document {number}"}) + "\n" for number in range(40))
ROW = b'{"text": "a"}\n'


@pytest.fixture
def refused(tokenizer, cache_folder: Path):
    """Return what expects one line, and nothing left behind."""

    def expect(told: str, *, of: Path | str = "", **choices) -> None:
        with pytest.raises(InputError, match=told) as caught:
            tokenised(Data(**choices), "train", tokenizer)
        assert "\n" not in str(caught.value)
        assert str(of) in str(caught.value)
        assert not cache_folder.exists()

    return expect


def texts(corpus: Data) -> list[str]:
    return [row["text"] for split in SPLITS for _, row in read(corpus, split)]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b'{"text": \n', r"line 2 of .*no JSON from character 11 on; fix or remove it"),
        (b'{"text": "cut', "line 2 of .*no JSON from character 10 on"),
        (b'{"text": "a\x00b"}\n', "line 2 of .*no JSON from character 12 on"),
        (b'{"text": "a\\ud800b"}\n', "line 2 of .*half of a surrogate pair"),
        # pyarrow's parser ends the process here
        (b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n", "line 2 of .*nested too deep"),
        (b'{"text": ' + b"9" * 5000 + b"}\n", "line 2 of .*integer string conversion"),
        (b"3\n", "line 2 of .* it is a int, 3"),
        (b'["a"]\n', "line 2 of .* it is a list"),
        (b'{"text": "caf\xe9"}\n', "readable UTF-8 file.* make it readable"),
    ],
)
def test_bad_row_error_names_file_and_line(tmp_path: Path, content: bytes, told: str):
    file = tmp_path / "a.jsonl"
    file.write_bytes(ROW + content)
    with pytest.raises(InputError, match=told) as caught:
        list(read_jsonl(file))
    assert str(file) in str(caught.value)
    assert len(str(caught.value)) < 400


def test_byte_order_marks_blank_lines_and_line_ends_are_read(tmp_path: Path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + ROW + b"\r\n\n" + ROW.replace(b"\n", b"\r\n") + b" \n")
    assert [row["text"] for _, row in read_jsonl(file)] == ["a", "a"]
    file.write_text('{"text": "a \\ud83d\\ude00"}')
    assert [row["text"] for _, row in read_jsonl(file)] == ["a \U0001f600"]


def test_json_list_of_rows_is_read(tmp_path: Path):
    file = tmp_path / "a.json"
    file.write_text("\n \n" + json.dumps([{"text": "a"}, {"text": "b"}], indent=2))
    assert [row["text"] for _, row in read_jsonl(file)] == ["a", "b"]
    file.write_text('[{"text": "a"}, "b"]')
    with pytest.raises(InputError, match=r"row 2 of .* it is a str"):
        list(read_jsonl(file))
    file.write_text('[{"text": "a"}')
    with pytest.raises(InputError, match=r"the list in .* is none"):
        list(read_jsonl(file))


@pytest.mark.parametrize("damage", ["truncated", "checksum", "garbage"])
def test_damaged_gzip_is_refused(tmp_path: Path, damage: str):
    whole = gzip.compress(ROW * 100)
    damaged = {
        "truncated": whole[:-20],
        "checksum": whole[:-8] + bytes(8),
        "garbage": b"\x1f\x8b" + b"abc" * 40,
    }
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(damaged[damage])
    with pytest.raises(InputError, match="make it readable, or write it again"):
        list(read_jsonl(file))


def test_gzip_is_recognised_by_content(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(gzip.compress(ROW))
    (tmp_path / "b.jsonl.gz").write_bytes(ROW)
    found = [[row for _, row in read_jsonl(file)] for file in sorted(tmp_path.glob("*.jsonl*"))]
    assert found == [[{"text": "a"}]] * 2


def test_unreadable_file_is_refused(refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file, opened = tmp_path / "a.jsonl", Path.open
    file.write_bytes(ROW)

    def denied(self: Path, *arguments, **choices):
        if self != file:
            return opened(self, *arguments, **choices)
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(InputError, match="Permission denied"):
        list(read_jsonl(file))
    refused("cannot read .*Permission denied", of=file, source="files", path=str(tmp_path))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "holds no row"),
        ("\n\n", "holds no row"),
        (GOOD + '{"text": 3}\n', "column 'text' of line 41 of .* must hold text, it holds int"),
        (GOOD + '{"text": ["a"]}\n', "of line 41 of .* it holds list"),
        ('{"body": "a"}\n{"size": 1}\n', "no column 'text'; it has body, size"),
        ('{"text": null}\n', "at least one document"),
        (GOOD + '{"text": "half', "no JSON from character 10 on"),
        ("\x00\x01\x02" * 99, "no JSON from character 1 on"),
    ],
)
def test_corpus_without_text_is_refused(refused, tmp_path: Path, content: str, told: str):
    file = tmp_path / "a.jsonl"
    file.write_text(content)
    refused(told, of=file, source="jsonl", path=str(file))


def test_files_may_differ_in_columns_and_dates_stay_text(tmp_path: Path):
    # datasets would take the dates for times, and refuse the second file for its column
    dates = "".join(f'{{"text": "2020-01-{day:02}"}}\n' for day in range(1, 29))
    (tmp_path / "a.jsonl").write_text(dates)
    (tmp_path / "b.jsonl").write_text(GOOD.replace("}", ', "more": 1}'))
    found = texts(Data(source="jsonl", path=str(tmp_path)))
    assert {text[:4] for text in found} == {"2020", "docu"}


def test_changed_file_is_tokenised_again(tmp_path: Path, tokenizer):
    file = tmp_path / "a.jsonl"
    file.write_text(GOOD)
    first = tokenised(Data(source="jsonl", path=str(file)), "train", tokenizer)
    file.write_text(GOOD.replace("document", "page"))
    other = tokenised(Data(source="jsonl", path=str(file)), "train", tokenizer)
    assert "page" in tokenizer.decode(other.tokens(0))
    assert "document" in tokenizer.decode(first.tokens(0))


@pytest.mark.parametrize("damage", ["truncated", "other", "empty", "numbers", "no text"])
def test_damaged_parquet_is_refused(refused, tmp_path: Path, damage: str):
    file = tmp_path / "a.parquet"
    Dataset.from_dict({"text": ["a", "b"]}).to_parquet(file)
    whole = file.read_bytes()
    if damage == "numbers":
        Dataset.from_dict({"text": [1]}).to_parquet(file)
    elif damage == "no text":
        offsets = pyarrow.py_buffer(bytes([0, 0, 0, 0, 4, 0, 0, 0]))
        wrong = pyarrow.StringArray.from_buffers(1, offsets, pyarrow.py_buffer(b"\xff\xfeab"))
        parquet.write_table(pyarrow.table({"text": wrong}), file)
    else:
        file.write_bytes({"truncated": whole[:-30], "other": b"no table", "empty": b""}[damage])
    told = {"numbers": "must hold text", "no text": "must be UTF-8 text"}.get(damage, "cannot read")
    refused(told, of=file, source="parquet", path=str(file))


def test_too_long_line_list_or_file_is_refused(
    refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "a.jsonl"
    with file.open("w") as stream:
        stream.write(GOOD + '{"text": "')
        for _ in range(100):
            stream.write("x" * 10**6)
    refused("line 41 of .* has more; write one JSON object a line", of=file, source="jsonl",
            path=str(file))  # fmt: skip
    monkeypatch.setattr("specheads.data.files.MAX_LIST", 1000)
    file.write_text("[\n" + ",\n".join(['{"text": "a"}'] * 100) + "]")
    refused("a list of rows holds at most", of=file, source="jsonl", path=str(file))
    monkeypatch.setattr("specheads.data.files.MAX_FILE_BYTES", 1000)
    refused("source 'text'", of=file, source="files", path=str(tmp_path))


def test_only_the_beginning_of_a_too_long_line_is_read(tmp_path: Path):
    file = tmp_path / "a.jsonl"
    with file.open("wb") as stream:
        # 1 GB of zeros, of which the disk holds nothing
        stream.truncate(10**9)
    tracemalloc.start()
    with pytest.raises(InputError, match=r"line 1 of .* has more"):
        list(read_jsonl(file))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # its pieces, and these joined
    assert peak < 2.5 * MAX_LINE


def test_every_parquet_file_needs_the_column(refused, tmp_path: Path):
    Dataset.from_dict({"text": ["a"] * 99}).to_parquet(tmp_path / "a.parquet")
    Dataset.from_dict({"body": ["a"] * 99}).to_parquet(tmp_path / "b.parquet")
    refused(r"b\.parquet has no column 'text'; it has body", source="parquet", path=str(tmp_path))


def test_text_file_that_is_not_utf8_or_empty_is_refused(refused, tmp_path: Path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"\xff\xfe\x00" * 9)
    refused("a readable UTF-8 file", of=file, source="text", path=str(file))
    file.write_bytes(b"")
    refused("at least one document", of=file, source="text", path=str(file))


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("/abs/**", "a glob below"),
        ("../*", "leads out of there"),
        ("", "a glob below"),
        (".", "a glob below"),
        ("**x", "a glob below"),
        ("x" * 300, "File name too long"),
        ("*.rs", "no file below .* matches '\\*.rs'"),
    ],
)
def test_pattern_without_match_is_refused(refused, tmp_path: Path, pattern: str, told: str):
    (tmp_path / "a.txt").write_text("text")
    refused(told, of=tmp_path, source="files", path=str(tmp_path), patterns=[pattern])


@pytest.mark.parametrize("path", ["x" * 300, "~nobodyatall/x"])
@pytest.mark.parametrize("source", ["files", "jsonl", "parquet"])
def test_impossible_path_is_refused(refused, source: str, path: str):
    refused("a path must be one that this machine can read", source=source, path=path)


def test_missing_relative_path_is_refused(refused):
    refused("'../no/such' is not there", source="jsonl", path="../no/such")


def test_byte_order_mark_is_removed(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfa")
    assert [row["text"] for _, row in whole_files([tmp_path / "a.txt"])] == ["a"]


def test_local_path_accepts_new_paths_and_home(tmp_path: Path):
    assert local_path(str(tmp_path / "new")) == tmp_path / "new"
    assert local_path("~") == Path.home()


def test_glob_of_folders_or_bad_glob_is_refused(refused, tmp_path: Path):
    (tmp_path / "a.jsonl").mkdir()
    refused("needs a file, a folder or a glob", source="jsonl", path=str(tmp_path / "*"))
    refused("a pattern must be a glob", source="jsonl", path=str(tmp_path / "**x"))


def test_broken_hub_stream_is_refused_in_one_line(refused, monkeypatch: pytest.MonkeyPatch):
    def breaking():
        yield {"text": "a"}
        raise pyarrow.ArrowInvalid("JSON parse error\nmore")

    def answer(*_, **__):
        return datasets.IterableDataset.from_generator(breaking)

    monkeypatch.setattr(datasets, "load_dataset", answer)
    refused("cannot load 'a/b' from the Hub", source="hub", path="a/b", max_documents=5)


# prompts


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ raise_exception('no\nsystem role') }}", "no system role"),
        ("{% for", "unexpected"),
        ("{{ messages.x.y }}", "has no attribute 'x'"),
        ("{{ 1 + messages[0].content }}", "unsupported operand"),
        ("{{ 1 // 0 }}", "by zero"),
        ("", "needs a token, and the tokenizer gives line 1 of"),
    ],
)
def test_failing_chat_template_error_names_the_row(tokenizer, tmp_path, template, told):
    tokenizer.chat_template = template
    file = tmp_path / "a.jsonl"
    file.write_text('{"turns": ["hello"]}\n')
    with pytest.raises(InputError, match=told) as caught:
        load_prompts(str(file), tokenizer, num_prompts=1)
    assert f"line 1 of {file}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tokenizer_without_unknown_token_is_refused(tmp_path: Path):
    words = Tokenizer(models.WordLevel({"x": 0, "end": 1}))
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    narrow = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="end")
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "y"}\n')
    with pytest.raises(InputError, match="a token for what is unknown"):
        load_prompts(str(file), narrow, num_prompts=1)
    with (
        pytest.warns(UserWarning, match="fastokens does not read"),
        pytest.raises(InputError, match="a token for what is unknown"),
    ):
        load_prompts("python_stdlib", narrow, num_prompts=1)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "y"}\n')
    with (
        pytest.warns(UserWarning, match="fastokens does not read"),
        pytest.raises(InputError, match="a token for what is unknown"),
    ):
        tokenised(Data(source="jsonl", path=str(rows)), "train", narrow)


def test_prompts_longer_than_every_document_are_refused(tokenizer):
    with pytest.raises(InputError, match=r"no document .* has 100000000 tokens; lower"):
        load_prompts("python_stdlib", tokenizer, num_prompts=1, prompt_tokens=100_000_000)


def test_keys_of_a_row_stay_in_one_line(tokenizer, tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"a\nb": 1} | {f"key {number}": 1 for number in range(999)}))
    with pytest.raises(InputError, match="it has a b, key 0") as caught:
        load_prompts(str(file), tokenizer, num_prompts=1)
    assert len(str(caught.value)) < 400

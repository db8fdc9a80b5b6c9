"""A corpus is read whole, or what is left out is named: files, formats, rows, ends of answers."""

import bz2
import gzip
import io
import json
import lzma
import os
import sqlite3
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from specheads.config.data import DataSettings
from specheads.core.errors import InputError
from specheads.data.chat import Template
from specheads.data.conversations import conversation
from specheads.data.sources import read_source, report_source
from tests.data.conftest import write_jsonl

ROWS = [{"text": f"document {number}"} for number in range(8)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def texts(data: DataSettings) -> list[str]:
    return [document["text"] for _, _, document in read_source(data)]


def jsonl(path: Path | str, **settings) -> DataSettings:
    return DataSettings(source="jsonl", path=str(path), **settings)


# files of a folder


def link_folder_and_file(folder: Path) -> None:
    (folder / "elsewhere" / "deep").mkdir(parents=True)
    write_jsonl(folder / "elsewhere" / "deep" / "b.jsonl", ROWS[4:])
    (folder / "data" / "more").symlink_to(folder / "elsewhere")


def link_to_a_parent(folder: Path) -> None:
    (folder / "data" / "in").mkdir()
    write_jsonl(folder / "data" / "in" / "b.jsonl", ROWS[4:])
    (folder / "data" / "in" / "up").symlink_to(folder)


def two_links_to_one_folder(folder: Path) -> None:
    link_folder_and_file(folder)
    (folder / "data" / "again").symlink_to(folder / "elsewhere")


def link_of_links(folder: Path) -> None:
    link_folder_and_file(folder)
    (folder / "data" / "more").rename(folder / "first")
    (folder / "data" / "second").symlink_to(folder / "first")


def files_as_in_the_cache_of_the_hub(folder: Path) -> None:
    blobs = folder / "data" / ".blobs"
    blobs.mkdir()
    write_jsonl(blobs / "0a1b", ROWS[4:])
    (folder / "data" / "b.jsonl").symlink_to(blobs / "0a1b")


@pytest.mark.parametrize("path", ["data", "data/**/*.jsonl", "pattern"])
@pytest.mark.parametrize(
    "build",
    [
        link_folder_and_file,
        link_to_a_parent,
        two_links_to_one_folder,
        link_of_links,
        files_as_in_the_cache_of_the_hub,
    ],
)
def test_links_are_followed_once(tmp_path: Path, build: Callable[[Path], None], path: str):
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data" / "a.jsonl", ROWS[:4])
    build(tmp_path)
    data = jsonl(tmp_path / path)
    if path == "pattern":
        data = jsonl(tmp_path / "data", patterns=["**/*.jsonl"])
    assert sorted(texts(data)) == [row["text"] for row in ROWS]


def other_name(folder: Path) -> None:
    (folder / "latest.jsonl").symlink_to("b.jsonl")


def other_name_that_sorts_first(folder: Path) -> None:
    (folder / "0.jsonl").symlink_to(folder / "b.jsonl")


def other_name_in_a_folder(folder: Path) -> None:
    (folder / "in").mkdir()
    (folder / "in" / "b.jsonl").symlink_to(folder / "b.jsonl")


def two_names_of_one_file_elsewhere(folder: Path) -> None:
    (folder / "b.jsonl").rename(folder.parent / "b")
    for name in ("c.jsonl", "d.jsonl"):
        (folder / name).symlink_to(folder.parent / "b")


def name_of_a_name(folder: Path) -> None:
    other_name(folder)
    (folder / "newest.jsonl").symlink_to("latest.jsonl")


@pytest.mark.parametrize(
    "link",
    [
        other_name,
        other_name_that_sorts_first,
        other_name_in_a_folder,
        two_names_of_one_file_elsewhere,
        name_of_a_name,
    ],
)
def test_file_with_two_names_is_read_once_and_named(tmp_path: Path, link: Callable[[Path], None]):
    folder = tmp_path / "data"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", ROWS[:4])
    write_jsonl(folder / "b.jsonl", ROWS[4:])
    link(folder)
    assert sorted(texts(jsonl(folder))) == [row["text"] for row in ROWS]
    assert "read by another name" in report_source(jsonl(folder))[1]
    assert len(texts(jsonl(folder / "*.jsonl"))) == len(ROWS)


@pytest.mark.parametrize("name", ["a.jsonl", "b.jsonl", "in/c.jsonl", "in/d.json", "linked.jsonl"])
def test_locked_file_stops_or_is_named(tmp_path: Path, name: str, monkeypatch):
    (tmp_path / "in").mkdir()
    for file in ("a.jsonl", "b.jsonl", "in/c.jsonl", "in/d.json"):
        write_jsonl(tmp_path / file, ROWS[:2])
    (tmp_path / "linked.jsonl").symlink_to(write_jsonl(tmp_path / "in" / ".hidden", ROWS[:2]))
    # root can read anything
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != tmp_path / name)
    with pytest.raises(InputError, match=rf"without access .*{name}.*data.bad_rows=drop"):
        texts(jsonl(tmp_path))
    with pytest.warns(UserWarning, match=rf"without access .*{name}.*they are left out"):
        assert len(texts(jsonl(tmp_path, bad_rows="drop"))) == 8
    # a pattern that does not reach the file needs no file
    assert texts(jsonl(tmp_path, patterns=["*/*" if "/" not in name else "a.*"]))


@pytest.mark.parametrize("content", ["", "\n", " \n\t\n", "\r\n\r\n", "\ufeff"])
def test_file_without_a_row_is_named(tmp_path: Path, content: str):
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    (tmp_path / "part-3.jsonl").write_text(content, encoding="utf-8")
    with pytest.warns(UserWarning, match=r"left out: 1 without a row \(.*part-3.jsonl"):
        assert len(texts(jsonl(tmp_path))) == len(ROWS)
    assert report_source(jsonl(tmp_path))[1].startswith("leaves out files: 1 without a row")


def test_report_counts_rows_without_text(tmp_path: Path):
    write_jsonl(tmp_path / "a.jsonl", [*ROWS, {"text": None}, {"text": ""}, {"text": " \n"}])
    read, left_out = report_source(jsonl(tmp_path))
    assert "8 rows of" in read
    assert left_out == "leaves out rows: 3, without text"


@pytest.mark.parametrize("name", ["gone.jsonl", "in/gone.jsonl", "itself.jsonl", "pipe.jsonl"])
def test_file_that_cannot_be_read_stops_or_is_named(tmp_path: Path, name: str):
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    (tmp_path / "in").mkdir()
    if name == "pipe.jsonl":
        os.mkfifo(tmp_path / name)
    else:
        target = tmp_path / (name if name == "itself.jsonl" else "nowhere")
        (tmp_path / name).symlink_to(target)
    with pytest.raises(InputError, match=rf"must be readable, .*{name}.*data.bad_rows=drop"):
        texts(jsonl(tmp_path))
    with pytest.warns(UserWarning, match=rf"{name}.*they are left out"):
        assert len(texts(jsonl(tmp_path, bad_rows="drop"))) == len(ROWS)
    # a pattern that does not reach the file needs no file
    assert len(texts(jsonl(tmp_path, patterns=["a.*"]))) == len(ROWS)


def test_report_names_what_is_read_and_left_out(tmp_path: Path):
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "set")
    write_jsonl(tmp_path / "set" / ".hidden.jsonl", ROWS)
    (tmp_path / "set" / "README.md").write_text("about")
    write_jsonl(tmp_path / "set" / "b.jsonl", [*ROWS, {"text": 3}])
    lines = report_source(DataSettings(source="parquet", path=str(tmp_path / "set")))
    assert "reads 1 files, " in lines[0]
    assert "8 rows of" in lines[0]
    for phrase in ("2 metadata of datasets", "1 hidden", "2 of other names"):
        assert any(phrase in line for line in lines)
    data = jsonl(tmp_path / "set", patterns=["b.*"])
    assert report_source(data)[-1] == "leaves out rows: 1, a row must hold text in 'text'"


# formats


def zst(data: bytes) -> bytes:
    return pa.compress(data, "zstd", asbytes=True)


def lz4(data: bytes) -> bytes:
    buffer = pa.BufferOutputStream()
    with pa.CompressedOutputStream(buffer, "lz4") as stream:
        stream.write(data)
    return buffer.getvalue().to_pybytes()


@pytest.mark.parametrize("compress", [bytes, gzip.compress, bz2.compress, lzma.compress, zst, lz4])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json.gz", "a.jsonl.zst"])
def test_compression_is_known_by_its_first_bytes(tmp_path: Path, compress, name: str):
    (tmp_path / name).write_bytes(compress(LINES))
    assert texts(jsonl(tmp_path)) == [row["text"] for row in ROWS]
    (tmp_path / "t.txt").write_bytes(compress(b"some text\r\n"))
    text = DataSettings(source="text", path=str(tmp_path / "t.txt"))
    assert texts(text) == ["some text\r\n"]


TABLE = pa.Table.from_pylist(ROWS)
WITH_OTHER_TYPES = {
    "text": TABLE["text"].dictionary_encode(),
    "when": pa.array([0] * 8, pa.timestamp("s")),
}


@pytest.mark.parametrize(
    ("table", "format"),
    [
        (TABLE, pa.ipc.new_stream),
        (TABLE, pa.ipc.new_file),
        (pa.table({"text": TABLE["text"].cast(pa.binary())}), pq.ParquetWriter),
        (pa.table(WITH_OTHER_TYPES), pq.ParquetWriter),
    ],
)
@pytest.mark.parametrize("name", ["a.table", "a.jsonl", "a"])
def test_table_is_known_by_its_first_bytes(tmp_path: Path, table, format, name: str):
    suffix = ".parquet" if format is pq.ParquetWriter else ".arrow"
    file = tmp_path / name.replace(".table", suffix)
    with format(str(file), table.schema) as writer:
        writer.write_table(table)
    assert texts(jsonl(file)) == [row["text"] for row in ROWS]


def zip_archive(file: Path) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.jsonl", LINES)


def tar_archive(file: Path, mode: Literal["w", "w:gz", "w:xz"]) -> None:
    info = tarfile.TarInfo("a.jsonl")
    info.size = len(LINES)
    with tarfile.open(file, mode) as archive:
        archive.addfile(info, io.BytesIO(LINES))


def database(file: Path) -> None:
    with sqlite3.connect(file) as connection:
        connection.execute("create table rows (text)")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"prompt,answer\nHi?,Hello.\nWho?,I.\n", "is CSV .*to_parquet"),
        (b"prompt\tanswer\nHi?\tHello.\n", "is CSV"),
        (b'id;text\n1;"a"\n2;"b"\n', "is CSV"),
        (json.dumps({"text": "a"}, indent=2).encode(), "pretty-printed JSON; .*jq -c"),
        (b"\n".join(json.dumps(row, indent=1).encode() for row in ROWS), "pretty-printed JSON"),
        (json.dumps({"rows": ROWS * 50}, indent=4).encode(), "pretty-printed JSON"),
        (LINES.decode().encode("utf-16"), "is text in UTF-16"),
        (zip_archive, "is a zip archive"),
        (LINES.decode().encode("utf-16-le"), "is no text; .*UTF-8"),
        (LINES.decode().encode("utf-32-be"), "is no text"),
        (partial(tar_archive, mode="w"), "is no text; unpack an archive"),
        (partial(tar_archive, mode="w:gz"), "is no text; unpack an archive"),
        (partial(tar_archive, mode="w:xz"), "is no text; unpack an archive"),
        (b"\0" * 64 + LINES, "is no text"),
        (b"caf\xe9\n" + LINES, "is no text"),
        (database, "is an SQLite database"),
        (b"[" + LINES.replace(b"\n", b",\n")[:-2], "one JSON list, .* after row 8"),
        (b'[{"text": "a"}] {"text": "b"}', "one JSON list, .* text follows its end"),
    ],
)
@pytest.mark.parametrize("bad_rows", ["stop", "drop"])
def test_other_format_is_named_with_the_way_out(tmp_path: Path, content, message, bad_rows):
    file = tmp_path / "a.jsonl"
    if callable(content):
        content(file)
    else:
        file.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        texts(jsonl(file, bad_rows=bad_rows))
    assert str(file) in str(caught.value)


def test_remedy_for_csv_and_for_pretty_printed_json_leads_on(tmp_path: Path):
    Dataset.from_list(ROWS).to_csv(tmp_path / "a.csv")
    with pytest.raises(InputError, match="to_parquet"):
        texts(jsonl(tmp_path / "a.csv"))
    Dataset.from_csv(str(tmp_path / "a.csv"), cache_dir=str(tmp_path)).to_parquet(
        tmp_path / "a.parquet"
    )
    assert texts(jsonl(tmp_path / "a.parquet")) == [row["text"] for row in ROWS]
    (tmp_path / "b.jsonl").write_text(json.dumps(ROWS[0], indent=2))
    with pytest.raises(InputError, match="write one object a line"):
        texts(jsonl(tmp_path / "b.jsonl"))
    (tmp_path / "b.jsonl").write_text(json.dumps(ROWS[0]))
    assert len(texts(jsonl(tmp_path / "b.jsonl"))) == 1


@pytest.mark.parametrize("data", ["jsonl", "text", "files", "parquet"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_line_ends_are_those_of_the_file(tmp_path: Path, data: str, end: str):
    text = f"one{end}{end}two{end}"
    file = tmp_path / "a"
    if data == "jsonl":
        write_jsonl(file, [{"text": text}])
    elif data == "parquet":
        Dataset.from_list([{"text": text}]).to_parquet(file)
    else:
        file.write_bytes(text.encode())
    assert texts(DataSettings(source=data, path=str(file))) == [text]


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-16", "shift_jis", "cp1251"])
def test_files_in_another_encoding_are_counted(tmp_path: Path, encoding: str):
    word = {"shift_jis": "日本", "cp1251": "слово"}.get(encoding, "é")
    (tmp_path / "a.md").write_text("plain")
    for name in ("b.md", "c.md"):
        (tmp_path / name).write_bytes(word.encode(encoding))
    with pytest.warns(UserWarning, match=r"are left out: 2 not in UTF-8 \(.*b.md, .*c.md\)"):
        assert texts(DataSettings(source="files", path=str(tmp_path))) == ["plain"]


# rows


@pytest.mark.parametrize(
    "line",
    [
        '{"text": "a", "text": "a"}',
        '{"text": "caf\udce9"}',
        '{"text": "a", "\udc80": "a"}',
        '{"text": "a", "meta": {"k": 1, "k": 2}}',
        '{"text": "a", "meta": [{"k": 1, "j": 0, "k": 1}]}',
        '{"text": "a \\udc00"}',
        '{"text": "a", "\\ud800": 1}',
        '"text"',
    ],
)
@pytest.mark.parametrize("form", ["lines", "list"])
def test_one_bad_row_is_named_and_dropped_alone(tmp_path: Path, line: str, form: str):
    lines = [*map(json.dumps, ROWS[:4]), line, *map(json.dumps, ROWS[4:])]
    file = tmp_path / "a.json"
    text = "\n".join(lines) if form == "lines" else f"[{', '.join(lines)}]"
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(InputError, match=r"1 row of .*(line|row) 5 of"):
        texts(jsonl(file))
    with pytest.warns(UserWarning, match="1 row of .* left out"):
        assert texts(jsonl(file, bad_rows="drop")) == [row["text"] for row in ROWS]


def test_key_twice_in_nested_json_is_refused():
    for arguments in ('{"city": "Rome", "city": "Oslo"}', '{"a": {"b": 1, "b": 2}}'):
        call = {"role": "assistant", "tool_calls": [{"name": "sun", "arguments": arguments}]}
        with pytest.raises(InputError, match="twice"):
            conversation({"messages": [{"role": "user", "content": "Sun?"}, call]})


TWO = [pa.array(["a"] * 3), pa.array(["b"] * 3)]
PAIR = pa.StructArray.from_arrays(TWO, names=["k", "k"])


@pytest.mark.parametrize(
    ("arrays", "names"),
    [
        (TWO, ["text", "text"]),
        ([*TWO, TWO[0]], ["text", "meta", "meta"]),
        ([TWO[0], PAIR], ["text", "meta"]),
        ([TWO[0], pa.StructArray.from_arrays([PAIR], names=["in"])], ["text", "meta"]),
        ([TWO[0], pa.ListArray.from_arrays([0, 1, 2, 3], PAIR)], ["text", "meta"]),
    ],
)
@pytest.mark.parametrize("bad_rows", ["stop", "drop"])
def test_table_with_a_name_twice_is_refused(tmp_path: Path, arrays, names, bad_rows: str):
    table, file = pa.table(arrays, names=names), tmp_path / "a.arrow"
    if names[-1] == "text":
        pq.write_table(table, tmp_path / "a.parquet")
        with pytest.raises(InputError, match=r"a.parquet has others: it has a column twice"):
            texts(jsonl(tmp_path / "a.parquet", bad_rows=bad_rows))
    with pa.ipc.new_file(str(file), table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(InputError, match=r"each key once, and .*a.arrow has others"):
        texts(jsonl(file, bad_rows=bad_rows))


@pytest.mark.parametrize("bad_rows", ["stop", "drop"])
def test_parquet_map_with_a_key_twice_is_a_bad_row(tmp_path: Path, bad_rows: str):
    pairs = [[("a", "1")], [("a", "1"), ("a", "2")], [], None]
    maps = pa.array(pairs, pa.map_(pa.string(), pa.string()))
    messages = [[{"role": "user", "content": text}] for text in "abcd"]
    pq.write_table(pa.table({"messages": messages, "metadata": maps}), tmp_path / "a.parquet")
    data = DataSettings(source="chat", path=str(tmp_path / "a.parquet"), bad_rows=bad_rows)
    with (
        pytest.warns(UserWarning, match=r"row 2 of .* twice")
        if bad_rows == "drop"
        else pytest.raises(InputError, match=r"row 2 of .* twice")
    ):
        assert len(list(read_source(data))) == 3


@pytest.mark.parametrize("end", [",\n", ", \r\n", ";\n", "\x1e\n", "]\n"])
def test_line_with_more_than_its_object_is_a_bad_row(tmp_path: Path, end: str):
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(row) + end for row in ROWS), newline="")
    with pytest.raises(InputError, match=r"8 rows of .*line 1 of .* is none, .*Extra data"):
        texts(jsonl(file))


# ends of answers

TURNS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize("end", ["{}", "{}\n", " {}", "\n\n{}  ", "{}\r\n"])
@pytest.mark.parametrize("turn", [1, 3])
def test_answer_with_the_end_of_the_template_is_learned_with_one(tokenizer, end: str, turn: int):
    tokenizer.chat_template = TURNS
    messages = [
        {"role": role, "content": text}
        for role, text in [
            ("user", "Hi?"),
            ("assistant", "Yes."),
            ("user", "No?"),
            ("assistant", "No."),
        ]
    ]
    expected = Template(tokenizer).samples(messages)
    messages[turn]["content"] += end.format(tokenizer.eos_token)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Template(tokenizer).samples(messages) == expected

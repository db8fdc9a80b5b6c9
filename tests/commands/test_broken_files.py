"""Broken files of conversations: one line each, and no file is left."""

import gzip
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specheads.base.model import FrozenBase
from specheads.commands._call import call

BASE = Path(__file__).parents[2] / "recipes" / "tiny_code" / "base"

TEMPLATE = (
    "{% for m in messages %}{{ '### ' + m.role + '\n' + m.content + '<|endoftext|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '### assistant\n' }}{% endif %}"
)

ASKED, ANSWERED = {"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hello."}


def talk(*messages: Any) -> bytes:
    return json.dumps({"messages": messages}).encode() + b"\n"


GOOD = b"".join(talk({"role": "user", "content": f"Hi {n}?"}, ANSWERED) for n in range(60))
"""Enough conversations to train on; the fault follows them."""

FILES: dict[str, tuple[bytes, str]] = {
    "no JSON": (GOOD + b"{not json}\n", "line 61 of talks.jsonl is none, "),
    "half a row": (GOOD[:-20], "line 60 of talks.jsonl is none, "),
    "a web page": (b"<!DOCTYPE html>\n<html></html>\n", "line 1 of talks.jsonl is none"),
    "no messages": (GOOD + b'{"title": "Hi"}\n', "line 61 of talks.jsonl has title"),
    "unknown role": (GOOD + talk({"role": "bot", "content": "Hi?"}), "talks.jsonl has 'bot'"),
    "empty": (b"", "talks.jsonl holds no row"),
    "blank lines": (b"\n  \n\t\n\n", "talks.jsonl holds no row"),
    "binary": (random.Random(0).randbytes(5000), "a readable UTF-8 file, and talks.jsonl is not"),
    "zeros": (bytes(5000), "line 1 of talks.jsonl is none, "),
    "gzip cut short": (gzip.compress(GOOD)[:-20], "talks.jsonl is not: Compressed file ended"),
    "broken row in gzip": (gzip.compress(GOOD + b"{not json}\n"), "line 61 of talks.jsonl is none"),
    "UTF-16": (GOOD.decode().encode("utf-16"), "a readable UTF-8 file, and talks.jsonl is not"),
    "latin-1": (
        GOOD + talk(ASKED, {**ANSWERED, "content": "caf_"}).replace(b"_", b"\xe9"),
        "a readable UTF-8 file, and talks.jsonl is not",
    ),
    "mixed schemas": (GOOD + b'{"text": "plain"}\n', "line 61 of talks.jsonl has text"),
    "two schemas in a row": (
        GOOD + b'{"messages": [], "conversations": []}\n',
        "line 61 of talks.jsonl has empty columns only",
    ),
    "text for messages": (GOOD + b'{"messages": "Hi?"}\n', "line 61 of talks.jsonl has 'Hi?'"),
    "texts for messages": (GOOD + talk("Hi?"), "line 61 of talks.jsonl has 'Hi?' among them"),
    "no message": (GOOD + talk(), "line 61 of talks.jsonl has empty columns only"),
    "a number for content": (
        GOOD + talk({"role": "user", "content": 3}, ANSWERED),
        "line 61 of talks.jsonl has int",
    ),
    "nobody asks": (
        GOOD + talk({"role": "system", "content": "Be nice."}),
        "line 61 of talks.jsonl has only system",
    ),
    "half a surrogate pair": (
        GOOD + talk({"role": "user", "content": "\ud800"}),
        "line 61 of talks.jsonl is none, ",
    ),
    "nested too deep": (
        GOOD + b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
        "line 61 of talks.jsonl is none, ",
    ),
    # control characters, and line breaks that only some readers know
    "keys for a terminal": (GOOD + b'{"\\u001b[2J\\u2028\\n": 1}\n', "has \\x1b[2J"),
}
"""Content of talks.jsonl, and text that the message must contain."""

COMMANDS = {
    "train": ("train", "evaluate_after=false"),
    "preview": ("train", "preview=3"),
    "distill": ("distill", "out=text"),
}
# all of them read like train; the others are slow tests
EACH = [
    "train",
    *(pytest.param(name, marks=pytest.mark.slow) for name in COMMANDS if name != "train"),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a base with a chat template."""
    folder = tmp_path_factory.mktemp("bases") / "chat"
    shutil.copytree(BASE, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def loaded(base: Path) -> FrozenBase:
    """Return the loaded base."""
    return FrozenBase.load(base, device="cpu")


@pytest.fixture
def refused(
    base: Path, loaded: FrozenBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> Callable[..., str]:
    """Return a function that runs a command on a path and returns its error line."""
    monkeypatch.setattr("specheads.commands.train.load_base", lambda *_: loaded)
    work, cache = tmp_path / "work", tmp_path / "cache"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("SPECHEADS_CACHE", str(cache))

    def run(how: str, path: str = "talks.jsonl") -> str:
        before = sorted(work.rglob("*"))
        command, *words = COMMANDS[how]
        data = ["data.source=chat", f"data.path={path}"]
        with pytest.raises(SystemExit) as left:
            call(command, ["recipe=smoke", f"base.model={base}", *data, *words])
        out, said = capsys.readouterr()
        assert left.value.code == 2, said
        assert said.startswith("error: ")
        assert said.endswith("\n")
        assert len(said.splitlines()) == 1, said
        assert len(said) < 500
        assert said[:-1].isprintable()
        assert not out
        assert sorted(work.rglob("*")) == before
        assert not cache.exists()
        return said

    return run


@pytest.mark.parametrize("how", EACH)
@pytest.mark.parametrize("name", FILES)
def test_broken_file_gets_one_line_and_leaves_nothing(how: str, name: str, refused: Any):
    content, told = FILES[name]
    Path("talks.jsonl").write_bytes(content)
    assert told in refused(how)


@pytest.mark.parametrize("how", EACH)
def test_line_of_100_mb_gets_one_line(how: str, refused: Any):
    with Path("talks.jsonl").open("wb") as stream:
        stream.write(GOOD + b'{"messages": [{"role": "user", "content": "')
        for _ in range(100):
            stream.write(b"x" * 10**6)
        stream.write(b'"}]}\n')
    assert "line 61 of talks.jsonl has more; write one JSON object a line" in refused(how)


@pytest.mark.parametrize("how", ["train", "preview"])
def test_corpus_without_answers_needs_a_distilled_phase(how: str, refused: Any):
    Path("talks.jsonl").write_bytes(GOOD + talk(ASKED))
    said = refused(how)
    assert "line 61 of talks.jsonl lacks one" in said
    assert "have the base answer it in a distilled phase" in said
    # what the assistant says first is no answer
    Path("talks.jsonl").write_bytes(GOOD + talk(ANSWERED, ASKED))
    assert "line 61 of talks.jsonl lacks one" in refused(how)


@pytest.mark.parametrize("how", EACH)
@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("nowhere.jsonl", "'nowhere.jsonl' is not there"),
        # no data set of the Hub is called so: nobody waits for the network
        ("nowhere", "'nowhere' is not there"),
        ("./no/where", "'./no/where' is not there"),
        ("nothing", "'nothing' has none"),
        ("nothing/*.jsonl", "'nothing/*.jsonl' is not there"),
        ("folder.jsonl", "'folder.jsonl' has none"),
        ("some", "line 61 of some/b.jsonl is none"),
        ("some/*.jsonl", "line 61 of "),
        ("table.parquet", "readable parquet file, and table.parquet is not"),
    ],
)
def test_path_without_conversations_is_refused(how: str, path: str, told: str, refused: Any):
    for folder in ("nothing", "folder.jsonl", "some"):
        Path(folder).mkdir()
    Path("nothing/readme.md").write_text("no rows", encoding="utf-8")
    Path("some/a.jsonl").write_bytes(GOOD)
    Path("some/b.jsonl").write_bytes(GOOD + b"{not json}\n")
    Path("table.parquet").write_bytes(GOOD)
    assert told in refused(how, path)

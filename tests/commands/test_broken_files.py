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
from specheads.config import data_dir

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
    "half a row": (GOOD[:-20], "line 60 of talks.jsonl is none, "),
    "no messages": (GOOD + b'{"title": "Hi"}\n', "line 61 of talks.jsonl has title"),
    "unknown role": (GOOD + talk({"role": "bot", "content": "Hi?"}), "talks.jsonl has 'bot'"),
    "empty": (b"", "talks.jsonl holds no row"),
    "binary": (random.Random(0).randbytes(5000), "a readable UTF-8 file, and talks.jsonl is not"),
    "gzip cut short": (gzip.compress(GOOD)[:-20], "talks.jsonl is not: Compressed file ended"),
    "mixed schemas": (GOOD + b'{"text": "plain"}\n', "line 61 of talks.jsonl has text"),
    "a number for content": (
        GOOD + talk({"role": "user", "content": 3}, ANSWERED),
        "line 61 of talks.jsonl has int",
    ),
    "no answer": (GOOD + talk(ASKED), "have the base answer it in a distilled phase"),
    # what the assistant says first is no answer
    "no answer after a greeting": (
        GOOD + talk(ANSWERED, ASKED),
        "line 61 of talks.jsonl lacks one",
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


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a base with a chat template."""
    folder = tmp_path_factory.mktemp("bases") / "chat"
    shutil.copytree(data_dir("recipes") / "tiny_code" / "base", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def loaded(base: Path) -> FrozenBase:
    """Return the loaded base."""
    return FrozenBase.load(base, device="cpu")


@pytest.fixture
def refused(
    base: Path,
    loaded: FrozenBase,
    refusal: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., str]:
    """Return a function that trains on a path and returns its error line."""
    monkeypatch.setattr("specheads.commands.train.load_base", lambda *_: loaded)
    work, cache = tmp_path / "work", tmp_path / "cache"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("SPECHEADS_CACHE", str(cache))

    def run(path: str = "talks.jsonl", *more: str) -> str:
        before = sorted(work.rglob("*"))
        data = ["data.source=chat", f"data.path={path}", "evaluate_after=false"]
        said = refusal("train", "recipe=smoke", f"base.model={base}", *data, *more)
        assert said[:-1].isprintable()
        assert len(said) < 500
        assert sorted(work.rglob("*")) == before
        assert not cache.exists()
        return said

    return run


@pytest.mark.parametrize("name", FILES)
def test_broken_file_gets_one_line_and_leaves_nothing(name: str, refused: Any):
    content, told = FILES[name]
    Path("talks.jsonl").write_bytes(content)
    assert told in refused()


def test_preview_refuses_a_corpus_without_answers(refused: Any):
    Path("talks.jsonl").write_bytes(GOOD + talk(ASKED))
    assert "line 61 of talks.jsonl lacks one" in refused("talks.jsonl", "preview=3")


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("nowhere.jsonl", "'nowhere.jsonl' is not there"),
        # no data set of the Hub is called so: nobody waits for the network
        ("nowhere", "'nowhere' is not there"),
        ("nothing", "'nothing' has none"),
        ("nothing/*.jsonl", "'nothing/*.jsonl' is not there"),
        ("some", "line 61 of some/b.jsonl is none"),
        ("table.parquet", "cannot read 'table.parquet' as parquet"),
    ],
)
def test_path_without_conversations_is_refused(path: str, told: str, refused: Any):
    for folder in ("nothing", "some"):
        Path(folder).mkdir()
    Path("nothing/readme.md").write_text("no rows", encoding="utf-8")
    Path("some/a.jsonl").write_bytes(GOOD)
    Path("some/b.jsonl").write_bytes(GOOD + b"{not json}\n")
    Path("table.parquet").write_bytes(GOOD)
    assert told in refused(path)

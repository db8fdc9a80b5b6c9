"""A chat model writes what its users might ask."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from specheads.base.model import FrozenBase
from specheads.data.chat import Template
from specheads.data.conversations import conversation
from specheads.training.distill.engines import GeneratedAnswer
from tests.export.trained import BASE

CHAT = (
    "<sys>be brief\n{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
STOP = "<stop>"
"""Where the user stops the script."""
OPENING = "<sys>be brief\n<user>"


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch, script: ModuleType) -> FrozenBase:
    """tiny_code with a template, which ends a turn with a line."""
    base = FrozenBase.load(BASE, dtype="float32", device="cpu")
    tokenizer: Any = base.tokenizer
    tokenizer.chat_template = CHAT
    base.model.generation_config.eos_token_id = tokenizer("\n")["input_ids"][-1]
    monkeypatch.setattr(script.FrozenBase, "load", lambda *_, **__: base)
    return base


def run(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: str
) -> list[str]:
    argv = ["write_questions.py", "--base", "tiny", "--out", str(out), *arguments]
    monkeypatch.setattr(sys, "argv", argv)
    script.main()
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    conversations = [conversation(row, "a row")["messages"] for row in rows]
    assert all(len(messages) == 1 and messages[0]["role"] == "user" for messages in conversations)
    return [messages[0]["content"] for messages in conversations]


def plan(
    monkeypatch: pytest.MonkeyPatch, script: ModuleType, base: FrozenBase, texts: list[str]
) -> list[Any]:
    """Have the base write these; return what it was asked."""
    prompts: list[Any] = []
    tokenizer: Any = base.tokenizer

    def planned(pull: Any) -> Any:
        for text in texts:
            if text == STOP:
                raise KeyboardInterrupt
            if (ask := pull()) is None:
                return
            prompts.append(ask)
            ids = tokenizer(text.removesuffix("\n"))["input_ids"]
            is_whole = text.endswith("\n")
            ends = base.eos_ids if is_whole else ()
            yield GeneratedAnswer(ask.number, [*ids, *ends], "eos" if is_whole else "length")

    monkeypatch.setattr(script, "build_engine", lambda *_, **__: planned)
    return prompts


def test_what_a_user_says_is_written_behind_the_template_and_can_be_asked(
    script: ModuleType, base: FrozenBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    arguments = ("--num", "2", "--batch", "8", "--new-tokens", "40", "--seed", "3")
    texts, repeated, changed = (
        run(script, monkeypatch, tmp_path / f"{name}.jsonl", *arguments, *last)
        for name, last in (("a", ()), ("b", ()), ("c", ("--seed", "90")))
    )
    assert texts == repeated != changed
    assert len(set(texts)) == 2
    assert all(len(text.split()) >= 3 for text in texts)
    assert base.tokenizer is not None
    template = Template(base.tokenizer)
    ids = template.encode_prompt([{"role": "user", "content": texts[0]}])
    assert base.tokenizer.decode(ids) == f"{OPENING}{texts[0]}\n<assistant>"


def test_only_whole_questions_are_kept_and_each_once(
    script: ModuleType, base: FrozenBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    texts = ["How are you?\n", "Hi\n", "Why is the", "How are you?\n", " Who is there now?\n"]
    prompts = plan(monkeypatch, script, base, texts)
    options = ("--num", "2", "--seed", "7", "--temperature", "0.5", "--top-p", "0.8")
    texts = run(script, monkeypatch, tmp_path / "a.jsonl", *options)
    assert texts == ["How are you?", "Who is there now?"]
    assert base.tokenizer is not None
    assert {str(base.tokenizer.decode(ask.tokens)) for ask in prompts} == {OPENING}
    assert [ask.sampling.seed for ask in prompts] == [7, 8, 9, 10, 11]
    assert {(ask.sampling.temperature, ask.sampling.top_p) for ask in prompts} == {(0.5, 0.8)}


def test_stopped_script_continues_with_the_same_command(
    script: ModuleType, base: FrozenBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    out = tmp_path / "a.jsonl"
    prompts = plan(monkeypatch, script, base, ["How are you?\n", "Hi\n", STOP])
    with pytest.raises(SystemExit) as exit_error:
        run(script, monkeypatch, out, "--num", "2")
    assert exit_error.value.code == 130
    assert not out.exists()
    texts = ["How are you?\n", "Who is there now?\n"]
    again = plan(monkeypatch, script, base, texts)
    assert run(script, monkeypatch, out, "--num", "2") == ["How are you?", "Who is there now?"]
    assert [ask.number for ask in prompts + again] == [0, 1, 2, 3]
    assert [*tmp_path.iterdir()] == [out]


def test_questions_of_other_options_are_not_continued(
    script: ModuleType, base: FrozenBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    out = tmp_path / "a.jsonl"
    plan(monkeypatch, script, base, ["How are you?\n", STOP])
    with pytest.raises(SystemExit):
        run(script, monkeypatch, out, "--num", "2")
    plan(monkeypatch, script, base, ["Who is there now?\n"])
    assert run(script, monkeypatch, out, "--num", "1", "--seed", "5") == ["Who is there now?"]

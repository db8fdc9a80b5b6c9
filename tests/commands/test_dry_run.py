"""`specheads train preview=N`: examples of the training text, and broken conversations."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from specheads.commands._call import call

BASE = Path(__file__).parents[2] / "recipes" / "tiny_code" / "base"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TALK = {
    "messages": [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "\x1b]0;"}]
}


@pytest.fixture
def overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return overrides to train on one conversation with a base that has only a tokenizer."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    special = ["<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special, "eos_token": special[1]})
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained("base")
    Path("talks.jsonl").write_text(json.dumps(TALK) + "\n", encoding="utf-8")
    return ["recipe=smoke", "base.model=base", "data.source=chat", "data.path=talks.jsonl"]


def test_preview_shows_the_loss_mask_and_writes_no_run(overrides: list[str], capsys: Any):
    call("train", [*overrides, "preview=2"])
    output = capsys.readouterr().out
    # control characters are escaped
    example = "<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n⟦\\x1b]0;<|im_end|>⟧\n"
    assert example in output
    assert "--- 1 of 1: " in output
    assert not Path("runs").exists()


# a phase that reads the corpus itself would be refused: see below
@pytest.mark.parametrize("command", [["train", "~schedule.phases.corpus"], ["distill"]])
def test_corpus_of_questions_shows_prompts(command: list[str], overrides: list[str], capsys: Any):
    Path("talks.jsonl").write_text(json.dumps({"messages": TALK["messages"][:1]}) + "\n")
    call(command[0], [*command[1:], *overrides, "preview=2"])
    output = capsys.readouterr().out
    assert "the head learns its text" in output
    assert "--- 1 of 1: " in output
    assert output.endswith("<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n\n")


def test_wrong_loss_mask_prints_one_line_and_the_text(overrides: list[str], capsys: Any):
    loud = CHATML.replace("m.content", "(m.content | upper)")
    Path("base/chat_template.jinja").write_text(loud, encoding="utf-8")
    row = {"messages": [TALK["messages"][0], {"role": "assistant", "content": "Hello."}]}
    Path("talks.jsonl").write_text(json.dumps(row), encoding="utf-8")
    with pytest.raises(SystemExit) as stop:
        call("train", [*overrides, "preview=1"])
    assert stop.value.code == 2
    line, *details = capsys.readouterr().err.splitlines()
    rule = "1 row of talks.jsonl cannot be used: the tokenizer's chat template must write all"
    assert line.startswith(f"error: {rule}")
    assert details[-2:] == ["<|im_start|>assistant", "HELLO.<|im_end|>"]


def rows(*last_rows: dict[str, Any]) -> bytes:
    """Return 60 conversations, and rows after them."""
    return "".join(json.dumps(row) + "\n" for row in [TALK] * 60 + list(last_rows)).encode()


QUESTION = TALK["messages"][:1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (rows()[:-20], "line 60 of talks.jsonl is none, "),
        (rows({"messages": QUESTION}), "have the base answer it in a distilled phase"),
        # what the assistant says first is no answer
        (rows({"messages": TALK["messages"][::-1]}), "line 61 of talks.jsonl lacks one"),
        # control characters, and line breaks that only some readers know
        (rows({"\x1b[2J\u2028\n": 1}), "has \\x1b[2J"),
        (None, "'talks.jsonl' is not there"),
    ],
)
def test_broken_conversations_get_one_line_and_leave_nothing(
    content: bytes | None, message: str, overrides: list[str], refusal: Any
):
    Path("talks.jsonl").unlink()
    if content is not None:
        Path("talks.jsonl").write_bytes(content)
    before = sorted(Path().rglob("*"))
    line = refusal("train", *overrides, "preview=3")
    assert message in line
    assert line[:-1].isprintable()
    assert len(line) < 500
    assert sorted(Path().rglob("*")) == before

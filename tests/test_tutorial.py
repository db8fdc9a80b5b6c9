"""The commands of the tutorial run one after the other, at toy size."""

import io
import json
import re
import shlex
import sys
from pathlib import Path
from string import Template

import pytest

from specheads.commands._call import call
from tests import tiny
from tests.test_readme import FENCED, PAGES

PAGE = next(page for page in PAGES if page.name == "tutorial.md")
TRAINING = [
    "base.device=cpu",
    *("head.draft_tokens=64", "checkpoint_every=0", "validation.every=0", "validation.prompts=1"),
    *("evaluation.num_prompts=2", "evaluation.max_new_tokens=8", "evaluation.repeats=1"),
    *("evaluation.speed_prompts=2", "validation.new_tokens=8"),
    *(
        f"schedule.phases.{phase}.{setting}"
        for phase in ("corpus", "distilled")
        for setting in ("steps=2", "batch_size=2", "sequence_length=96")
    ),
    *(
        f"schedule.phases.distilled.distill.{setting}"
        for setting in ("num_samples=12", "new_tokens=12", "batch_size=12", "drop=[]")
    ),
]
TOY = {
    "train": TRAINING,
    "distill": TRAINING,
    "tune": ["max_nodes=4", "batch_sizes=[1]", "contexts=[16]", "num_prompts=4", "new_tokens=8"],
    "evaluate": [],
    "compare": ["drafters=[head,prompt_lookup]"],
    "chat": ["max_new_tokens=8"],
    "export": [],
    "push": [],
}
"""Overrides that make each command small; they follow those of the page."""


def lines() -> list[str]:
    """Return the command lines of the page, in order."""
    text = PAGE.read_text(encoding="utf-8")
    blocks = [body for kind, body in FENCED.findall(text) if kind == "sh"]
    return [line for body in blocks for line in body.replace("\\\n", " ").splitlines() if line]


def values(folder: Path) -> dict[str, str]:
    """Return the values of a reader: a chat model with a template, and conversations."""
    base = tiny.saved(folder / "base", num_hidden_layers=7)
    (base / "chat_template.jinja").write_text(tiny.CHAT, encoding="utf-8")
    talks = [
        {
            "question": f"What do you get if you add {first} to {second}, and why is it so?",
            "answer": f"It is {first + second}, as always.",
        }
        for first in range(12)
        for second in range(12)
    ]
    data = folder / "talks.jsonl"
    data.write_text("".join(f"{json.dumps(talk)}\n" for talk in talks), encoding="utf-8")
    return {"BASE": str(base), "DATA": str(data), "REPO": "someone/something"}


def undrafted(line: str) -> str:
    """Remove the number of drafted tokens, which depends on the tuned tree."""
    return re.sub(r'(num_speculative_tokens": )\d+', r"\1", line)


@pytest.mark.slow
def test_every_command_runs_and_the_last_one_is_what_export_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    given, called, printed = values(tmp_path), [], ""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"What is 1 and 2?\n")))
    named = {word.partition("=")[0] for word in lines() if re.match(r"[A-Z]+=", word)}
    assert named == given.keys()
    for line in lines():
        words = shlex.split(Template(line).substitute(given), comments=True)
        if words[0] == "specheads":
            call(words[1], [*words[2:], *TOY[words[1]]])
            printed = capsys.readouterr().out
            called.append(words[1])
        elif words[0] == "python":
            told = printed.strip().replace(f"{tmp_path}/served", "served")
            assert undrafted(shlex.join(words)) == undrafted(told)
        else:
            assert line.partition("=")[0] in given
    assert set(called) == TOY.keys()
    assert Path("text/report.md").exists()
    assert Path("runs/mine/head/tuned.json").exists()
    assert "bytes in all" in printed

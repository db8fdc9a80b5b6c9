"""The page on 8B: its files exist, and its commands run on CPUs with a two-layer base."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from string import Template

import psutil
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from specheads.commands._call import call
from specheads.heads.load import load_head
from tests import tiny
from tests.test_readme import FENCED, ROOT

PAGE = (ROOT / "docs" / "8b.md").read_text(encoding="utf-8")
TINY_CODE = ROOT / "recipes" / "tiny_code" / "base"
PHASE = "schedule.phases.distilled"
TOY = [
    "base.device=cpu", "head.draft_tokens=256", "head.depth=3", "head.aux_layers=[0,1]",
    "checkpoint_every=2",
    "validation.every=0", "validation.prompts=1", "validation.new_tokens=8", "validation.rows=2",
    f"{PHASE}.steps=6", f"{PHASE}.batch_size=8", f"{PHASE}.sequence_length=96", "log_every=1",
    "evaluation.num_prompts=2", "evaluation.max_new_tokens=8", "evaluation.speed_prompts=1",
    "evaluation.repeats=1",
    *(
        f"{PHASE}.distill.{setting}"
        for setting in (
            *("num_samples=48", "new_tokens=12", "batch_size=8", "drop=[]", "shard_size=4"),
        )
    ),
]  # fmt: skip


def page_lines() -> list[str]:
    # the last one has the values of the rehearsal
    blocks = [body for kind, body in FENCED.findall(PAGE) if kind == "sh"][:-1]
    return [line for body in blocks for line in body.replace("\\\n", " ").splitlines() if line]


def test_page_is_short_and_its_files_exist():
    assert len(PAGE.split()) <= 1800
    paths = re.findall(r"\b(?:configs|scripts)/[\w./]+\w", PAGE)
    assert len(paths) >= 5
    assert [path for path in paths if not (ROOT / path).is_file()] == []


def test_command_of_the_comparison_is_one_of_the_script(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    script = import_module("bench_serve")
    (line,) = [line for line in page_lines() if "bench_serve.py" in line]
    options = script._parse(shlex.split(Template(line).safe_substitute(DRAFTS="3"))[2:])
    assert len(options.url) == 1 + len(options.depths)


@pytest.fixture
def values(tmp_path: Path) -> dict[str, str]:
    """Return the values of a reader: a two-layer base of the 8B's architecture, and a file."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_CODE)
    tokenizer.chat_template = tiny.CHAT
    tokenizer.save_pretrained(tmp_path / "base")
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=False,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    talks = [{"question": f"What is {n} and {n + 1}?", "answer": "A sum."} for n in range(96)]
    data = tmp_path / "talks.jsonl"
    data.write_text("".join(f"{json.dumps(talk)}\n" for talk in talks), encoding="utf-8")
    return {"BASE": str(tmp_path / "base"), "DATA": str(data)}


def launch(line: str, values: dict[str, str], *more: str) -> subprocess.Popen[bytes]:
    """Start a launcher's line of the page on CPUs; `more` follows its words."""
    words = shlex.split(Template(line).substitute(values))
    assert words[:2] == ["accelerate", "launch"]
    options = ["--main_process_port", "0", "--mixed_precision", "no"]
    options += ["--num_processes", "4"] if "four" in more else []
    words = ["-m", "accelerate.commands.launch", *options, *words[2:], *TOY]
    environment = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, *words, *(word for word in more if word != "four")],
        env=os.environ | environment,
    )


@pytest.mark.slow
def test_commands_of_the_page_lead_from_text_to_a_served_head(
    values: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    for name in ("configs", "train.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    launched = [line for line in page_lines() if line.startswith("accelerate launch")]
    (distill,) = [line for line in launched if " distill " in line]
    train = next(line for line in launched if " train.py " in line)
    # in place of vLLM, which needs GPUs
    assert launch(distill, values, "engine=local").wait() == 0
    first = launch(train, values)
    while not (tmp_path / "runs/mine/checkpoints/step-2").is_dir():
        assert first.poll() is None
        time.sleep(0.05)
    # a launcher puts its processes into sessions of their own
    for process in [*psutil.Process(first.pid).children(recursive=True), first]:
        process.kill()
    first.wait()
    assert launch(train, values, "four").wait() == 0
    rows = (tmp_path / "runs/mine/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(row)["step"] for row in rows]
    assert sorted({*steps}) == [1, 2, 3, 4, 5, 6]
    for line in page_lines():
        words = shlex.split(Template(line).safe_substitute(values), comments=True)
        # SGLang reads three layers, and this base has two
        if words[:3] in (
            ["specheads", "evaluate", "run=runs/mine"],
            ["specheads", "export", "run=runs/mine"],
        ) and not {"engine=sglang"} & {*words}:
            call(words[1], words[2:])
    assert (tmp_path / "runs/mine/report/results.json").is_file()
    assert load_head(tmp_path / "served").kind == "eagle3"

"""The page on 8B: its files exist, and its commands run on CPUs as its rehearsal says."""

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

from specheads.commands._call import call
from specheads.export.layouts._shared import VLLM_SERVER
from specheads.heads.load import load_head
from tests.test_readme import FENCED, ROOT

PAGE = (ROOT / "docs" / "8b.md").read_text(encoding="utf-8")
PHASE = "schedule.phases.distilled"
FASTER = [
    "base.device=cpu", "checkpoint_every=2", "log_every=1", f"{PHASE}.steps=6",
    "validation.prompts=1", "validation.new_tokens=8", "validation.rows=2",
    "evaluation.num_prompts=2", "evaluation.max_new_tokens=8", "evaluation.speed_prompts=1",
    "evaluation.repeats=1", f"{PHASE}.distill.shard_size=10",
]  # fmt: skip
"""Settings that make the rehearsal of the page shorter still."""


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
def values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Make the folder of a reader without GPUs; return the values of the rehearsal."""
    for name in ("configs", "recipes", "train.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    (rehearsal,) = [body for kind, body in FENCED.findall(PAGE) if "rehearsal" in body]
    names = "BASE", "DATA", "SMALL"
    script = f"set -e\n{rehearsal}\nprintf '%s\\0' " + " ".join(f'"${name}"' for name in names)
    output = subprocess.run(["bash", "-c", script], check=True, capture_output=True, text=True)
    return dict(zip(names, output.stdout.split("\0"), strict=False))


def launch(line: str, values: dict[str, str], *more: str) -> subprocess.Popen[bytes]:
    """Start a launcher's line of the page on CPUs; `more` follows its words."""
    line = line.replace("recipe=chat_8b", "recipe=chat_8b $SMALL")
    words = shlex.split(Template(line).substitute(values))
    assert words[:2] == ["accelerate", "launch"]
    options = ["--main_process_port", "0", "--mixed_precision", "no"]
    options += ["--num_processes", "4"] if "four" in more else []
    words = ["-m", "accelerate.commands.launch", *options, *words[2:], *FASTER]
    environment = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, *words, *(word for word in more if word != "four")],
        env=os.environ | environment,
    )


@pytest.mark.slow
def test_commands_of_the_page_lead_from_text_to_a_served_head(
    values: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
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
        if words[:3] in (
            ["specheads", "evaluate", "run=runs/mine"],
            ["specheads", "export", "run=runs/mine"],
        ):
            call(words[1], words[2:])
    assert (tmp_path / "runs/mine/report/results.json").is_file()
    # the line that the page has is the printed one
    settings = '{"method": "eagle3", "model": "served", "num_speculative_tokens": '
    printed = capsys.readouterr().out.replace(f"{tmp_path}/", "")
    assert f"{VLLM_SERVER} rehearsal --speculative-config '{settings}" in printed
    assert f"{VLLM_SERVER} $BASE" in PAGE
    assert f"serve --speculative-config '{settings}" in PAGE
    for folder in ("served", "served_sglang"):
        assert load_head(tmp_path / folder).kind == "eagle3"

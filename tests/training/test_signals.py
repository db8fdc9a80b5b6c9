"""A first signal stops a run cleanly, through launchers too; a second one ends it at once."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specheads.runs.directory import RunDirectory
from tests.training.test_processes import (
    ACCELERATE,
    ENVIRONMENT,
    LONG_TEXT,
    REPOSITORY,
    TORCHRUN,
    Pair,
)

pytestmark = pytest.mark.slow

LONG = "schedule.phases.corpus.steps=100000"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("launcher", [TORCHRUN, ACCELERATE], ids=["torchrun", "accelerate"])
def test_signal_to_a_launcher_leaves_a_checkpoint_to_resume(
    launcher: tuple[str, ...], number: signal.Signals, tmp_path: Path
):
    run, words = tmp_path / "run", [sys.executable, "-m", *launcher, "train.py", *LONG_TEXT]
    before = 0
    for _ in range(2):
        process = subprocess.Popen(
            [*words, LONG, f"run_dir={run}"],
            cwd=REPOSITORY,
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        metrics = run / "metrics.jsonl"
        size = metrics.stat().st_size if metrics.is_file() else 0
        while not (metrics.is_file() and metrics.stat().st_size > size):
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.05)
        process.send_signal(number)
        said = process.communicate()[0]
        assert process.returncode != 0
        assert said.count("interrupted; run the same command to resume") == 2, said
        assert not list(run.rglob(".*"))
        step = max(int(one.name.removeprefix("step-")) for one in run.glob("checkpoints/step-*"))
        assert step > before
        before = step


def test_second_signal_ends_a_waiting_process(tmp_path: Path):
    pair = Pair(2, "train.py", *LONG_TEXT, LONG, f"run_dir={tmp_path / 'run'}")
    pair.wait_for(tmp_path / "run", "metrics.jsonl")
    first, other = pair.processes
    other.send_signal(signal.SIGSTOP)
    try:
        first.send_signal(signal.SIGTERM)
        # the current work has finished by now, unless it waits
        time.sleep(1)
        assert first.poll() is None
        first.send_signal(signal.SIGTERM)
        assert first.wait() == 130
    finally:
        other.kill()
    assert "interrupted again: stopped at once" in pair.leave()[0][1]


@pytest.mark.parametrize("moment", ["text/shard-00000.*", "head/config.json"])
def test_second_signal_ends_generation_and_evaluation_at_once(moment: str, tmp_path: Path):
    run, long = tmp_path / "run", moment.startswith("text")
    words = [*LONG_TEXT, "evaluation.num_prompts=400"]
    if not long:
        words += ["schedule.phases.distilled.distill.num_samples=4", "evaluate_after=true"]
    pair = Pair(1, "train.py", *words, f"run_dir={run}")
    pair.wait_for(run, moment)
    while not long and not RunDirectory(run).finished:
        time.sleep(0.01)
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(pair.processes[0].pid, number)
    ((code, said),) = pair.leave()
    assert code == 130, said
    assert "interrupted again: stopped at once" in said
    assert RunDirectory(run).finished is not long
    # the same command resumes, or reports a finished run
    again = Pair(1, "train.py", *words, "schedule.phases.distilled.steps=1", f"run_dir={run}")
    if long:
        again.wait_for(run, "text/shard-00001.*")
        again.processes[0].send_signal(signal.SIGTERM)
    assert again.leave()[0][0] == (130 if long else 2)

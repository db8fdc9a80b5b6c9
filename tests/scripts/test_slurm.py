"""The Slurm script requeues a job that ran out of time, and no other job."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "slurm" / "two_nodes.sbatch"

STAND_INS = {
    "srun": 'export SLURM_NODEID=1; shift; exec "$@"',
    "scontrol": 'echo "$@" >> told; echo node-a; echo node-b',
    "accelerate": """
        echo "$@" > launched
        trap 'exit 130' TERM
        [ "${END:-}" ] && exit "$END"
        while true; do sleep 0.01; done
    """,
}


def job(place: Path, **environment: str) -> "subprocess.Popen[str]":
    """Start the script as Slurm would, with replacements of the programs it calls."""
    for name, body in STAND_INS.items():
        (place / name).write_text(f"#!/bin/bash\n{body}\n")
        (place / name).chmod(0o755)
    known = {"SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_JOB_ID": "7"}
    path = f"{place}:{os.environ['PATH']}"
    return subprocess.Popen(
        ["bash", str(SCRIPT), "recipe=smoke", "name=a b"],
        cwd=place,
        env=os.environ | known | {"PATH": path} | environment,
        text=True,
    )


def test_a_job_that_was_asked_to_stop_ends_its_run_and_is_queued_again(tmp_path: Path):
    running = job(tmp_path)
    while not (tmp_path / "launched").is_file() or not (tmp_path / "launched").read_text():
        time.sleep(0.01)
    running.send_signal(signal.SIGTERM)
    assert running.wait() == 130
    assert (tmp_path / "told").read_text().splitlines()[-1] == "requeue 7"
    assert (tmp_path / "launched").read_text().split() == [
        *("launch", "--config_file", "configs/accelerate/two_nodes.yaml"),
        *("--machine_rank", "1", "--main_process_ip", "node-a"),
        *("train.py", "recipe=smoke", "name=a", "b"),
    ]


@pytest.mark.parametrize("status", [0, 2])
def test_a_job_that_ended_by_itself_is_not(status: int, tmp_path: Path):
    assert job(tmp_path, END=str(status)).wait() == status
    assert "requeue" not in (tmp_path / "told").read_text()

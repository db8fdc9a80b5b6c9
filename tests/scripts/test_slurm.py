"""The Slurm scripts: what they start on which node, and when they queue a job again."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts" / "slurm"

STAND_INS = {
    "srun": 'export SLURM_NODEID=1; while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "curl": 'address=${!#}; while ! grep -qs "${address%/health}/" served; do sleep 0.01; done',
    "specheads": 'echo "$@" >> served; while true; do sleep 0.01; done',
    "scontrol": 'echo "$@" >> told; printf "%s\\n" ${NODES:-node-a node-b}',
    "accelerate": """
        echo "$@" > launched
        trap 'exit 130' TERM
        [ "${END:-}" ] && exit "$END"
        while true; do sleep 0.01; done
    """,
}


def job(
    folder: Path, script: str = "two_nodes", *options: str, **environment: str
) -> "subprocess.Popen[str]":
    """Start a script as Slurm would, with replacements of the programs it calls."""
    for name, body in STAND_INS.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    variables = {"SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_JOB_ID": "7"}
    path = f"{folder}:{os.environ['PATH']}"
    return subprocess.Popen(
        ["bash", str(SCRIPTS / f"{script}.sbatch"), *options, "recipe=smoke", "name=a b"],
        cwd=folder,
        env=os.environ | variables | {"PATH": path} | environment,
        text=True,
    )


LAUNCHED = {
    "two_nodes": [
        *("launch", "--config_file", "configs/accelerate/two_nodes.yaml"),
        *("--machine_rank", "1", "--main_process_ip", "node-a"),
        *("train.py", "recipe=smoke", "name=a", "b"),
    ],
    "features": [
        *("launch", "--machine_rank", "1"),
        *("--config_file", "configs/accelerate/ddp_8gpu.yaml"),
        *("train.py", "recipe=smoke", "name=a", "b"),
        *("features=vllm", "features.url=[http://node-a:8000/v1]"),
        *("features.transport=folder", "features.folder=/shared"),
    ],
}


@pytest.mark.parametrize("script", LAUNCHED)
def test_a_job_that_was_asked_to_stop_ends_its_run_and_is_queued_again(script: str, tmp_path: Path):
    running = job(tmp_path, script, FOLDER="/shared")
    while not (tmp_path / "launched").is_file() or not (tmp_path / "launched").read_text():
        time.sleep(0.01)
    running.send_signal(signal.SIGTERM)
    assert running.wait() == 130
    assert (tmp_path / "told").read_text().splitlines()[-1] == "requeue 7"
    assert (tmp_path / "launched").read_text().split() == LAUNCHED[script]


def test_servers_run_on_the_other_nodes_and_stop_with_the_training(tmp_path: Path):
    # its end kills the servers, which have its output open
    assert job(tmp_path, "features", END="0", FOLDER="/shared", VLLM_PYTHON="py").wait() == 0
    assert (tmp_path / "served").read_text().split() == [
        *("serve-features", "recipe=smoke", "name=a", "b", "url=http://node-a:8000/v1"),
        *("features.transport=folder", "features.folder=/shared"),
        *("tensor_parallel=8", "python=py", "run=true"),
    ]


def test_several_trainers_read_from_several_servers_through_a_store(tmp_path: Path):
    options = ["--servers", "2", "--trainers", "2"]
    running = job(
        tmp_path, "features", *options, END="0", NODES="a b c d", TRANSPORT="mooncake", GPUS="4"
    )
    assert running.wait() == 0
    store = "features.transport=mooncake features.master=a:50051 features.protocol=tcp"
    served = sorted((tmp_path / "served").read_text().splitlines())
    assert served == [
        f"serve-features recipe=smoke name=a b url=http://{node}:8000/v1 {store} "
        "tensor_parallel=8 python=python run=true"
        for node in ("a", "b")
    ]
    launched = (tmp_path / "launched").read_text().strip()
    assert launched == (
        "launch --machine_rank 1 --config_file configs/accelerate/ddp_8gpu.yaml --num_machines 2 "
        "--num_processes 8 --main_process_ip c --main_process_port 29500 train.py recipe=smoke "
        f"name=a b features=vllm features.url=[http://a:8000/v1,http://b:8000/v1] {store}"
    )


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--servers", "2"], "must be as many as the nodes, got 2 and 1 of 2"),
        (["--trainers", "2"], "got 0 and 2 of 2"),
        (["--server", "1"], "the options are --servers N and --trainers M, got --server"),
    ],
)
def test_numbers_that_are_not_those_of_the_job_are_refused(
    options: list[str], line: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    assert job(tmp_path, "features", *options).wait() == 2
    assert line in capfd.readouterr().err


@pytest.mark.parametrize("status", [0, 2])
@pytest.mark.parametrize("script", LAUNCHED)
def test_a_job_that_ended_by_itself_is_not(status: int, script: str, tmp_path: Path):
    assert job(tmp_path, script, END=str(status)).wait() == status
    assert "requeue" not in (tmp_path / "told").read_text()

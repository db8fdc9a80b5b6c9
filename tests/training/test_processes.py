"""Several processes train one head; a launcher shows our messages only."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specheads.runs.directory import RunDirectory
from tests.servers import free_port

REPOSITORY = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(REPOSITORY),
}
IN_PROCESSES = "tests.training.in_processes"
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc_per_node", "2")
ACCELERATE = (
    "accelerate.commands.launch", "--quiet", "--multi_gpu", "--num_processes", "2",
    "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no",
    "--main_process_port", "0",
)  # fmt: skip

pytestmark = pytest.mark.slow


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a module in the checkout without GPUs."""
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=REPOSITORY,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=500,
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_signal_to_one_process_stops_all_at_one_checkpoint(rank: int, tmp_path: Path):
    process = python(*TORCHRUN, "-m", IN_PROCESSES, str(tmp_path), str(rank))
    assert process.returncode == 1
    assert "KeyboardInterrupt" in process.stderr
    assert [folder.name for folder in (tmp_path / "checkpoints").iterdir()] == ["step-3"]


class Pair:
    """Two processes of one run without a launcher."""

    def __init__(self, count: int, *arguments: str, **environment: str) -> None:
        port = str(free_port())
        self.processes = [
            subprocess.Popen(
                [sys.executable, *arguments],
                cwd=REPOSITORY,
                env=ENVIRONMENT
                | environment
                | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count)}
                | {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(count)
        ]

    def wait_for(self, folder: Path, pattern: str) -> None:
        while not list(folder.glob(pattern)):
            assert all(process.poll() is None for process in self.processes), self.leave()
            time.sleep(0.01)

    def leave(self) -> list[tuple[int, str]]:
        """Return how each ended, and what it said."""
        outputs = [process.communicate(timeout=500)[0] for process in self.processes]
        return [
            (process.returncode, text)
            for process, text in zip(self.processes, outputs, strict=True)
        ]

    def kill(self, rank: int) -> None:
        """Kill one of two, which the other one is to say and to end."""
        self.processes[rank].kill()
        ended = self.leave()
        assert ended[rank][0] == -signal.SIGKILL
        code, output = ended[1 - rank]
        assert code == 2, output
        assert "error: a run needs all its processes, but another one ended" in output
        assert "Traceback" not in output


LONG_TEXT = (
    "recipe=smoke", "evaluate_after=false", "data.max_documents=20",
    "schedule.phases.corpus.steps=1",
    "schedule.phases.distilled.steps=1", "schedule.phases.distilled.distill.num_samples=400",
    "schedule.phases.distilled.distill.batch_size=4",
    "schedule.phases.distilled.distill.shard_size=4",
)  # fmt: skip


@pytest.mark.parametrize(
    ("count", "rank", "number"),
    [(2, 0, signal.SIGTERM), (2, 1, signal.SIGINT), (1, 0, signal.SIGTERM)],
)
def test_signal_during_generation_stops_all_and_leaves_complete_shards(
    count: int, rank: int, number: signal.Signals, tmp_path: Path
):
    run = tmp_path / "run"
    pair = Pair(count, "train.py", *LONG_TEXT, f"run_dir={run}")
    pair.wait_for(run / "text", f"shard-0000{rank}.*")
    pair.processes[rank].send_signal(number)
    for code, output in pair.leave():
        assert (code, "interrupted" in output) == (130, True), output
    assert [step.name for step in (run / "checkpoints").iterdir()] == ["step-1"]
    assert not list(run.rglob(".*"))
    assert 0 < len(list((run / "text").glob("shard-*"))) < 100


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("steps", [1, 100_000], ids=["while the base writes", "while one trains"])
def test_killed_process_is_reported_without_a_launcher(rank: int, steps: int, tmp_path: Path):
    run = tmp_path / "run"
    pair = Pair(
        2, "train.py", *LONG_TEXT, f"schedule.phases.corpus.steps={steps}", f"run_dir={run}"
    )
    pair.wait_for(run, "metrics.jsonl" if steps > 1 else f"text/shard-0000{rank}.*")
    pair.kill(rank)


LONG = "schedule.phases.corpus.steps=100000"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("launcher", [TORCHRUN, ACCELERATE], ids=["torchrun", "accelerate"])
def test_signal_to_a_launcher_leaves_a_checkpoint_to_resume(launcher, number, tmp_path):
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
        output = process.communicate()[0]
        assert process.returncode != 0
        assert output.count("interrupted; run the same command to resume") == 2, output
        assert not list(run.rglob(".*"))
        step = max(
            int(checkpoint.name.removeprefix("step-"))
            for checkpoint in run.glob("checkpoints/step-*")
        )
        assert step > before
        before = step


def test_second_signal_ends_a_waiting_process(tmp_path: Path):
    pair = Pair(2, "train.py", *LONG_TEXT, LONG, f"run_dir={tmp_path / 'run'}")
    pair.wait_for(tmp_path / "run", "metrics.jsonl")
    first, second = pair.processes
    second.send_signal(signal.SIGSTOP)
    try:
        first.send_signal(signal.SIGTERM)
        # the current work has finished by now, unless it waits
        time.sleep(1)
        assert first.poll() is None
        first.send_signal(signal.SIGTERM)
        assert first.wait() == 130
    finally:
        second.kill()
    assert "interrupted again: stopped at once" in pair.leave()[0][1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_in_evaluation_exits_with_the_interrupt_code(number: signal.Signals, tmp_path: Path):
    run = tmp_path / "run"
    words = [*LONG_TEXT, "schedule.phases.distilled.distill.num_samples=4", "evaluate_after=true"]
    pair = Pair(1, "train.py", *words, "evaluation.num_prompts=400", f"run_dir={run}")
    pair.wait_for(run, "head/config.json")
    while not RunDirectory(run).finished:
        time.sleep(0.01)
    pair.processes[0].send_signal(number)
    ((code, output),) = pair.leave()
    assert (code, "Traceback" in output) == (130, False), output

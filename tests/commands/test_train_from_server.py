"""`specheads train features=vllm`: refused and skipped settings, and killed runs."""

import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from specheads.base.model import FrozenBase
from specheads.commands._call import call
from specheads.config import data_dir
from specheads.runs.directory import RunDirectory
from specheads.runs.trackers import read_metrics
from tests.servers import free_port, served
from tests.training.in_processes import CLEAN
from tests.training.states_server import StatesServer
from tests.training.test_trainer import assert_equal

BASE = data_dir("recipes") / "tiny_code" / "base"
STEPS = 8
RECIPE = [
    "recipe=smoke", "base=tiny_code", "base.device=cpu", "base.dtype=float32", "features=vllm",
    "~schedule.phases.distilled", "log_every=1", "checkpoint_every=2", "head.depth=2",
    "head.inner_dim=32", "schedule.phases.corpus.sequence_length=64", "features.max_gib=0.05",
    f"schedule.phases.corpus.steps={STEPS}", "schedule.phases.corpus.batch_size=2",
    "validation.rows=2",
]  # fmt: skip


def states_server(folder: Path, port: int) -> AbstractContextManager["subprocess.Popen[bytes]"]:
    """Run the server of the tests in its own process."""
    words = [sys.executable, "-m", "tests.training.states_server"]
    words += [str(BASE), str(folder), str(port), "0", "6"]
    folder.parent.mkdir(exist_ok=True)
    return served(words, f"http://127.0.0.1:{port}/v1/models", folder.parent / "server.log")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Return the settings of a server."""
    folder = tmp_path_factory.mktemp("states")
    base = FrozenBase.load(BASE, dtype="float32", device="cpu")
    server = StatesServer(base, folder, [0, 6])
    yield [f"features.url=[{server.url}]", f"features.folder={folder}"]
    server.stop()


def act(words: list[str], run: Path) -> None:
    sys.stdout = sys.stderr = open(f"{run}.log", "a", buffering=1)  # noqa: PTH123, SIM115
    call("train", [*RECIPE, *words, f"run_dir={run}"])


def start(words: list[str], run: Path) -> Any:
    process = CLEAN.Process(target=act, args=(words, run))
    process.start()
    return process


def finished(words: list[str], run: Path) -> tuple[RunDirectory, float]:
    """Run to the end; return the run and its seconds."""
    start_time = time.monotonic()
    process = start(words, run)
    process.join()
    assert process.exitcode == 0, Path(f"{run}.log").read_text()
    return RunDirectory(run), time.monotonic() - start_time


def assert_same_head(expected: RunDirectory, run: RunDirectory) -> None:
    files = (expected.head / "model.safetensors", run.head / "model.safetensors")
    assert_equal(*map(load_file, files))


def remaining_files(server: list[str]) -> list[Path]:
    return list(Path(server[1].partition("=")[2]).iterdir())


@pytest.mark.slow
def test_training_skips_what_needs_layers_and_says_so(server: list[str], tmp_path: Path):
    run, _ = finished(server, tmp_path / "run")
    log = " ".join(Path(f"{run.path}.log").read_text().split())
    assert "validation measures the loss, and no decoding with a base at a server; specheads" in log
    command = f"measure with specheads evaluate run={run.path}"
    assert f"at a server cannot decode in one process: {command}" in log
    rows = read_metrics(run.metrics)
    assert len(rows) == STEPS
    assert all(0 <= row["features_wait_share"] <= 1 for row in rows)
    assert "mfu" not in rows[0]
    assert not remaining_files(server)
    # the head is measured with the whole base
    call("evaluate", [f"run={run.path}", "tree=chain", "mode=offline", "num_prompts=2"])
    assert (run.report / "results.json").is_file()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        *(
            ([word], f"layers of the base at a server, got {word.partition('.rank')[0]}; leave")
            for word in (
                "schedule.phases.corpus.joint.rank=4",
                "base.exact=true",
                "base.compile=true",
            )
        ),
        (
            ["schedule=two_phase"],
            "a base at a server cannot generate text here, got distill.engine",
        ),
        (["base.adapter=mine"], "at a server, got base.adapter=mine; merge it with peft"),
        (["validation.keep=best"], "cannot do here; set validation.keep=last"),
        (["features.url=[]"], "needs the servers and their folder"),
        (["head=eagle3"], r"this head.s layers \[0, .*, 6\] in .* gives \[0, 6\] in"),
    ],
)
def test_what_needs_layers_is_refused(
    words: list[str], line: str, server: list[str], refusal: Callable[..., str], tmp_path: Path
):
    recipe = [word for word in RECIPE if not (words[0] == "head=eagle3" and "inner_dim" in word)]
    if words == ["schedule=two_phase"]:
        recipe.remove("~schedule.phases.distilled")
    message = refusal("train", *recipe, *server, *words, f"run_dir={tmp_path / 'run'}")
    assert re.search(line, message), message
    assert not (tmp_path / "run" / "config.yaml").exists()
    assert not remaining_files(server)


@pytest.mark.slow
def test_killed_run_ends_with_the_same_head_and_leaves_no_file(server: list[str], tmp_path: Path):
    expected_run, seconds = finished(server, tmp_path / "plain")
    rng = random.Random(10)
    for _ in range(10):
        if RunDirectory(tmp_path / "run").head.is_dir():
            # it came to its end before this kill: begin again
            shutil.rmtree(tmp_path / "run")
        process = start(server, tmp_path / "run")
        process.join(rng.uniform(0.3, 0.9) * seconds)
        process.kill()
        process.join()
    run = RunDirectory(tmp_path / "run")
    if not run.head.is_dir():
        finished(server, run.path)
    assert_same_head(expected_run, run)
    assert not remaining_files(server)


@pytest.mark.slow
def test_run_whose_folder_is_removed_ends_with_the_same_head(tmp_path: Path):
    """The server makes the folder again, until there is a file in its place."""
    folder, port, run = tmp_path / "states", free_port(), RunDirectory(tmp_path / "run")
    words = [f"features.url=[http://127.0.0.1:{port}/v1]", f"features.folder={folder}"]
    words += ["schedule.phases.corpus.steps=20", "features.patience_seconds=2"]
    with states_server(folder, port):
        expected_run, _ = finished(words, tmp_path / "plain")
        process = start(words, run.path)
        for num_steps in (3, 8):
            while len(read_metrics(run.metrics)) < num_steps:
                assert process.is_alive()
                time.sleep(0.01)
            shutil.rmtree(folder, ignore_errors=True)
        while not folder.is_file():
            with suppress(OSError):
                shutil.rmtree(folder, ignore_errors=True)
                folder.write_bytes(b"")
        process.join()
        assert process.exitcode == 2
        (line,) = re.findall("^error: .*", Path(f"{run.path}.log").read_text(), re.MULTILINE)
        assert f"patience_seconds=2, but features.folder={folder} is gone; start it again" in line
        folder.unlink()
        finished(words, run.path)
        assert_same_head(expected_run, run)
        assert not list(folder.iterdir())


@pytest.mark.slow
def test_two_runs_share_a_server_that_is_killed_and_started_again(tmp_path: Path):
    folder, port = tmp_path / "states", free_port()
    words = [f"features.url=[http://127.0.0.1:{port}/v1]", f"features.folder={folder}"]
    # long enough for both to train at the same time
    words += ["schedule.phases.corpus.steps=300", "features.timeout_seconds=2"]
    with states_server(folder, port) as process:
        expected_run, _ = finished(words, tmp_path / "plain")
        names = ("first", "second")
        processes = [start(words, tmp_path / name) for name in names]
        while not all((tmp_path / name / "metrics.jsonl").exists() for name in names):
            assert all(trainer.is_alive() for trainer in processes)
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
        time.sleep(0.5)
        with states_server(folder, port):
            for name, trainer in zip(names, processes, strict=True):
                trainer.join()
                assert trainer.exitcode == 0, (tmp_path / f"{name}.log").read_text()
                assert_same_head(expected_run, RunDirectory(tmp_path / name))
            # the killed server left locks and whole files, which the end of a run removes
            assert not list(folder.iterdir())

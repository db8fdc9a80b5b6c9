"""A set of text is the same, bit for bit, however often its author was killed."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.training.distill import author
from tests.training.distill.pens import shards

FORK = multiprocessing.get_context("fork")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    author.main(folder)
    return folder


def test_two_kills_change_nothing(whole: Path, tmp_path: Path):
    for num_shards in (1, 3):
        process = FORK.Process(target=author.main, args=(tmp_path,))
        process.start()
        while process.is_alive() and len(shards(tmp_path)) < num_shards:
            time.sleep(0.001)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    assert len(shards(tmp_path)) < len(shards(whole))
    author.main(tmp_path)
    assert shards(tmp_path) == shards(whole)
    assert not list(tmp_path.glob("open-*"))


def test_two_processes_at_once_write_what_one_does(whole: Path, tmp_path: Path):
    pair = [FORK.Process(target=author.main, args=(tmp_path, rank, 2)) for rank in range(2)]
    for process in pair:
        process.start()
    for process in pair:
        process.join()
    assert [process.exitcode for process in pair] == [0, 0]
    assert shards(tmp_path) == shards(whole)


@pytest.mark.slow
def test_twenty_kills_at_random_moments_change_nothing(whole: Path, tmp_path: Path):
    """Each is a program of its own, killed at a moment drawn over all that it does."""
    folder, chance, done = tmp_path / "text", random.Random(0), []
    began = time.monotonic()
    subprocess.run(start(tmp_path / "timed"), check=True)
    seconds = time.monotonic() - began
    for _ in range(20):
        process = subprocess.Popen(start(folder))
        time.sleep(chance.uniform(0.3, 1.0) * seconds)
        process.send_signal(signal.SIGKILL)
        done.append(process.wait())
    assert done.count(-signal.SIGKILL) >= 1, done
    subprocess.run(start(folder), check=True)
    assert shards(folder) == shards(whole)


def start(folder: Path) -> list[str]:
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    return [sys.executable, "-m", "tests.training.distill.author", str(folder)]

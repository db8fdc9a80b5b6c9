"""Generated text is the same bit for bit after kills."""

import multiprocessing
import random
import signal
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


def test_two_kills_do_not_change_the_text(whole: Path, tmp_path: Path):
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
    assert not list(tmp_path.glob(".*"))


@pytest.mark.slow
def test_twenty_random_kills_do_not_change_the_text(whole: Path, tmp_path: Path):
    """Each process is killed at a random moment within a tenth of the total time."""
    began = time.monotonic()
    author.main(tmp_path / "timed")
    seconds, chance, codes = time.monotonic() - began, random.Random(0), []
    for _ in range(20):
        process = FORK.Process(target=author.main, args=(tmp_path / "text",))
        process.start()
        time.sleep(chance.uniform(0, 0.1) * seconds)
        process.kill()
        process.join()
        codes.append(process.exitcode)
    assert codes.count(-signal.SIGKILL) > 10, codes
    author.main(tmp_path / "text")
    assert shards(tmp_path / "text") == shards(whole)
    assert not list((tmp_path / "text").glob(".*"))

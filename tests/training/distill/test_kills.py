"""Generated text is the same bit for bit after kills."""

import multiprocessing
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from accelerate import Accelerator

from specheads.core.errors import InputError
from specheads.runs.progress import progress
from specheads.training.distill.run import write_folder
from specheads.training.processes import on_all_processes
from tests.training.distill import author
from tests.training.distill.pens import Talks, job, shards
from tests.training.in_processes import forked

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


def write(folder: Path, num_samples: int) -> None:
    accelerator = Accelerator(cpu=True)
    asked = job(
        folder,
        settings=replace(author.SETTINGS, num_samples=num_samples, drop=[]),
        prompts=Talks(),
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
    )
    with progress(shown=False) as bar:
        report = write_folder(asked, bar, lambda: None)
    assert (report is None) == (accelerator.process_index > 0)


def test_process_without_text_waits_for_the_other(tmp_path: Path):
    num_samples = author.SETTINGS.shard_size
    for name, count in (("one", 1), ("two", 2)):
        assert forked(count, write, tmp_path / name, num_samples) == [0] * count
    assert len(shards(tmp_path / "one")) == 1
    assert shards(tmp_path / "two") == shards(tmp_path / "one")


def refused_in_one() -> None:
    accelerator = Accelerator(cpu=True)

    def refuse() -> None:
        if accelerator.process_index == 1:
            raise InputError("a rule, a value; a remedy")

    with pytest.raises(InputError, match="a rule, a value; a remedy"):
        on_all_processes(refuse)


def test_error_on_one_process_is_raised_on_all():
    assert forked(3, refused_in_one) == [0, 0, 0]

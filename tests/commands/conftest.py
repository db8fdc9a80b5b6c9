"""A refused command and a base, for tests of commands."""

from collections.abc import Callable, Iterator
from functools import cache

import pytest

import specheads
from specheads.commands._call import call
from specheads.config import data_dir
from specheads.data import files
from tests.training.in_processes import fixed_flops


@pytest.fixture(scope="module", autouse=True)
def _some_of_the_standard_library() -> Iterator[None]:
    # to tokenise all of it takes seconds
    files_read = files.stdlib_files()[::5]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "stdlib_files", lambda: files_read)
        yield


@pytest.fixture(scope="module")
def one_base() -> Iterator[None]:
    """Load a base once, for tests that change none."""
    load = cache(specheads.FrozenBase.load)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(specheads.FrozenBase, "load", staticmethod(load))
        yield


@pytest.fixture(scope="module")
def fixed_flop_count() -> Iterator[None]:
    """Count no FLOPs of a step in trainings, which takes longer than their steps."""
    with fixed_flops():
        yield


@pytest.fixture(scope="module")
def base() -> specheads.FrozenBase:
    """Return the base of tiny_code."""
    return specheads.FrozenBase.load(data_dir("recipes") / "tiny_code" / "base", device="cpu")


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that calls a command and returns its only line: exit code 2."""

    def run(command: str, *arguments: str) -> str:
        with pytest.raises(SystemExit) as stop:
            call(command, arguments)
        output = capsys.readouterr().err
        assert stop.value.code == 2, output
        assert len(output.splitlines()) == 1, output
        assert output.startswith("error: "), output
        return output

    return run

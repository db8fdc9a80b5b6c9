"""A refused command, for tests of commands."""

from collections.abc import Callable

import pytest

from specheads.commands._call import call


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that calls a command and returns its only line: exit code 2."""

    def run(command: str, *arguments: str) -> str:
        with pytest.raises(SystemExit) as left:
            call(command, arguments)
        said = capsys.readouterr().err
        assert left.value.code == 2, said
        assert len(said.splitlines()) == 1, said
        assert said.startswith("error: "), said
        return said

    return run

"""The command line: the list of commands, and unknown commands."""

from typing import Any

import pytest

from specheads import __main__ as cli
from specheads.commands import commands


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_lists_every_command_with_its_purpose(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    monkeypatch.setattr("sys.argv", ["specheads", *arguments])
    cli.main()
    shown = capsys.readouterr().out
    assert {"train", "evaluate", "compare", "tune", "chat", "export", "push"} < commands().keys()
    rows = [line.split(maxsplit=1) for line in shown.splitlines()]
    assert all([name, about] in rows for name, about in commands().items())
    assert "_help" not in shown


@pytest.mark.parametrize("command", ["brew", "_help", "../train", "recipe=smoke"])
def test_unknown_command_is_refused_in_one_line(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    monkeypatch.setattr("sys.argv", ["specheads", command])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    shown = capsys.readouterr()
    assert (stop.value.code, shown.out) == (2, "")
    assert shown.err == f"the command must be one of {', '.join(commands())}, got {command!r}\n"

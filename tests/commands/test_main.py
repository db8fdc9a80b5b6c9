"""The command line: the list of commands, unknown commands, and arguments."""

import sys

import pytest

from specheads import __main__ as cli
from specheads import commands
from specheads.commands import _call


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of one command, `brew`, and one helper that is not a command."""
    (tmp_path / "brew.py").write_text('"""Brew a pot.\n\nMore about pots.\n"""\n')
    (tmp_path / "_helper.py").write_text('"""Not a command."""\n')
    monkeypatch.setattr(commands, "FOLDER", tmp_path)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_lists_every_command_with_the_first_line_about_it(arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["specheads", *arguments])
    cli.main()
    shown = capsys.readouterr().out
    assert "  brew  Brew a pot.\n" in shown
    assert "helper" not in shown
    assert "More about" not in shown


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("command", ["brew2", "_helper", "../brew", "recipe=smoke"])
def test_an_unknown_command_is_refused_in_one_line(command, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["specheads", command])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    shown = capsys.readouterr()
    assert stop.value.code == 2
    assert shown.out == ""
    assert shown.err == f"the command must be one of brew, got {command!r}\n"


@pytest.mark.usefixtures("folder")
def test_a_command_sees_its_overrides_and_not_its_own_name(monkeypatch):
    seen = []
    monkeypatch.setattr(_call, "call", lambda name, arguments: seen.extend([name, *arguments]))
    monkeypatch.setattr(sys, "argv", ["specheads", "brew", "cups=2", "--help"])
    cli.main()
    assert seen == ["brew", "cups=2", "--help"]

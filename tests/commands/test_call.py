"""What a call of a command leaves: its exit code, one line, and a traceback only where we erred."""

import errno
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from specheads.commands import _call, _help, commands
from specheads.commands._call import call
from specheads.config import compose
from specheads.core.errors import InputError

Called = Callable[[BaseException | None], tuple[int, str]]


@pytest.fixture
def raising(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> Called:
    """Return what calls a command that raises this, and returns exit code and error lines."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def run(error: BaseException | None) -> tuple[int, str]:
        def body(*_: Any) -> None:
            if error is not None:
                raise error

        module = SimpleNamespace(run=body)
        monkeypatch.setattr(_call, "import_module", lambda _: module)
        try:
            call("push", ["run=x", "repo=a/b"])
            code = 0
        except SystemExit as left:
            code = int(left.code or 0)
        return code, capsys.readouterr().err

    return run


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (InputError("a rule, a value; a remedy"), "error: a rule, a value; a remedy"),
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full: /"),
        (SafetensorError("I/O error: No space left on device (os error 28)"), "the disk is full"),
        (RuntimeError("PytorchStreamWriter failed writing file data/0"), "the disk is full"),
        (caused(RuntimeError("x"), OSError(errno.ENOSPC, "No space left on device")), "is full: /"),
        (MemoryError(), "memory must hold the work"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried 3 GiB"), "lower batch_size"),
        (
            PermissionError(errno.EACCES, "Permission denied", "/root/x"),
            "'/root/x'; check its name",
        ),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "a"), "'a'; check its name"),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, Exception) else None,
)
def test_what_the_user_can_mend_is_one_line_and_exit_code_2(
    raising: Called, error: Exception, told: str, tmp_path: Path
):
    code, said = raising(error)
    assert code == 2
    assert told in said
    assert len(said.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "error", [ValueError("range() arg 3 must not be zero"), KeyError("x"), AssertionError()]
)
def test_what_we_caused_is_one_line_that_names_where_the_traceback_is(
    raising: Called, error: Exception, tmp_path: Path
):
    code, said = raising(error)
    assert code == 1
    assert len(said.splitlines()) == 1
    assert said.startswith(f"error: a bug of specheads: {type(error).__name__}: ")
    (written,) = tmp_path.iterdir()
    assert str(written) in said
    assert "in body" in written.read_text(encoding="utf-8")


def test_an_interrupt_is_130(raising: Called):
    assert raising(KeyboardInterrupt())[0] == 130


def test_what_goes_well_says_nothing(raising: Called):
    assert raising(None) == (0, "")


@pytest.mark.parametrize("command", sorted(compose.SCHEMAS))
def test_help_shows_every_setting_with_type_default_and_a_line_each(command: str, capsys: Any):
    call(command, ["--help"])
    shown = capsys.readouterr().out
    usage, about, *_ = shown.splitlines()
    assert usage.startswith(f"usage: specheads {command} ")
    assert about == commands()[command]
    assert f"`specheads {command}`." not in shown
    lines = _help._settings(compose.SCHEMAS[command], command)
    for name, rule, default, about in lines:
        assert rule
        assert about, name
        assert f"  {name}: {rule}{f' [{default}]' if default else ''}\n      {about[:40]}" in shown


@pytest.mark.parametrize("command", sorted(compose.SCHEMAS))
def test_the_examples_of_a_command_s_help_compose(command: str, capsys: Any):
    call(command, ["--help"])
    shown = capsys.readouterr().out.partition("\nexamples\n")[2].partition("\n\n")[0]
    examples = [shlex.split(line) for line in shown.splitlines()]
    assert len(examples) >= 2
    for program, name, *overrides in examples:
        assert (program, name) == ("specheads", command)
        compose.settings_of(command, overrides)


def test_help_of_training_knows_every_kind_of_head_without_a_recipe(capsys: Any):
    call("train", ["--help"])
    shown = capsys.readouterr().out
    assert "  head.projection (head=medusa): one of own, shared, low_rank ['own']" in shown
    assert "  head.depth (head=eagle3): a whole number, at least 1, at most 64 [7]" in shown
    assert "  head.aux_layers (head=eagle3): a list, each a whole number" in shown
    assert "  head.rope_scaling (head=mtp): a group of settings [{}]\n" in shown
    # from a class that both inherit, which one changes
    assert "  head.num_anchors (head=dspark): a whole number, at least 1 [512]" in shown
    for kind, default in (("dflash", False), ("dspark", True)):
        assert shown.count(f"  head.sample_from_anchor (head={kind}): ") == 1
        assert f"  head.sample_from_anchor (head={kind}): true or false [{default}]" in shown
    assert "recipe=conversations|granite_code|smoke|smollm2|smollm2_long|tiny_code" in shown
    assert "  evaluation.repeats: a whole number, at least 1 [2]" in shown


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--help"],
        ["train"],
        ["train", "--help"],
        ["train", "recipe=smoke", "seed=-1"],
        ["train", "recipe=smoke", "dry_run=true", "seed=-1"],
        ["distill", "recipe=smoke", "dry_run=true"],
    ],
    ids=" ".join,
)
def test_nothing_heavy_is_loaded_before_a_command_is_known_to_run(arguments: list[str]):
    code = (
        "import sys\nfrom specheads.__main__ import main\n"
        f"sys.argv = ['specheads', *{arguments}]\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'datasets', 'accelerate', 'matplotlib', 'wandb'}\n"
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-300:]

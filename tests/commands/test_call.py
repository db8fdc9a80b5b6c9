"""One call of a command: exit codes, messages, signals and help."""

import errno
import logging
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.synchronize import Event
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
import torch
from huggingface_hub.utils import http_backoff
from safetensors import SafetensorError

from specheads import __main__ as cli
from specheads.commands import _call, commands
from specheads.commands._call import call
from specheads.config import compose
from specheads.config.commands import Train
from specheads.core.errors import InputError
from specheads.core.signals import (
    INTERRUPTED,
    ONE_REQUEST_SECONDS,
    SIGNALS,
    exit_at_second_request,
    interrupt,
    on_stop_signal,
)

Called = Callable[..., tuple[int, str]]


@pytest.fixture
def raising(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> Called:
    """Return a function that calls a command with this error, and returns exit code and stderr."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def run(
        error: BaseException | None, words: Sequence[str] = ("push", "run=x", "repo=a/b")
    ) -> tuple[int, str]:
        def body(*_: Any) -> None:
            if error is not None:
                raise error

        module = SimpleNamespace(run=body)
        monkeypatch.setattr(_call, "import_module", lambda _: module)
        try:
            call(words[0], words[1:])
            code = 0
        except SystemExit as left:
            code = int(left.code or 0)
        return code, capsys.readouterr().err

    return run


FULL = OSError(errno.ENOSPC, "No space left on device")


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (InputError("a rule, a value; a remedy"), "error: a rule, a value; a remedy"),
        (FULL, "must have room for the output, got [Errno 28]"),
        (FileNotFoundError(2, "No usable temporary directory found in ['/tmp']"), "set TMPDIR to"),
        (SafetensorError("I/O error: No space left on device (os error 28)"), "a disk must have"),
        (RuntimeError("PytorchStreamWriter failed writing file data/0"), "a disk must have room"),
        (caused(RuntimeError("x"), FULL), "got x; free some space"),
        (MemoryError(), "memory must hold the work"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried 3 GiB"), "lower batch_size"),
        (PermissionError(errno.EACCES, "Permission denied", "/root/x"), "'/root/x'; check its"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "a"), "'a'; check its name"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_mistake_is_one_line_with_exit_code_2(
    raising: Called, error: Exception, message: str, tmp_path: Path
):
    code, line = raising(error)
    assert code == 2
    assert message in line
    assert len(line.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "error", [ValueError("range() arg 3 must not be zero"), KeyError("x"), AssertionError()]
)
def test_bug_is_one_line_that_names_the_traceback_file(
    raising: Called, error: Exception, tmp_path: Path
):
    code, line = raising(error)
    assert code == 1
    assert len(line.splitlines()) == 1
    assert line.startswith(f"error: a bug of specheads: {type(error).__name__}: ")
    (file,) = tmp_path.iterdir()
    assert str(file) in line
    assert "in body" in file.read_text(encoding="utf-8")


def test_retries_of_the_hub_client_are_one_line_and_its_rate_limit_is_printed(
    raising: Called, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    answers = iter([503, 503, 429, 200])

    def answer(_: httpx2.Request) -> httpx2.Response:
        status = next(answers)
        return httpx2.Response(status, headers={"Retry-After": "300"} if status == 429 else {})

    client = httpx2.Client(transport=httpx2.MockTransport(answer))
    monkeypatch.setattr("huggingface_hub.utils._http.get_session", lambda: client)
    monkeypatch.setattr("time.sleep", lambda _: None)
    # a test before may have left them closed
    for name in ("huggingface_hub", "huggingface_hub.utils", http_backoff.__module__):
        logger = logging.getLogger(name)
        monkeypatch.setattr(logger, "disabled", False)
        monkeypatch.setattr(logger, "propagate", True)
        monkeypatch.setattr(logger, "level", logging.NOTSET)
    raising(None)
    with caplog.at_level("WARNING"):
        http_backoff("HEAD", "https://huggingface.co/x")
    messages = [record.getMessage() for record in caplog.records]
    waits, *limits = [line.partition(".")[0] for line in messages]
    assert waits == "the Hub does not answer; trying again for about 30 seconds"
    assert limits == ["Rate limited"]
    assert "301" in messages[1]


@pytest.mark.parametrize("command", sorted(compose.SCHEMAS))
def test_help_shows_every_setting_and_its_examples_compose(command: str, capsys: Any):
    call(command, ["--help"])
    page = capsys.readouterr().out
    usage, about, *_ = page.splitlines()
    assert usage.startswith(f"usage: specheads {command} ")
    assert about == commands()[command]
    for name, rule, default, about in _call.list_settings(compose.SCHEMAS[command]):
        assert rule
        assert about, name
        assert f"  {name}: {rule}{f' [{default}]' if default else ''}\n      {about[:40]}" in page
    examples = page.partition("\nexamples\n")[2].partition("\n\n")[0].splitlines()
    assert len(examples) >= 2
    for line in examples:
        program, name, *overrides = shlex.split(line)
        assert (program, name) == ("specheads", command)
        compose.settings_of(command, overrides)


@pytest.mark.parametrize(
    "arguments", ["", "--help", "train", "train --help", "train recipe=smoke dry_run=true seed=-1"]
)
def test_help_and_mistakes_do_not_load_torch(arguments: str):
    code = (
        "import sys\nfrom specheads.__main__ import main\n"
        f"sys.argv = ['specheads', *{arguments.split()}]\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'datasets', 'accelerate', 'matplotlib', 'wandb'}\n"
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr[-300:]


FORK = multiprocessing.get_context("fork")


@pytest.mark.parametrize("command", sorted(compose.SCHEMAS))
def test_interrupt_promises_to_resume_only_where_the_work_is_kept(raising: Called, command: str):
    recipe = ["recipe=smoke"] if issubclass(compose.SCHEMAS[command], Train) else []
    code, line = raising(KeyboardInterrupt(), [command, *recipe])
    assert (code, len(line.splitlines())) == (130, 1)
    assert ("resume" in line) == (command in ("train", "distill"))
    assert raising(None, [command, *recipe]) == (0, "")


def test_sigterm_interrupts_and_its_handler_is_restored():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), on_stop_signal(interrupt), exit_at_second_request():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.set_wakeup_fd(-1) == -1


def ignore_signals(ready: Event) -> None:
    """Run no handler that stops, like a process that waits in a library."""
    with on_stop_signal(interrupt), exit_at_second_request():
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)
        ready.set()
        while True:
            time.sleep(1)


@pytest.mark.parametrize("numbers", ["TERM TERM", "HUP USR1"])
def test_second_signal_ends_a_process_that_ignores_signals(numbers: str):
    ready = FORK.Event()
    process = FORK.Process(target=ignore_signals, args=(ready,))
    process.start()
    ready.wait()
    assert process.pid is not None
    for number in numbers.split():
        time.sleep(ONE_REQUEST_SECONDS + 0.1)
        assert process.is_alive()
        os.kill(process.pid, signal.Signals[f"SIG{number}"])
    process.join()
    assert process.exitcode == INTERRUPTED


def test_signals_that_are_ignored_or_handled_stay_so():
    """nohup ignores SIGHUP, and a program may use SIGUSR1 itself."""
    received: list[int] = []
    handlers = {signal.SIGHUP: signal.SIG_IGN, signal.SIGUSR1: lambda *_: received.append(1)}
    former = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        with on_stop_signal(interrupt):
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGUSR1)
        with pytest.raises(KeyboardInterrupt), on_stop_signal(interrupt):
            signal.raise_signal(signal.SIGUSR2)
        assert received == [1]
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def clean_up(ready: Event, saved: Any) -> None:
    """Take a while to save the work after an interrupt."""
    # the tests may run under nohup, which ignores SIGHUP
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with on_stop_signal(interrupt), exit_at_second_request():
        try:
            ready.set()
            time.sleep(600)
        except KeyboardInterrupt:
            time.sleep(0.3)
            saved.set()


@pytest.mark.parametrize("number", SIGNALS)
def test_signals_of_one_moment_are_one_interrupt(number: signal.Signals):
    # timeout(1) signals the process and then its group
    ready, saved = FORK.Event(), FORK.Event()
    process = FORK.Process(target=clean_up, args=(ready, saved))
    process.start()
    ready.wait()
    assert process.pid is not None
    for _ in range(3):
        os.kill(process.pid, number)
        # the kernel merges two pending signals of one number
        time.sleep(0.05)
    process.join()
    assert (process.exitcode, saved.is_set()) == (0, True)


def wait(ready: Event) -> None:
    ready.set()
    time.sleep(600)


def test_terminated_workers_do_not_count_as_signals():
    with on_stop_signal(interrupt), exit_at_second_request():
        for _ in range(3):
            ready = FORK.Event()
            worker = FORK.Process(target=wait, args=(ready,))
            worker.start()
            ready.wait()
            worker.terminate()
            worker.join()
            assert worker.exitcode == -signal.SIGTERM


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_lists_every_command_with_its_purpose(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    monkeypatch.setattr("sys.argv", ["specheads", *arguments])
    cli.main()
    page = capsys.readouterr().out
    assert {"train", "evaluate", "compare", "tune", "chat", "export", "push"} < commands().keys()
    rows = [line.split(maxsplit=1) for line in page.splitlines()]
    assert all([name, about] in rows for name, about in commands().items())
    assert "_call" not in page


@pytest.mark.parametrize("command", ["brew", "_call", "../train", "recipe=smoke"])
def test_unknown_command_is_refused_in_one_line(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    monkeypatch.setattr("sys.argv", ["specheads", command])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    output = capsys.readouterr()
    assert (stop.value.code, output.out) == (2, "")
    assert output.err == f"the command must be one of {', '.join(commands())}, got {command!r}\n"

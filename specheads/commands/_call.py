"""One call of a command: compose its settings, run it, and report errors and interrupts."""

import logging
import math
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from specheads.commands import _help
from specheads.config import compose
from specheads.config.commands import Train
from specheads.core.errors import ONE_STOP, InputError, causes, first_line, printable
from specheads.runs.config_file import read_settings

T = TypeVar("T")

NEEDS = (
    (
        "a disk must have room for the output",
        ("No space left on device", "PytorchStreamWriter failed writing", "Disk quota exceeded"),
        "free some space and run the same command again",
    ),
    (
        "memory must hold the work",
        ("MemoryError", "out of memory", "can't allocate memory", "Unable to allocate"),
        "lower batch_size, sequence_length or the tree's nodes, or use a smaller base",
    ),
)
"""Rules of the machine, words of the libraries' messages about them, and remedies."""
MAX_DETAILS = 8000
"""Characters printed below the line of an error."""
RESUMES = {
    "train": "; run the same command to resume, or specheads evaluate run=DIR for a finished run",
    "distill": "; run the same command to resume",
}
"""Remedies of the commands that keep their work; the others start again."""
HUB_REQUESTS = "huggingface_hub.utils._http"
"""Logger of the Hub client's requests."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = 130


def call(name: str, arguments: Sequence[str]) -> None:
    """Run a command; torch is not loaded before the settings are valid.

    A mistake of the user prints one line on standard error with exit code 2, an interrupt exits
    with 130. A bug prints one line with exit code 1; the line names a file with the traceback.
    """
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    logging.getLogger(HUB_REQUESTS).addFilter(_is_told)
    try:
        if {"-h", "--help"} & set(arguments):
            sys.stdout.write(_help.settings(name))
            return
        settings = checked_settings(compose.SCHEMAS[name], arguments)
        run = import_module(f"specheads.commands.{name.replace('-', '_')}").run
        with interruptible():
            run(settings)
    except KeyboardInterrupt:
        sys.stderr.write(f"interrupted{RESUMES.get(name, '')}\n")
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # the reader of our output closed it; Python would complain again when it flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except Exception as error:
        mistake = _mistake(error)
        sys.stderr.write(printable(f"error: {mistake or _bug(error)}\n"))
        sys.exit(2 if mistake else 1)


def checked_settings(kind: type[T], overrides: Sequence[str], **arguments: object) -> T:
    """Return the checked settings of a command; those of a run start from the run's own.

    Arguments that are not empty are overrides too.
    """
    words = [*overrides, *(f"{name}={value}" for name, value in arguments.items() if value)]
    command = compose.command_of(kind)
    settings = compose.settings_of(command, words)
    if hasattr(settings, "base") and (run := run_folder_of(settings)):
        trained = read_run_settings(Path(run, "config.yaml"), Train)
        compose.copy_run_settings(settings, trained, compose.expand_overrides(command, words))
    return settings


def run_folder_of(settings: Any) -> str:
    """Return the run that settings name, or the first run among their heads; else empty."""
    heads = [one for one in getattr(settings, "heads", ()) if Path(one, "config.yaml").is_file()]
    return getattr(settings, "run", "") or next(iter(heads), "")


def read_run_settings(path: Path, schema: type) -> Any:
    """Return the typed settings of a run's config.yaml."""
    return compose.typed_settings(schema, read_settings(path), path)


def _is_told(record: logging.LogRecord) -> bool:
    """Print one line for all retries of a request to the Hub: the last one raises, and we say why.

    A wait for its rate limit is printed as it is, because it can take minutes.
    """
    text = record.getMessage()
    if "[Retry 1/" in text and "Rate limited" not in text:
        record.msg, record.args = "the Hub does not answer; trying again for about 30 seconds", ()
        return True
    return " thrown while requesting " not in text and "Retrying in " not in text


def _mistake(error: Exception) -> str:
    """Return one line about an error that the user can fix; empty for any other error."""
    if isinstance(error, InputError):
        return f"{error}\n{error.details[:MAX_DETAILS]}".rstrip("\n")
    chain = list(causes(error))
    texts = [f"{type(one).__name__}: {one}" for one in chain]
    for rule, words, remedy in NEEDS:
        if any(word in text for text in texts for word in words):
            return f"{rule}, got {first_line(error)}; {remedy}"
    for one in chain:
        if isinstance(one, OSError) and one.filename:
            return (
                f"a file must exist and be accessible: {one.strerror}, "
                f"{str(one.filename)[:200]!r}; check its name and its permissions"
            )
    return ""


def _bug(error: Exception) -> str:
    line = f"a bug of specheads: {type(error).__name__}: {first_line(error)}; please report it with"
    report = "".join(traceback.format_exception(error))
    with (
        suppress(OSError),
        tempfile.NamedTemporaryFile(
            "w", prefix="specheads-", suffix=".txt", delete=False, encoding="utf-8"
        ) as file,
    ):
        file.write(report)
        return f"{line} its traceback in {file.name}"
    return f"{line}\n{report}"


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt at SIGTERM too, unless another handler takes the first signal.

    A second request to stop ends the process at once. A thread reads it, because Python runs no
    handler while the main thread waits for another process. A run survives a kill at any moment.
    """
    # only the main thread receives signals
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    threading.Thread(target=_watch, args=(reader,), daemon=True).start()
    before = [signal.signal(number, _interrupt) for number in SIGNALS]
    descriptor = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(descriptor)
        for number, handler in zip(SIGNALS, before, strict=True):
            signal.signal(number, handler)
        os.close(writer)


def _interrupt(*_: object) -> NoReturn:
    """Raise KeyboardInterrupt once: a second one would break what cleans up after the first."""
    for number in SIGNALS:
        signal.signal(number, lambda *_: None)
    raise KeyboardInterrupt


def _watch(reader: int) -> None:
    """Read the numbers of signals from a pipe, and exit at the second request to stop."""
    first = math.inf
    with open(reader, "rb", buffering=0) as numbers:
        while number := numbers.read(1):
            if number[0] in SIGNALS:
                now = time.monotonic()
                if now - first > ONE_STOP:
                    os.write(2, b"interrupted again: stopped at once\n")
                    os._exit(INTERRUPTED)
                first = min(first, now)


def _forget() -> None:
    """Restore signals in a forked process: a pool ends its workers by SIGTERM."""
    if signal.getsignal(signal.SIGTERM) is _interrupt:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget)

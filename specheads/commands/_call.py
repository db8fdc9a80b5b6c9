"""One call of a command: compose its settings, run it, and report errors and interrupts."""

import errno
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module

from specheads.commands import _help
from specheads.config import compose
from specheads.core.errors import InputError, printable

NO_ROOM = ("No space left on device", "PytorchStreamWriter failed writing", "Disk quota exceeded")
"""Messages of libraries for a full disk; not all of them raise an OSError."""

NO_MEMORY = ("out of memory", "can't allocate memory", "Unable to allocate")

MAX_DETAILS = 8000
"""Characters printed below the line of an error."""

SIGNALS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = 130


def call(name: str, arguments: Sequence[str]) -> None:
    """Run a command; torch is not loaded before the settings are valid.

    A mistake of the user prints one line on standard error with exit code 2, an interrupt exits
    with 130. A bug prints one line with exit code 1; the line names a file with the traceback.
    """
    try:
        if {"-h", "--help"} & set(arguments):
            sys.stdout.write(_help.settings(name))
            return
        overrides = compose.lengthen(name, arguments)
        settings = compose.from_command_line(name, overrides)
        run = import_module(f"specheads.commands.{name}").run
        with interruptible():
            run(settings, overrides)
    except KeyboardInterrupt:
        sys.stderr.write(
            "interrupted; run the same command to resume, or specheads evaluate run=DIR for a "
            "finished run\n"
        )
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # the reader of our output closed it; Python would complain again when it flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except Exception as error:
        if line := _mistake(error):
            sys.stderr.write(printable(line + _details(error)))
            sys.exit(2)
        sys.stderr.write(printable(_bug(error)))
        sys.exit(1)


def _mistake(error: Exception) -> str:
    """Return one line about an error that the user can fix; empty for any other error."""
    if isinstance(error, compose.MISTAKES):
        return compose.message(error)
    chain = list(_chain(error))
    texts = [str(one) for one in chain]
    if any(words in text for text in texts for words in NO_ROOM):
        return (
            f"error: a disk must have room for the output, and is full: {_first_line(error)}; free "
            "some space and run the same command to resume\n"
        )
    if isinstance(error, MemoryError) or any(word in text for text in texts for word in NO_MEMORY):
        return (
            f"error: memory must hold the work, and ran out: {_first_line(error)}; lower "
            "batch_size, sequence_length or the tree's nodes, or use a smaller base\n"
        )
    for one in chain:
        if isinstance(one, OSError) and one.filename and one.errno in errno.errorcode:
            return (
                f"error: a file must exist and be accessible: {one.strerror}, "
                f"{str(one.filename)[:200]!r}; check its name and its permissions\n"
            )
    return ""


def _details(error: Exception) -> str:
    """Return the text to print below the line of an error."""
    text = error.details.rstrip("\n") if isinstance(error, InputError) else ""
    if (left := len(text) - MAX_DETAILS) > 0:
        text = f"{text[:MAX_DETAILS]}\n[{left:,} more characters]"
    return text and f"{text}\n"


def _bug(error: Exception) -> str:
    report = "".join(traceback.format_exception(error))
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="specheads-", suffix=".txt", delete=False, encoding="utf-8"
        ) as file:
            file.write(report)
    except OSError:
        return report
    return (
        f"error: a bug of specheads: {type(error).__name__}: {_first_line(error)}; please report "
        f"it with its traceback in {file.name}\n"
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or ["no message"])[0][:300]


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt at SIGTERM too, unless another handler takes the first signal.

    A second signal ends the process at once. A thread reads it, because Python runs no handler
    while the main thread waits for another process. A run survives a kill at any moment.
    """
    # only the main thread receives signals
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    threading.Thread(target=_watch, args=(reader,), daemon=True).start()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    descriptor = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(descriptor)
        signal.signal(signal.SIGTERM, before)
        os.close(writer)


def _watch(reader: int) -> None:
    """Count the signals whose numbers arrive in a pipe, and exit at the second one."""
    count = 0
    with open(reader, "rb", buffering=0) as numbers:
        while number := numbers.read(1):
            count += number[0] in SIGNALS
            if count > 1:
                os.write(2, b"interrupted again: stopped at once\n")
                os._exit(INTERRUPTED)


def _forget() -> None:
    """Restore signals in a forked process: a pool ends its workers by SIGTERM."""
    if signal.getsignal(signal.SIGTERM) is signal.default_int_handler:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget)

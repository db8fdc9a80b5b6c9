"""A first SIGINT or SIGTERM interrupts a command; a second one ends it at once."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = 130


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt at SIGTERM too, unless something else hears the first signal.

    A second one is not for Python's handlers, which wait while the main thread is in a matrix
    product, or waits for another process: a thread of its own leaves. Nothing is half-written then,
    since a run bears being killed at any moment.
    """
    # only the main thread gets signals
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    threading.Thread(target=_watch, args=(reader,), name="interrupt", daemon=True).start()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    watched = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(watched)
        signal.signal(signal.SIGTERM, before)
        os.close(writer)


def _watch(reader: int) -> None:
    """Count signals, of which each puts its number into a pipe, and leave at the second."""
    heard = 0
    with open(reader, "rb", buffering=0) as numbers:
        while told := numbers.read(1):
            heard += told[0] in SIGNALS
            if heard > 1:
                os.write(2, b"interrupted again: it left at once\n")
                os._exit(INTERRUPTED)


def _forget() -> None:
    """Leave the pipe to the process that made it: a pool ends its workers by SIGTERM."""
    if signal.getsignal(signal.SIGTERM) is signal.default_int_handler:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget)

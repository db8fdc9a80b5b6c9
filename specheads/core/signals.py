"""Requests to stop by a signal: the first one ends the work cleanly, a second one at once."""

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that ask to stop: Ctrl-C, timeout(1) and schedulers, a closed terminal, and Slurm."""
ONE_REQUEST_SECONDS = 0.5
"""Signals within this time are one request: timeout(1) signals a process and its group."""
INTERRUPTED = 130
"""Exit code after a request to stop."""


@contextmanager
def on_stop_signal(stop: Callable[[], object]) -> Iterator[None]:
    """Call `stop` at the first request to stop; a second request raises KeyboardInterrupt.

    SIGHUP, SIGUSR1 and SIGUSR2 are requests unless they are ignored or have a handler.
    """
    # only the main thread receives signals
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # read all handlers first: a signal may come after the first replacement
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    replaced = {
        number: handler
        for number, handler in handlers.items()
        if number in (signal.SIGINT, signal.SIGTERM)
        or handler is signal.SIG_DFL
        or _is_ours(handler)
    }
    first = math.inf

    def restore() -> None:
        for number, handler in replaced.items():
            signal.signal(number, handler)

    def request_stop(*_: object) -> None:
        nonlocal first
        is_first, now = first == math.inf, time.monotonic()
        first = min(first, now)
        if is_first:
            stop()
        elif now - first > ONE_REQUEST_SECONDS:
            restore()
            raise KeyboardInterrupt

    try:
        for number in replaced:
            signal.signal(number, request_stop)
        yield
    finally:
        restore()


def interrupt() -> NoReturn:
    """Raise KeyboardInterrupt."""
    raise KeyboardInterrupt


@contextmanager
def exit_at_second_request() -> Iterator[None]:
    """End the process at the second request to stop, whatever it waits for.

    A thread reads the signals, because Python runs no handler while the main thread waits for
    another process. A run survives a kill at any moment.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    threading.Thread(target=_exit_at_second, args=(reader,), daemon=True).start()
    descriptor = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(descriptor)
        os.close(writer)


def _exit_at_second(reader: int) -> None:
    first = math.inf
    with open(reader, "rb", buffering=0) as numbers:
        while number := numbers.read(1):
            if number[0] in SIGNALS:
                now = time.monotonic()
                if now - first > ONE_REQUEST_SECONDS:
                    os.write(2, b"interrupted again: stopped at once\n")
                    os._exit(INTERRUPTED)
                first = min(first, now)


def _is_ours(handler: object) -> bool:
    return getattr(handler, "__module__", "") == __name__


def _restore_signals() -> None:
    """Restore signals in a forked process: a pool ends its workers by SIGTERM."""
    for number in SIGNALS:
        if _is_ours(signal.getsignal(number)):
            is_interrupt = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)
    signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_restore_signals)

"""Interrupts that let the work at hand end first."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def on_interrupt(ask: Callable[[], None]) -> Iterator[None]:
    """Turn SIGINT and SIGTERM into a request, for as long as this lasts.

    Only the main thread gets signals; elsewhere nothing changes.

    Args:
        ask: Called instead of raising KeyboardInterrupt.
    """

    def hear(number: int, frame: Any) -> None:
        del number, frame
        ask()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, hear) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

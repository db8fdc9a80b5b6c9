"""A command is interrupted by one signal, ended by two, and gives back what it changed."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Event

import pytest

from specheads.commands._call import INTERRUPTED, SIGNALS, interruptible

FORK = multiprocessing.get_context("fork")


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in SIGNALS]


def interrupt(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    signal.pause()


@pytest.fixture
def heard() -> Iterator[None]:
    """Hear SIGINT as a command does: a worker of xdist takes no notice of it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("number", SIGNALS)
def test_one_signal_interrupts_and_everything_is_as_before(number: signal.Signals):
    before = handlers()
    with pytest.raises(KeyboardInterrupt), interruptible():
        interrupt(number)
    assert handlers() == before
    assert signal.set_wakeup_fd(-1) == -1


def stubborn(ready: Event) -> None:
    """Take no notice of signals in Python, as one who waits in a library does."""
    with interruptible():
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)
        ready.set()
        while True:
            time.sleep(1)


@pytest.mark.parametrize("numbers", [(*SIGNALS,), (signal.SIGTERM, signal.SIGTERM)])
def test_two_signals_end_what_takes_no_notice_of_them(numbers: tuple[signal.Signals, ...]):
    ready = FORK.Event()
    process = FORK.Process(target=stubborn, args=(ready,))
    process.start()
    ready.wait()
    assert process.pid is not None
    for number in numbers:
        # two of a number become one where the first has not come yet
        time.sleep(0.2)
        assert process.is_alive()
        os.kill(process.pid, number)
    process.join()
    assert process.exitcode == INTERRUPTED


def wait(ready: Event) -> None:
    ready.set()
    time.sleep(600)


def test_workers_that_are_ended_do_not_count_for_the_command_that_made_them():
    with interruptible():
        for _ in range(3):
            ready = FORK.Event()
            worker = FORK.Process(target=wait, args=(ready,))
            worker.start()
            ready.wait()
            worker.terminate()
            worker.join()
            assert worker.exitcode == -signal.SIGTERM

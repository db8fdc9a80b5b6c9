"""Progress: a bar on a terminal, lines elsewhere, nothing if it is off."""

import io
import threading

from rich.console import Console

from specheads.runs.progress import progress


class Stream(io.StringIO):
    """A stream without a terminal, with an event for the first output."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def flush(self) -> None:
        if self.getvalue():
            self.written.set()


def console(stream: io.StringIO, *, terminal: bool) -> Console:
    return Console(file=stream, force_terminal=terminal, width=80)


def test_lines_appear_during_one_long_task():
    stream = Stream()
    with progress(
        shown=True, line_seconds=0.001, console=console(stream, terminal=False)
    ) as display:
        display.add_task("corpus", total=6000, completed=120, numbers="loss 1.5")
        assert stream.written.wait(timeout=60)
    assert stream.getvalue().splitlines()[0] == "corpus 120/6000  loss 1.5"
    assert "\x1b" not in stream.getvalue()
    assert "progress" not in {thread.name for thread in threading.enumerate()}


def test_terminal_has_a_bar_and_no_lines():
    stream = Stream()
    with progress(
        shown=True, line_seconds=0.0001, console=console(stream, terminal=True)
    ) as display:
        task = display.add_task("corpus", total=2, numbers="loss 1.5")
        display.update(task, completed=1, refresh=True)
    assert "\u2501" in stream.getvalue()
    assert "corpus 1/2  " not in stream.getvalue()

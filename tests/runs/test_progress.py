"""Progress without a terminal is lines."""

import io
import threading

import pytest
from rich.console import Console

from specheads.runs.progress import progress_display


class Stream(io.StringIO):
    """A stream without a terminal, with an event for the first output."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def flush(self) -> None:
        if self.getvalue():
            self.written.set()


@pytest.mark.parametrize(
    ("total", "line"), [(6000, "corpus 120/6000  loss 1.5"), (None, "corpus  loss 1.5")]
)
def test_lines_appear_during_one_long_task(total: int | None, line: str):
    stream = Stream()
    console = Console(file=stream, force_terminal=False, width=80)
    with progress_display(shown=True, line_seconds=0.001, console=console) as display:
        display.add_task("corpus", total=total, completed=120, numbers="loss 1.5")
        assert stream.written.wait(timeout=60)
    assert stream.getvalue().splitlines()[0] == line
    assert "\x1b" not in stream.getvalue()
    assert "progress" not in {thread.name for thread in threading.enumerate()}

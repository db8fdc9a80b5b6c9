"""Progress without a terminal is lines."""

import io
import threading
from collections.abc import Mapping
from types import SimpleNamespace

import pytest
from rich.console import Console

from specheads.runs.progress import progress_display, stage_announcer


class Stream(io.StringIO):
    """A stream without a terminal, with an event for the first output."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def flush(self) -> None:
        if self.getvalue():
            self.written.set()


def test_lines_appear_during_one_long_task():
    stream = Stream()
    console = Console(file=stream, force_terminal=False, width=80)
    with progress_display(shown=True, line_seconds=0.001, console=console) as display:
        display.add_task("corpus", total=6000, completed=120, numbers="loss 1.5")
        assert stream.written.wait(timeout=60)
    assert stream.getvalue().splitlines()[0] == "corpus 120/6000  loss 1.5"
    assert "\x1b" not in stream.getvalue()
    assert "progress" not in {thread.name for thread in threading.enumerate()}


MINUTES = {"text": 4.0, "train": 5.0, "evaluate": 1.0}


@pytest.mark.parametrize(
    ("minutes", "seconds", "minutes_left"),
    [
        ({}, [60, 60], ["", "", ""]),
        (MINUTES, [240, 300], [10, 6, 1]),
        # half as fast
        (MINUTES, [480, 600], [10, 12, 2]),
        # the text was there
        (MINUTES, [1, 300], [10, 6, 1]),
        ({"train": 5.0}, [600, 300], [5, 5, 0]),
    ],
)
def test_stages_have_the_time_that_is_left(
    minutes: Mapping[str, float],
    seconds: list[int],
    minutes_left: list,
    monkeypatch: pytest.MonkeyPatch,
):
    times = iter([0, seconds[0], sum(seconds)])
    clock = SimpleNamespace(monotonic=lambda: next(times))
    monkeypatch.setattr("specheads.runs.progress.time", clock)
    names = ["text", "train", "evaluate"]
    begin = stage_announcer(names, minutes)
    for number, (name, expected_minutes) in enumerate(
        zip(names, minutes_left, strict=True), start=1
    ):
        about = f", about {expected_minutes} minutes left in all" if minutes else ""
        assert begin(name) == f"stage {number} of 3: {name}{about}"

"""Progress on standard error: a bar on a terminal, elsewhere a line every 30 seconds."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from typing import Any, TypeVar

Item = TypeVar("Item")


@contextmanager
def progress_display(
    *, shown: bool, transient: bool = False, line_seconds: float = 30.0, console: Any = None
) -> Iterator[Any]:
    """Yield rich's Progress and show it; its tasks need a field `numbers`.

    A thread prints the lines, so that one long task cannot delay them.
    """
    # decoding works without rich
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = console or Console(stderr=True)
    display = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[numbers]}"),
        console=console,
        transient=transient,
        disable=not (shown and console.is_terminal),
        # a step of a large base can take longer than rich's 30 seconds
        speed_estimate_period=600,
    )
    over = threading.Event()

    def write_lines() -> None:
        while not over.wait(line_seconds):
            for task in display.tasks:
                if not task.finished:
                    console.file.write(f"{progress_line(task)}\n")
            console.file.flush()

    writer = threading.Thread(target=write_lines, name="progress", daemon=True)
    if shown and not console.is_terminal:
        writer.start()
    try:
        with display:
            yield display
    finally:
        over.set()
        if writer.ident is not None:
            writer.join()


def progress_line(task: Any) -> str:
    """Return the content of a bar as one line: done, total, rate, time left, numbers."""
    parts = [f"{task.description} {task.completed:.0f}/{task.total or 0:.0f}"]
    if task.speed:
        parts.append(f"{task.speed:.3g}/s")
    if (left := task.time_remaining) is not None:
        parts.append(f"{timedelta(seconds=left)} left")
    return "  ".join([*parts, *filter(None, [task.fields["numbers"]])])


def stage_announcer(names: Sequence[str], minutes: Mapping[str, float]) -> Callable[[str], str]:
    """Return a function that begins a stage and returns a line for people, with the time left.

    The time left is that of `minutes`, scaled by the time that the finished stages took. A stage
    without minutes counts nothing, and without any minutes the line has no time.
    """
    begun: list[tuple[str, float]] = []

    def begin(name: str) -> str:
        begun.append((name, time.monotonic()))
        place = names.index(name)
        text = f"stage {place + 1} of {len(names)}: {name}"
        if not minutes:
            return text
        times = [(60 * minutes.get(one, 0), end - at) for (one, at), (_, end) in pairwise(begun)]
        # a run that resumes passes through its finished stages
        times = [(planned, taken) for planned, taken in times if taken > planned / 5 > 0]
        planned, taken = map(sum, zip(*times, strict=True)) if times else (1, 1)
        left = sum(minutes.get(one, 0) for one in names[place:]) * taken / planned
        return f"{text}, about {left:.0f} minutes left in all"

    return begin


def progress_bar(items: Sequence[Item], label: str, shown: bool) -> Iterator[Item]:
    """Yield the items and show progress."""
    with progress_display(shown=shown, transient=True) as display:
        task = display.add_task(label, total=len(items), numbers="")
        for item in items:
            yield item
            display.advance(task)

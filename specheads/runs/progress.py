"""Progress on standard error: a bar on a terminal, elsewhere a line every 30 seconds."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
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
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = console or Console(stderr=True)
    display = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
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
    counts = f" {task.completed:.0f}/{task.total:.0f}" if task.total else ""
    fields = [f"{task.description}{counts}"]
    if task.speed:
        fields.append(f"{task.speed:.3g}/s")
    if (remaining := task.time_remaining) is not None:
        fields.append(f"{timedelta(seconds=remaining)} left")
    return "  ".join([*fields, *filter(None, [task.fields["numbers"]])])


def progress_bar(items: Sequence[Item], label: str, shown: bool) -> Iterator[Item]:
    """Yield the items and show progress."""
    with progress_display(shown=shown, transient=True) as display:
        task = display.add_task(label, total=len(items), numbers="")
        for item in items:
            yield item
            display.advance(task)

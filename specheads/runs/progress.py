"""How far long work is: a bar on a terminal, elsewhere a line every half minute; on stderr."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

Item = TypeVar("Item")


@contextmanager
def progress(
    *,
    shown: bool,
    transient: bool = False,
    line_seconds: float = 30.0,
    console: Any = None,
) -> Iterator[Any]:
    """Give rich's Progress, whose tasks have a field `numbers`, and show it while this lasts.

    Lines come from a thread, so that even one long piece of work cannot keep them back. Of several
    processes only the main one should show anything; a transient bar is wiped away at the end.
    """
    # decoding alone does without rich
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
        # a large base takes longer for one step than rich's half minute
        speed_estimate_period=600,
    )
    over = threading.Event()

    def tell() -> None:
        while not over.wait(line_seconds):
            for task in display.tasks:
                if not task.finished:
                    console.file.write(f"{line(task)}\n")
            console.file.flush()

    teller = threading.Thread(target=tell, name="progress", daemon=True)
    if shown and not console.is_terminal:
        teller.start()
    try:
        with display:
            yield display
    finally:
        over.set()
        if teller.ident is not None:
            teller.join()


def line(task: Any) -> str:
    """Return what a bar shows as one line: done and total, rate, time left, numbers."""
    parts = [f"{task.description} {task.completed:.0f}/{task.total or 0:.0f}"]
    if task.speed:
        parts.append(f"{task.speed:.3g}/s")
    if (left := task.time_remaining) is not None:
        parts.append(f"{timedelta(seconds=left)} left")
    return "  ".join([*parts, *filter(None, [task.fields["numbers"]])])


def bar(items: Sequence[Item], label: str, shown: bool) -> Iterator[Item]:
    """Yield the items and show how many are done."""
    with progress(shown=shown, transient=True) as display:
        task = display.add_task(label, total=len(items), numbers="")
        for item in items:
            yield item
            display.advance(task)

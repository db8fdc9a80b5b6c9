"""The progress bar of long measurements: on stderr, gone when done."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def bar(items: Sequence[Item], description: str, show: bool) -> Iterator[Item]:
    """Yield the items while a bar with the time left follows; without `show`, only the items."""
    if not show:
        yield from items
        return
    # rich is needed on a screen only
    from rich.console import Console
    from rich.progress import track

    yield from track(items, description, console=Console(stderr=True), transient=True)

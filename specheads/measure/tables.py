"""Tables for a console of any width: no figure is cut or broken over two lines."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True, slots=True)
class ConsoleTable:
    """A table if every word has room; in a narrower console a list, row by row."""

    title: str
    rows: Sequence[Sequence[str]]
    header: Sequence[str] = ()

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> Iterator[Table | Text]:
        """Yield what the console prints."""
        lines = [*([self.header] if self.header else []), *self.rows]
        # a line before each column and a last one, and a blank on both sides of each
        widths = _widths(lines, options.max_width - 3 * len(lines[0]) - 1)
        if widths is None:
            yield Text("\n".join([self.title, *self._listed()]))
            return
        table = Table(title=self.title, title_justify="left", show_header=bool(self.header))
        for place, width in enumerate(widths):
            table.add_column(Text(self.header[place]) if self.header else "", width=width)
        for row in self.rows:
            # Text does not parse a name in brackets as a style
            table.add_row(*map(Text, row))
        yield table

    def _listed(self) -> Iterator[str]:
        for first, *rest in self.rows:
            if not self.header:
                yield f"{first}: {' '.join(rest)}"
                continue
            yield f"{self.header[0]} {first}"
            yield from (
                f"  {name}: {cell}" for name, cell in zip(self.header[1:], rest, strict=True)
            )


def with_interval(value: float, interval: Sequence[float]) -> str:
    """Return a figure and the ends of its interval, if it has one."""
    return " ".join([f"{value:.2f}", *(["[{:.2f}, {:.2f}]".format(*interval)] if interval else [])])


def _widths(lines: Sequence[Sequence[str]], room: int) -> list[int] | None:
    """Return the widths of the columns; None if the longest words do not fit side by side."""
    columns = list(zip(*lines, strict=True))
    widths = [
        max(cell_len(word) for cell in one for word in [*cell.split(), ""]) for one in columns
    ]
    spare = room - sum(widths)
    if spare < 0:
        return None
    for place, one in enumerate(columns):
        more = min(spare, max(map(cell_len, one)) - widths[place])
        widths[place] += more
        spare -= more
    return widths

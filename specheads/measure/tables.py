"""Tables for a console of any width: no figure is cut or broken over two lines."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from textwrap import fill

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True, slots=True)
class ConsoleTable:
    """A table if it fits the console, else several with some of its columns each, else a list."""

    title: str
    rows: Sequence[Sequence[str]]
    header: Sequence[str] = ()
    num_names: int = 1
    """The first columns, which name a row: every part of the table has them."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table | Text]:
        """Yield what the console prints."""
        parts = self._parts(console, options)
        yield from parts or [Text("\n".join([self.title, *self._listed()]))]

    def _parts(self, console: Console, options: ConsoleOptions) -> list[Table]:
        """Return the table, or its halves and theirs; empty if the narrowest part does not fit."""
        table = self._table()
        needed = Measurement.get(console, options.update(width=10_000), table).minimum
        if needed <= options.max_width:
            return [table]
        names, rest = self.header[: self.num_names], self.header[self.num_names :]
        if len(rest) < 2:
            return []
        half = self.num_names + (len(rest) + 1) // 2
        left = [row[:half] for row in self.rows]
        right = [[*row[: self.num_names], *row[half:]] for row in self.rows]
        parts = (
            ConsoleTable(self.title, left, self.header[:half], self.num_names),
            ConsoleTable(self.title, right, [*names, *self.header[half:]], self.num_names),
        )
        first, second = (part._parts(console, options) for part in parts)
        return [*first, *second] if first and second else []

    def _table(self) -> Table:
        table = Table(title=self.title, title_justify="left", show_header=bool(self.header))
        columns = [*zip(*self.rows, strict=True)]
        for place, (cells, name) in enumerate(zip_longest(columns, self.header, fillvalue="")):
            # a name takes several lines before it widens its column
            width = max(1, *map(cell_len, [*cells, *name.split()]))
            # only the last column may be broken, between words
            is_last = place == len(columns) - 1
            # rich narrows a column that may wrap, even below its minimum, and cuts the table's edge
            table.add_column(
                Text(fill(name, width)), min_width=None if is_last else width, no_wrap=not is_last
            )
        for row in self.rows:
            # Text does not parse a name in brackets as a style
            table.add_row(*map(Text, row))
        return table

    def _listed(self) -> Iterator[str]:
        for first, *rest in self.rows:
            if not self.header:
                yield f"{first}: {' '.join(rest)}"
                continue
            yield f"{self.header[0]} {first}"
            cells = zip(self.header[1:], rest, strict=True)
            yield from (f"  {name}: {cell}" for name, cell in cells if cell)


def with_interval(value: float, interval: Sequence[float], form: str = ".2f") -> str:
    """Return a figure and the ends of its interval, if it has one."""
    ends = ", ".join(f"{end:{form}}" for end in interval)
    return f"{value:{form}}" + f" [{ends}]" * bool(ends)

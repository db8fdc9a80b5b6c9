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
    """The first columns, which name a row: every half of a wide table has them."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table | Text]:
        """Yield what the console prints."""
        tables = self.fitting_tables(console, options)
        yield from tables or [Text("\n".join([self.title, *self.list_cells()]))]

    def fitting_tables(self, console: Console, options: ConsoleOptions) -> list[Table]:
        """Return the table, or its halves and theirs; empty if the narrowest does not fit."""
        table, num_names = self.as_table(), self.num_names
        width = Measurement.get(console, options.update(width=10_000), table).minimum
        if width <= options.max_width:
            return [table]
        num_figures = len(self.header) - num_names
        if num_figures < 2:
            return []
        middle = num_names + (num_figures + 1) // 2
        tables = list[Table]()
        for first, last in (num_names, middle), (middle, len(self.header)):
            rows = [[*row[:num_names], *row[first:last]] for row in self.rows]
            header = [*self.header[:num_names], *self.header[first:last]]
            half = ConsoleTable(self.title, rows, header, num_names)
            if not (narrower := half.fitting_tables(console, options)):
                return []
            tables += narrower
        return tables

    def as_table(self) -> Table:
        """Return a table of rich that never narrows a figure."""
        table = Table(title=self.title, title_justify="left", show_header=bool(self.header))
        columns = [*zip(*self.rows, strict=True)]
        for index, (cells, name) in enumerate(zip_longest(columns, self.header, fillvalue="")):
            # a name takes several lines before it widens its column
            width = max(1, *map(cell_len, [*cells, *name.split()]))
            # only the last column may be broken, between words
            is_last = index == len(columns) - 1
            # rich narrows a column that may wrap, even below its minimum, and cuts the table's edge
            table.add_column(
                Text(fill(name, width)), min_width=None if is_last else width, no_wrap=not is_last
            )
        for row in self.rows:
            # Text does not parse a name in brackets as a style
            table.add_row(*map(Text, row))
        return table

    def list_cells(self) -> Iterator[str]:
        """Yield a line for each cell, below the name of its row."""
        for name, *cells in self.rows:
            if not self.header:
                yield f"{name}: {' '.join(cells)}"
                continue
            yield f"{self.header[0]} {name}"
            columns = zip(self.header[1:], cells, strict=True)
            yield from (f"  {column}: {cell}" for column, cell in columns if cell)


def with_interval(value: float, interval: Sequence[float], form: str = ".2f") -> str:
    """Return a figure and the ends of its interval, if it has one."""
    ends = ", ".join(f"{end:{form}}" for end in interval)
    return f"{value:{form}}" + f" [{ends}]" * bool(ends)

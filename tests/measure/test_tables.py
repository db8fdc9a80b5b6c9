from io import StringIO

import pytest
from rich.console import Console

from specheads.measure.tables import ConsoleTable

ROWS = [("tokens per forward after phase distilled", "eagle3, depth 3, 206,080 parameters")]


@pytest.mark.parametrize("width", range(70, 90))
def test_table_keeps_its_edge_and_its_words_at_any_width(width: int):
    written = StringIO()
    Console(width=width, file=written).print(ConsoleTable("title", ROWS))
    _, *lines = written.getvalue().splitlines()
    assert all(line.endswith(tuple("┐│┘")) for line in lines)
    assert set(" ".join(map(" ".join, ROWS)).split()) <= set(" ".join(lines).split())


def test_header_breaks_into_lines_before_a_table_becomes_a_list():
    header = "batch, context", "tree (* chosen)", "nodes", "tokens per forward", "speed-up"
    row = "4, 1024", "best_first+lookup *", "14", "1.07", "0.40 [0.38, 0.42]"
    written = StringIO()
    Console(width=80, file=written).print(ConsoleTable("title", [row], header))
    lines = written.getvalue().splitlines()
    assert all(line.endswith(tuple("┓┃┩│┘")) for line in lines[1:])
    assert all(cell in lines[-2] for cell in row)
    assert all(word in " ".join(lines) for name in header for word in name.split())

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

from io import StringIO

import pytest
from rich.console import Console

from specheads.measure.summary import ConsoleTable

ROWS = [("tokens per forward after phase distilled", "eagle3, depth 3, 206,080 parameters")]


@pytest.mark.parametrize("width", range(70, 90))
def test_table_keeps_its_edge_and_its_words_at_any_width(width: int):
    output = StringIO()
    Console(width=width, file=output).print(ConsoleTable("title", ROWS))
    _, *lines = output.getvalue().splitlines()
    assert all(line.endswith(tuple("┐│┘")) for line in lines)
    assert set(" ".join(map(" ".join, ROWS)).split()) <= set(" ".join(lines).split())


def test_header_breaks_into_lines_before_a_table_is_split():
    header = "batch, context", "tree (* chosen)", "nodes", "tokens per forward", "speed-up"
    row = "4, 1024", "best_first+lookup *", "14", "1.07", "0.40 [0.38, 0.42]"
    output = StringIO()
    Console(width=80, file=output).print(ConsoleTable("title", [row], header))
    lines = output.getvalue().splitlines()
    assert all(line.endswith(tuple("┓┃┩│┘")) for line in lines[1:])
    assert all(cell in lines[-2] for cell in row)
    assert all(word in " ".join(lines) for name in header for word in name.split())


def test_wide_table_becomes_two_that_name_their_rows():
    header = "drafter", "tokens per second", "speed-up", "fastest over it", "tokens per forward"
    row = (
        "transformers_lookup",
        "47.0",
        "1.03 [0.68, 1.61]",
        "1.16 [0.89, 1.57]",
        "1.11 [1.00, 1.38]",
    )
    output = {}
    for width in (120, 80):
        out = StringIO()
        Console(width=width, file=out).print(ConsoleTable("title", [row], header))
        output[width] = [line for line in out.getvalue().splitlines() if line.startswith("│")]
    assert [len(lines) for lines in output.values()] == [1, 2]
    assert all(row[0] in line for line in output[80])
    assert all(cell in " ".join(output[80]) for cell in row)

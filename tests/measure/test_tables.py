"""Narrow consoles and pipes: no figure is cut."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from specheads.measure import report, summary
from specheads.measure.compare import condition, table
from specheads.measure.results import Results, read

RESULTS = Path(__file__).parents[2] / "recipes" / "tiny_code" / "results.json"
NUMBER = re.compile(r"[+-]?\d[\d,]*(?:\.\d+)?")


def printed(thing: object, width: int) -> str:
    stream = io.StringIO()
    Console(width=width, file=stream).print(thing)
    return stream.getvalue()


def figures(text: str) -> list[str]:
    return sorted(NUMBER.findall(text))


@pytest.mark.parametrize("width", [200, 80, 40])
def test_report_shows_every_figure_at_any_width(width: int):
    results, stream = read(Results, RESULTS), io.StringIO()
    assert results is not None
    page = Path("/a/[b]") / ("folder" * 12) / "report.html"
    report.show(results, Console(width=width, file=stream), page)
    text = stream.getvalue()
    cells = [cell for row in summary.summary(results) for cell in row]
    cells += [cell for row in summary.depth_rows(results) for cell in row]
    shown = figures(text)
    for figure in figures(" ".join([*cells, summary.verdict(results)])):
        assert figure in shown
        shown.remove(figure)
    assert "\u2026" not in text
    assert f"report: {page}\n" in text


@pytest.mark.parametrize("width", [200, 60])
def test_comparison_shows_every_figure_at_any_width(width: int):
    from tests.measure.test_compare import rows

    found = table(condition(rows(), 0.0, 3))
    text = printed(found, width)
    cells = [cell for row in found.rows for cell in row]
    assert figures(text) == figures(" ".join([found.title, *cells]))
    assert "\u2026" not in text
    assert all(len(line) <= width for line in text.splitlines())

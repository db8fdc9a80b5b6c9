"""The report: its files, and a table on the console."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from specheads.core.errors import InputError
from specheads.core.paths import local_path, writable_folder
from specheads.measure.plots import figures, png
from specheads.measure.report.page import TITLES, render
from specheads.measure.report.words import depth_rows, pays, summary, verdict
from specheads.measure.results import Results
from specheads.measure.store import dumps
from specheads.measure.tables import Fitted
from specheads.runs.directory import write_atomic


def write_report(folder: Path, results: Results, history: Sequence[Mapping[str, Any]]) -> Path:
    """Write results.json, texts.json, the pictures and report.html; return the page.

    Every file appears whole or not at all. results.json comes last, so where it is, the rest
    is too; what an earlier report had besides is removed then. `history` are rows of metrics.jsonl;
    none where the head was not trained here.
    """
    folder, drawn = writable_folder(folder), figures(results, history)
    stale = {"texts.json", *(f"{name}.png" for name in TITLES)}
    for name, figure in drawn.items():
        write_atomic(folder / f"{name}.png", png(figure))
        stale.discard(f"{name}.png")
    page = folder / "report.html"
    write_atomic(page, render(results, drawn))
    if results.texts:
        write_atomic(folder / "texts.json", dumps(results.texts, indent=None))
        stale.discard("texts.json")
    write_atomic(folder / "results.json", dumps(results))
    for name in stale:
        (folder / name).unlink(missing_ok=True)
    return page


def show(results: Results, console: Console | None = None, page: Path | None = None) -> None:
    """Print the main table, the table by depth, the verdict, and where the report lies."""
    console = console or Console()
    console.print(Fitted("specheads evaluation", summary(results)))
    header, *rows = depth_rows(results)
    console.print(Fitted("by depth", rows, header))
    console.print(verdict(results), style="bold" if pays(results) else "bold red")
    if page is not None:
        # one line, to be copied
        console.print(f"report: {page}", markup=False, soft_wrap=True)


def record(folder: Path, results: Results) -> None:
    """Keep what was measured with the recipe, in its folder or in one of its own folders."""
    write_atomic(record_folder(folder) / "results.json", dumps(results))


def record_folder(folder: Path) -> Path:
    """Return a folder where results can be kept: a recipe's, or one in it. Others are refused."""
    place = local_path(folder)
    if not any((one / "recipe.yaml").is_file() for one in (place, place.parent)):
        raise InputError(
            f"record needs a recipe's folder, or one in it; {folder} has no recipe.yaml"
        )
    return writable_folder(folder)

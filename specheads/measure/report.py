"""The report: results.json, pictures, one self-contained page, and a table on the console."""

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from specheads.core.errors import InputError
from specheads.core.paths import local_path, writable_folder
from specheads.measure.plots import draw
from specheads.measure.results import BaseQuality, Candidate, Drafting, Interval, Results
from specheads.measure.store import dumps
from specheads.measure.tables import Fitted
from specheads.runs.directory import write_atomic

Rows = list[tuple[str, str]]

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2933; max-width: 54rem;
       margin: 2.5rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.verdict { border-left: 4px solid #2563a8; background: #f1f4f8; padding: .7rem 1rem; }
.verdict.no { border-color: #b42318; background: #fdf0ee; }
table { border-collapse: collapse; margin: .5rem 0; }
th, td { text-align: left; padding: .25rem 1rem .25rem 0; border-bottom: 1px solid #e3e8ee;
         font-variant-numeric: tabular-nums; vertical-align: top; }
tr.chosen td { font-weight: 600; background: #f1f4f8; }
img { max-width: 100%; } pre { font-size: 12px; background: #f6f8fa; padding: 1rem;
overflow-x: auto; }
"""


def write_report(folder: Path, results: Results, history: Sequence[Mapping[str, Any]]) -> Path:
    """Write results.json, the pictures and report.html; return the page.

    Every file appears whole or not at all. results.json comes last, so where it is, the rest
    is too. `history` are rows of metrics.jsonl; none where the head was not trained here.
    """
    folder, pictures = writable_folder(folder), draw(results, history)
    for name, picture in pictures.items():
        write_atomic(folder / name, picture)
    page = folder / "report.html"
    write_atomic(page, render(results, pictures))
    write_atomic(folder / "results.json", dumps(results))
    return page


def pays(results: Results) -> bool:
    """Tell whether speculation was faster than the base alone, where speed was measured."""
    return not results.speed or results.speed.speedup > 1.0


def verdict(results: Results) -> str:
    """Return in one or two sentences whether speculation pays on this machine, and why."""
    speed, online = results.speed, results.online
    if not speed or not online:
        return "Speed was not measured."
    ratio, (low, high) = speed.speedup, speed.interval
    measured = f"{ratio:.2f}x the speed of the base alone (95 % interval {low:.2f} to {high:.2f})"
    why = (
        f"a step gives {online.tokens_per_forward:.2f} tokens and takes {speed.step_overhead:.2f} "
        "times as long as a step of the base alone"
    )
    if ratio <= 1.0:
        return (
            f"Speculation does not pay on this machine: {measured}. The reason: {why}. A smaller "
            "tree, a cheaper head or a better one, or a larger base would change that."
        )
    if low <= 1.0:
        return (
            f"Speculation may pay on this machine, but the interval includes 1: {measured}; {why}."
        )
    return f"Speculation pays on this machine: {measured}; {why}."


def _figure(value: float, interval: Interval, form: str = ".3f") -> str:
    low, high = interval
    return f"{value:{form}} ({low:{form}} to {high:{form}})"


def summary(results: Results) -> Rows:
    """Return the report's main table: what was measured, and the figure."""
    head, base, settings = results.head, results.base, results.settings
    adapter = f" + {base.adapter}" if base.adapter else ""
    rows = [
        ("head", f"{head.kind}, depth {head.depth}, {head.parameters:,} parameters"),
        ("base", f"{base.name}{adapter}, {base.parameters:,} parameters"),
        ("prompts", f"{results.prompts.count} of {results.prompts.name}"),
        ("tree", f"{settings.tree}, {settings.num_nodes} nodes"),
    ]
    if settings.temperature:
        kept = "lossless" if settings.lossless else "LOSSY: not the base's own distribution"
        text = f"temperature {settings.temperature:g}, acceptance {settings.acceptance} ({kept})"
        rows.append(("sampling", text))
    if (drafted := results.draft_vocabulary) and (share := drafted.coverage) != 1.0:
        known = "" if share is None else f", {share:.1%} of the training text"
        rows.append(("draft vocabulary", f"{drafted.size:,} tokens{known}"))
    for name, rate in (("offline", results.offline), ("online", results.online)):
        if rate:
            text = _figure(rate.tokens_per_forward, rate.interval)
            rows.append((f"tokens per forward, {name}", text))
    rows += _drafting(results.drafting)
    for phase in results.phases:
        name = f"tokens per forward after phase {phase.phase}"
        rows.append((name, f"{phase.tokens_per_forward:.3f}"))
    return [*rows, *_base_quality(results.base_quality), *_against_base(results)]


def _drafting(section: Mapping[str, Drafting]) -> Rows:
    """Return what each way to draft gives above temperature zero."""
    rows = []
    for name, found in section.items():
        text = _figure(found.tokens_per_forward, found.interval)
        if gain := found.gain_of_coupled:
            text += f"; coupled over it {_figure(gain.ratio, gain.interval)}"
        label = f"tokens per forward, {name} {found.tree} of {found.num_nodes} nodes"
        rows.append((label, text))
    return rows


def _against_base(results: Results) -> Rows:
    """Return what tells the head's text and speed from those of the base alone."""
    rows, loops, same = [], results.degenerate, results.lossless
    if loops:
        rows.append(("prompts whose text loops", f"{loops.flagged}"))
        if loops.flagged and (rest := loops.without):
            text = _figure(rest.tokens_per_forward, rest.interval)
            rows.append(("tokens per forward without those", text))
    if same:
        text = f"{same.identical} of {same.compared} prompts"
        if (gap := same.first_divergence_logit_gap) is not None:
            text += f"; largest logit gap at a first difference {gap:.2g}"
        rows.append(("identical to the base alone", text))
    if speed := results.speed:
        rows += [
            ("tokens per second, base alone", f"{speed.base_tokens_per_second:.1f}"),
            ("tokens per second, with head", f"{speed.tokens_per_second:.1f}"),
            ("speed-up", _figure(speed.speedup, speed.interval)),
            ("time of a step over the base's", f"{speed.step_overhead:.3f}"),
        ]
    return rows


def _base_quality(section: BaseQuality | None) -> Rows:
    """Return what joint training did to the base itself."""
    if not section:
        return []
    rows = []
    for found, name in ((section.before, "base"), (section.after, "base + adapter")):
        text = _figure(found.cross_entropy, found.cross_entropy_interval, ".4f")
        rows.append((f"nats per token, {name}", f"{text}; {found.accuracy:.1%} right"))
    change = _figure(section.change.cross_entropy, section.change.interval, "+.4f")
    return [*rows, ("change of the base's nats per token", change)]


def depth_rows(results: Results) -> list[list[str]]:
    """Return the table by depth, its header first."""
    top = results.offline.top_k_accuracy if results.offline else []
    measured = [one.per_depth if one else [] for one in (results.offline, results.online)]
    header = ["depth", "offline accepted / offered", "online accepted / offered"]
    header += [f"top {k + 1}" for k in range(len(top[0]) if top else 0)]
    rows = [header]
    for depth in range(max(len(top), *map(len, measured))):
        cells = [
            f"{counts[depth].accepted} / {counts[depth].offered}" if depth < len(counts) else ""
            for counts in measured
        ]
        accuracy = [f"{value:.3f}" for value in top[depth]] if depth < len(top) else []
        rows.append([str(depth + 1), *cells, *accuracy])
    return rows


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
    """Keep what was measured with the recipe, which alone may hold numbers."""
    if not (local_path(folder) / "recipe.yaml").is_file():
        raise InputError(f"record needs a recipe's folder; {folder} has no recipe.yaml")
    write_atomic(writable_folder(folder) / "results.json", dumps(results))


def render(results: Results, pictures: Mapping[str, bytes]) -> str:
    """Return the page, pictures and all: it needs no other file and no network."""
    images = "\n".join(
        f'<img alt="{name.removesuffix(".png")}" '
        f'src="data:image/png;base64,{base64.b64encode(picture).decode()}">'
        for name, picture in pictures.items()
    )
    title = f"{results.head.kind} on {results.base.name}"
    provenance = dumps({"settings": results.settings, "provenance": results.provenance}).rstrip()
    header, *rows = depth_rows(results)
    mood = "verdict" if pays(results) else "verdict no"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>
<style>{STYLE}</style></head><body>
<h1>{html.escape(title)}</h1>
<p class="{mood}">{html.escape(verdict(results))}</p>
{_table([], [list(row) for row in summary(results)])}
{images}
<h2>By depth</h2>
{_table(header, rows)}
{_candidates(results.tree_candidates)}
<h2>Settings and provenance</h2>
<pre>{html.escape(provenance)}</pre>
</body></html>
"""


def _candidates(candidates: Sequence[Candidate]) -> str:
    if not candidates:
        return ""
    header = ["tree", "nodes", "depth", "tokens per forward", "step time", "estimated speed-up"]
    rows = [
        [
            row.tree,
            str(row.num_nodes),
            str(row.depth),
            *(f"{x:.3f}" for x in (row.tokens_per_forward, row.step_overhead, row.speedup)),
        ]
        for row in candidates
    ]
    chosen = next(place for place, row in enumerate(candidates) if row.chosen)
    return "<h2>Trees tried, on other prompts</h2>\n" + _table(header, rows, chosen)


def _table(header: list[str], rows: list[list[str]], chosen: int | None = None) -> str:
    def line(tag: str, cells: list[str], attribute: str = "") -> str:
        inner = "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)
        return f"<tr{attribute}>{inner}</tr>"

    lines = [line("th", header)] if header else []
    for place, row in enumerate(rows):
        lines.append(line("td", row, ' class="chosen"' if place == chosen else ""))
    return "<table>{}</table>".format("\n".join(lines))

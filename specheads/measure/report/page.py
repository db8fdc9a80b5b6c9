"""The page: one file that has everything in it, asks for nothing and runs its own script only."""

import base64
import hashlib
from collections.abc import Callable, Iterator, Mapping
from importlib import resources
from typing import Any

from matplotlib.figure import Figure

from specheads.measure.report import headlines, words
from specheads.measure.report.elements import Section, facts, note, table, together
from specheads.measure.report.markup import Markup, element
from specheads.measure.report.svg import inline
from specheads.measure.report.texts import texts
from specheads.measure.results import Results
from specheads.measure.store import to_json

TITLES = {
    "speed": "Tokens per second",
    "acceptance": "Acceptance by depth",
    "loss": "Training loss",
    "validation": "Agreement on held-out text",
    "learning": "Learning curve on held-out text",
}
"""What pictures are called where they cannot be seen."""


def measured(results: Results) -> Section:
    """Return every figure in words."""
    return Section("Measured", facts(words.summary(results)))


def by_depth(results: Results) -> Section | None:
    """Return the counts of each depth."""
    header, *rows = words.depth_rows(results)
    told = "Accepted of those offered, where every draft above was accepted."
    return (
        Section("By depth", together(note(told), table("by depth", header, rows))) if rows else None
    )


def by_category(results: Results) -> Section | None:
    """Return the rate of each category of prompts, where there are several."""
    header, *rows = words.category_rows(results)
    return Section("By category", table("by category", header, rows)) if len(rows) > 1 else None


def candidates(results: Results) -> Section | None:
    """Return the trees that were tried."""
    if not results.tree_candidates:
        return None
    header, *rows = words.candidate_rows(results.tree_candidates)
    chosen = next(place for place, row in enumerate(results.tree_candidates) if row.chosen)
    return Section("Trees tried, on other prompts", table("trees tried", header, rows, chosen))


def made_by(results: Results) -> Section:
    """Return settings and provenance: what it takes to measure the same again."""
    whose = {"head": results.head, "base": results.base, "prompts": results.prompts}
    parts = {"Settings": results.settings, "Subject": whose, "Provenance": results.provenance}
    columns = [
        element("div", element("h3", name), facts(list(_flat(to_json(part)))))
        for name, part in parts.items()
    ]
    return Section("Settings and provenance", element("div", *columns, class_="columns"))


SECTIONS: tuple[Callable[[Results], Section | None], ...] = (
    *(texts, measured, by_depth, by_category, candidates, made_by),
)
"""What follows the first screen and the plots; None is a section that has nothing to show."""


def render(results: Results, figures: Mapping[str, Figure]) -> str:
    """Return the page, pictures and all: it needs no other file and no network."""
    title = f"{results.head.kind} on {results.base.name}"
    shown = [_plots(figures), *(section(results) for section in SECTIONS)]
    sections = [section for section in shown if section is not None]
    links = [element("a", one.title, href=f"#{one.anchor}") for one in sections]
    script = _file("script.js")
    body = element(
        "body",
        element(
            "main",
            element("header", element("h1", title), _about(results)),
            _verdict(results),
            headlines.show_all(results),
            element("nav", *links, aria_label="contents"),
            *(one.markup() for one in sections),
        ),
        element("script", script),
    )
    page = element("html", _head(title, script), body, lang="en")
    return f"<!doctype html>\n{page.text}\n"


def _head(title: str, script: Markup) -> Markup:
    digest = base64.b64encode(hashlib.sha256(script.text.encode()).digest()).decode()
    # whatever a text holds, a browser loads nothing and runs this one script
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
        f"script-src 'sha256-{digest}'"
    )
    return element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        # or browsers ask the server for one
        element("link", rel="icon", href="data:,"),
        element("title", title),
        element("style", _file("style.css")),
    )


def _file(name: str) -> Markup:
    return Markup(
        resources.files("specheads.measure.report").joinpath(name).read_text(encoding="utf-8")
    )


def _about(results: Results) -> Markup:
    prompts, settings = results.prompts, results.settings
    hardware = results.provenance.hardware
    sampled = f"temperature {settings.temperature:g}" if settings.temperature else "greedy"
    parts = [
        f"{prompts.count} prompts of {prompts.name}",
        f"{settings.max_new_tokens} new tokens each",
        sampled,
        f"batch {settings.batch_size}",
        f"tree {settings.tree} of {settings.num_nodes} nodes",
        f"{settings.dtype} on {hardware.gpu or hardware.processor}",
    ]
    return element("p", " · ".join(parts), class_="about")


def _verdict(results: Results) -> Markup:
    mood, sign = {True: ("yes", "✓"), False: ("no", "✗"), None: ("maybe", "≈")}[_mood(results)]
    return element(
        "p",
        element("b", sign, aria_hidden="true"),
        element("span", words.verdict(results)),
        class_=f"verdict {mood}",
    )


def _mood(results: Results) -> bool | None:
    """Tell whether speculation pays; None where nobody knows."""
    if not words.drafts(results) or words.wrong(results):
        return False
    if not results.speed or results.speed.interval[0] <= 1.0 < results.speed.speedup:
        return None
    return words.pays(results)


def _plots(figures: Mapping[str, Figure]) -> Section | None:
    drawn = [
        element("figure", inline(figure, name, TITLES.get(name, name)), id=f"plot-{name}")
        for name, figure in figures.items()
    ]
    return Section("Plots", element("div", *drawn, class_="plots")) if drawn else None


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the leaves of nested objects, by their names from the outside in."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _flat(one, f"{name}.{key}" if name else key)
    elif name == "command":
        yield name, " ".join(value)
    elif isinstance(value, list):
        yield name, ", ".join(str(one) for one in value) or "none"
    else:
        yield name, "none" if value in (None, "") else str(value)

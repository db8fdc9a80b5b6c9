"""What the page is built of: sections, tables, and plots with their captions."""

from collections.abc import Sequence
from dataclasses import dataclass

from specheads.measure.report.markup import Markup, element, join


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page with a heading, which the list of contents names."""

    title: str
    body: Markup

    @property
    def anchor(self) -> str:
        """What a link to it says."""
        return self.title.lower().replace(" ", "-")

    def markup(self) -> Markup:
        """Return the section as it stands on the page."""
        return element("section", element("h2", self.title), self.body, id=self.anchor)


def facts(rows: Sequence[tuple[str, str]]) -> Markup:
    """Return a table of names and what they are; it fits any width."""
    lines = [
        element("tr", element("th", name, scope="row"), element("td", value))
        for name, value in rows
    ]
    return element("table", element("tbody", *lines), class_="facts")


def table(
    name: str, header: Sequence[str], rows: Sequence[Sequence[str]], chosen: int = -1
) -> Markup:
    """Return a table of figures; where it is too wide it moves within its own box."""
    head = element("tr", *(element("th", cell, scope="col") for cell in header))
    lines = [
        element(
            "tr",
            *(element("td", cell) for cell in row),
            class_="chosen" if place == chosen else False,
        )
        for place, row in enumerate(rows)
    ]
    inner = element("table", element("thead", head), element("tbody", *lines), class_="data")
    # with a place in the order of keys, so that arrows move it too
    return element("div", inner, class_="scroll", tabindex="0", role="region", aria_label=name)


def note(text: str) -> Markup:
    """Return a line that says how to read something."""
    return element("p", text, class_="note")


def together(*parts: Markup) -> Markup:
    """Return parts below each other."""
    return join(*parts, by="\n")

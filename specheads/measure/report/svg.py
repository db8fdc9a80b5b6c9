"""Figures as SVG inside the page: crisp at any size, in the page's letters and colours."""

import io
import re
from typing import Any
from xml.etree import ElementTree

import matplotlib
from matplotlib.figure import Figure

from specheads.measure.plots import BLUE, GREY, ORANGE, SHADES, TEXT
from specheads.measure.report.markup import Markup

VARIABLES = {
    BLUE: "--blue",
    ORANGE: "--orange",
    GREY: "--grey",
    TEXT: "--soft",
    "#000000": "--ink",
    "#ffffff": "--page",
    **{shade: f"--shade-{number}" for number, shade in enumerate(SHADES)},
}
"""What the style sheet calls the colours of the figures, so that the dark has its own."""

AS_TEXT: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "specheads"}
"""Letters stay letters, and equal figures equal files."""

NOTHING = dict.fromkeys(("Creator", "Date", "Format", "Type"))


def inline(figure: Figure, name: str, title: str) -> Markup:
    """Return a figure as an element of the page; `name` keeps its ids apart from others'."""
    buffer = io.StringIO()
    with matplotlib.rc_context(AS_TEXT):
        figure.savefig(buffer, format="svg", transparent=True, metadata=NOTHING)
    root = ElementTree.fromstring(buffer.getvalue())
    _strip(root)
    for one in root.iter():
        _adapt(one, name)
    for size in ("width", "height", "version"):
        root.attrib.pop(size, None)
    root.attrib |= {"role": "img", "aria-label": title}
    # as HTML: inside a page there are no namespaces
    return Markup(ElementTree.tostring(root, encoding="unicode", method="html"))


def _strip(root: ElementTree.Element) -> None:
    """Remove what is no drawing: metadata, and styles, which would be those of the whole page."""
    for parent in root.iter():
        for child in list(parent):
            if child.tag.rpartition("}")[2] in ("metadata", "style"):
                parent.remove(child)


def _adapt(one: ElementTree.Element, name: str) -> None:
    """Make an element one of the page: no namespaces, ids of its own, variables for colours."""
    one.tag = one.tag.rpartition("}")[2]
    for key, value in list(one.attrib.items()):
        del one.attrib[key]
        key = key.rpartition("}")[2]
        # groups are named for people only
        if key == "id" and one.tag == "g":
            continue
        if key == "id":
            value = f"{name}-{value}"
        value = re.sub(r"^#|(?<=url\()#", f"#{name}-", value)
        one.attrib[key] = _style(value) if key == "style" else value


def _style(style: str) -> str:
    style = re.sub(r"font-family: [^;]*; ?", "", style)
    return re.sub(r"#[0-9a-f]{6}", lambda found: f"var({VARIABLES.get(found[0], '--ink')})", style)

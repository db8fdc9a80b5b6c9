"""Texts with every token coloured by how it came, and what the script steps through."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from specheads.decoding.origins import BASE, Origin, node_origins
from specheads.measure.report.elements import Section, note, together
from specheads.measure.report.markup import Markup, element, join, visible
from specheads.measure.results import Results
from specheads.measure.texts import DecodedText, TextStep

DEEPEST = 6
"""Depth from which on drafts look alike."""

LETTERS = 800
"""Of a prompt as many are shown, its last ones."""

SIGNS = str.maketrans({"\n": "↵", "\t": "⇥", " ": "␣"})
"""In a tree, where blanks would not be seen."""

HINT = (
    "Choose a token, by click or with the arrow keys, to see the tree that its step drafted: ✓ "
    "is accepted, + is what the base added, the rest was refused."
)


def texts(results: Results) -> Section | None:
    """Return the section of texts, where some were kept."""
    shown = results.texts.texts if results.texts else []
    if not shown:
        return None
    tokens = [list(_tokens(text)) for text in shown]
    counts = Counter(origin for one in tokens for _, _, origin in one)
    articles = [
        _article(*both, number) for number, both in enumerate(zip(shown, tokens, strict=True), 1)
    ]
    body = together(
        note(
            "The first prompts' texts, in grey what was given. Each token shows how it came: "
            "drafted, the deeper the stronger its colour and the thicker its bar, copied, or the "
            "base's own."
        ),
        _legend(counts),
        element("p", HINT, class_="hint note", hidden=True),
        *articles,
        element("script", _data(shown), type="application/json", id="steps"),
    )
    return Section("Texts", body)


def _tokens(text: DecodedText) -> Iterator[tuple[str, int, Origin]]:
    """Yield each new token, the number of its step, and how it came."""
    found = [(text.first, 0, BASE)]
    for number, step in enumerate(text.steps, start=1):
        origins = node_origins(step.parents, step.num_copied)
        found += [(step.tokens[node], number, origins[node]) for node in step.path[1:]]
        found.append((step.bonus, number, BASE))
    yield from found[: text.num_tokens]


def _look(origin: Origin) -> str:
    """Return the class of the style sheet that shows how a token came."""
    if origin.kind == "base":
        return "b"
    return "c" if origin.kind == "copied" else f"d{min(origin.depth, DEEPEST)}"


def _legend(counts: Counter[Origin]) -> Markup:
    """Return what the colours mean, and how many tokens came in each way."""
    total, looks = counts.total(), Counter[str]()
    for origin, count in counts.items():
        looks[_look(origin)] += count
    names = {"b": "the base's own"}
    names |= {f"d{depth}": f"depth {depth}" for depth in range(1, DEEPEST)}
    names |= {f"d{DEEPEST}": f"depth {DEEPEST} or more", "c": "copied"}
    items = [
        element(
            "li",
            element("span", name, class_=f"t {look}"),
            " ",
            element("small", f"{looks[look]:,} ({looks[look] / total:.0%})"),
        )
        for look, name in names.items()
        if looks[look]
    ]
    switch = element("label", element("input", type="checkbox", id="depths"), " depths as digits")
    return element("ul", *items, element("li", switch, class_="switch"), class_="legend")


def _article(text: DecodedText, tokens: Sequence[tuple[str, int, Origin]], number: int) -> Markup:
    steps = len(text.steps)
    gain = f", {len(tokens) / (steps + 1):.2f} each" if steps else ""
    told = f"{len(tokens)} tokens in {steps + 1} forwards{gain}"
    cut = len(text.prompt) > LETTERS
    given = "…" * cut + text.prompt[-LETTERS:]
    spans = [_token(*one, first=place == 0) for place, one in enumerate(tokens)]
    return element(
        "article",
        element(
            "h3", f"Text {number}", element("small", f"{text.category or 'no category'} · {told}")
        ),
        element(
            "div",
            element("span", given, class_="prompt", title="the prompt"),
            *spans,
            class_="tokens",
            role="group",
            aria_label=f"text {number}, token by token",
        ),
        class_="text",
    )


def _token(text: str, step: int, origin: Origin, *, first: bool) -> Markup:
    # the sign for a new line is drawn by the style sheet, so that copied text has none
    new_line = join(element("i", class_="nl"), "\n")
    first_line, *lines = text.split("\n")
    inner = join(first_line, *(part for line in lines for part in (new_line, line)))
    return element(
        "span",
        inner,
        class_=f"t {_look(origin)}",
        data_step=str(step),
        data_d="" if origin == BASE else str(origin.depth),
        title=f"{origin}, {f'step {step}' if step else 'while the prompt was read'}",
        tabindex="0" if first else "-1",
    )


def _data(shown: Sequence[DecodedText]) -> Markup:
    """Return the steps for the script, as JSON that no text can end."""
    steps = [[_step(step) for step in text.steps] for text in shown]
    data = json.dumps(steps, separators=(",", ":"))
    return Markup(data.replace("<", r"\u003c"))


def _step(step: TextStep) -> dict[str, Any]:
    return {
        "tokens": [_label(token) for token in step.tokens],
        "parents": step.parents,
        "path": step.path,
        "bonus": _label(step.bonus),
        "num_copied": step.num_copied,
    }


def _label(token: str) -> str:
    return visible(token).translate(SIGNS)

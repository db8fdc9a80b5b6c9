"""Tokens in the terminal, coloured by how they came."""

from collections import Counter
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.text import Text

from specheads.commands._dialogue import Answer, Painted
from specheads.core.errors import printable
from specheads.decoding.loop import Origin

DRAFTED = ("#7cc48d", "#4fb06b", "#2e9f55", "#1f8a6d", "#1a7f86")
"""Colours of drafted tokens by depth; the last is of all deeper ones."""

COPIED, DIM = "#c58af9", "dim"

ORDER = ("base", "drafted", "copied")
"""In which order origins are told."""


def style(origin: Origin) -> str:
    """Return how rich shows a token; the base's own look as all text does."""
    if origin.kind == "base":
        return ""
    if origin.kind == "copied":
        return COPIED
    deep = min(origin.depth, len(DRAFTED))
    # not by colour alone: the deeper, the more there is to see
    return DRAFTED[deep - 1] + (" underline" if deep > 1 else "")


def lit(painted: Painted) -> Text:
    """Return what rich shows of a text."""
    out = Text()
    for piece, origin in painted:
        out.append(printable(piece), style(origin))
    return out


def legend(depth: int, *, copies: bool = False) -> Text:
    """Return what the colours mean."""
    out = Text("the base's own", "")
    for level in range(1, min(depth, len(DRAFTED)) + 1):
        more = "+" if level == len(DRAFTED) < depth else ""
        out.append(" · ", DIM)
        out.append(f"drafted at depth {level}{more}", style(Origin("drafted", level)))
    if copies:
        out.append(" · ", DIM)
        out.append("copied", COPIED)
    return out


def told(answer: Answer) -> str:
    """Return an answer in figures: tokens, speed, and how its tokens came."""
    return (
        f"{len(answer.origins)} tokens, {answer.tokens_per_forward:.2f} a forward, "
        f"{answer.tokens_per_second:.1f} tokens/s"
        + (f"; {shares(answer.origins)}" if answer.drafter else "")
    )


def shares(origins: Sequence[Origin]) -> str:
    """Return in words which part of a text came how."""
    counts = Counter(origins)
    ordered = sorted(counts, key=lambda origin: (ORDER.index(origin.kind), origin.depth))
    return ", ".join(f"{origin} {counts[origin] / len(origins):.0%}" for origin in ordered)


def tail(text: Text, console: Console, width: int, lines: int) -> Text:
    """Return the last lines of a text that is as wide."""
    return Text("\n").join(text.wrap(console, width)[-lines:])


def has_colour(console: Console) -> bool:
    """Return whether colours are seen."""
    return console.is_terminal and not console.no_color


def plain(painted: Iterable[tuple[str, Origin]]) -> str:
    """Return a text without colours."""
    return printable("".join(piece for piece, _ in painted))

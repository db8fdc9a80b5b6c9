"""HTML that cannot be broken by what is put into it: text is escaped unless it is markup."""

import html
import unicodedata
from dataclasses import dataclass

HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
"""Unicode's categories of what has no glyph, or turns the direction of text around it."""

JOINERS = "\N{ZERO WIDTH NON-JOINER}\N{ZERO WIDTH JOINER}"
"""Those that letters and emoji need to be themselves."""

EMPTY = ("br", "img", "input", "link", "meta")


@dataclass(frozen=True, slots=True)
class Markup:
    """HTML as it stands."""

    text: str


def visible(text: str) -> str:
    """Return text with a sign for each character that would be unseen, or move others.

    Newlines and tabs stay. Control characters get the pictures that Unicode has for them, others
    their numbers: what a model writes can neither hide nor turn the line around.
    """
    return "".join(map(_visible, text))


def _visible(letter: str) -> str:
    if letter in "\n\t" or letter in JOINERS or unicodedata.category(letter) not in HIDDEN:
        return letter
    code = ord(letter)
    if code < 32:
        return chr(0x2400 + code)
    return f"⟨U+{code:04X}⟩"


def element(tag: str, *children: Markup | str, **attributes: str | bool) -> Markup:
    """Return an element; what is no markup is escaped.

    Attributes are named as in Python: `class_` for class, `data_step` for data-step. True is one
    without a value, False none at all.
    """
    given = [
        f" {name.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{_escape(value)}"')
        for name, value in attributes.items()
        if not isinstance(value, bool) or value
    ]
    opened = f"<{tag}{''.join(given)}>"
    return Markup(opened if tag in EMPTY else f"{opened}{join(*children).text}</{tag}>")


def join(*parts: Markup | str, by: str = "") -> Markup:
    """Return parts one after the other; what is no markup is escaped."""
    return Markup(by.join(one.text if isinstance(one, Markup) else _escape(one) for one in parts))


def _escape(text: str | bool) -> str:
    return html.escape(visible(str(text)))

"""What a setting may hold, to be declared beside it: types with their ranges, and rules of its own.

All are `Annotated`; validation.py holds values against them. Decoding reads heads' settings too, so
nothing but Python is needed here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

MOST = 2**31 - 1
"""Largest number of anything that is counted."""

LONGEST_NAME = 255
"""Most bytes of a file's name that common file systems take."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule in words, and the test of it."""

    words: str
    holds: Callable[[Any], bool]
    bound: int | float | None = None
    """Where a range ends, for whoever wants to try both sides."""


def at_least(least: int | float) -> Rule:
    """Return the rule that a number is this or more."""
    return Rule(f"at least {least:,}", lambda value: value >= least, least)


def above(least: int | float) -> Rule:
    """Return the rule that a number is more than this."""
    return Rule(f"above {least:,}", lambda value: value > least, least)


def at_most(most: int | float) -> Rule:
    """Return the rule that a number is this or less."""
    # what nobody reaches need not be told
    words = "" if most == MOST else f"at most {most:,}"
    return Rule(words, lambda value: value <= most, most)


def below(most: int | float) -> Rule:
    """Return the rule that a number is less than this."""
    return Rule(f"below {most:,}", lambda value: value < most, most)


def one_of(*names: str) -> Rule:
    """Return the rule that a text is one of these."""
    shown = ", ".join(name or "''" for name in names)
    return Rule(f"one of {shown}", names.__contains__)


def _is_text(value: str) -> bool:
    # lone surrogates stand for bytes that were no text
    encodable = not any("\ud800" <= letter <= "\udfff" for letter in value)
    return encodable and len(value) <= 4096 and value.isprintable()


def _is_place(value: str) -> bool:
    parts = value.replace("\\", "/").split("/")
    return _is_text(value) and all(len(part.encode()) <= LONGEST_NAME for part in parts)


def _is_pattern(value: str) -> bool:
    parts = value.split("/")
    return _is_place(value) and value != "" and "" not in parts[:1] and ".." not in parts


def _is_name(value: str) -> bool:
    return _is_place(value) and value.strip() not in ("", ".", "..") and "/" not in value


Count = Annotated[int, at_least(0), at_most(MOST)]
Positive = Annotated[int, at_least(1), at_most(MOST)]
Seed = Annotated[int, at_least(0), at_most(2**32 - 1)]
Depth = Annotated[int, at_least(1), at_most(64)]
Layers = Annotated[int, at_least(0), at_most(64)]
Levels = Annotated[int, at_least(0), at_most(64)]
Length = Annotated[
    int, Rule("0 or at least 2", lambda length: length == 0 or length > 1), at_most(MOST)
]
Size = Annotated[int, at_least(1), at_most(2**20)]
Width = Annotated[int, at_least(0), at_most(2**20)]
Layer = Annotated[int, at_least(0), at_most(4096)]
Nodes = Annotated[int, at_least(1), at_most(4096)]
Rank = Annotated[int, at_least(0), at_most(4095)]
Share = Annotated[float, at_least(0), at_most(1)]
Below1 = Annotated[float, at_least(0), below(1)]
Part = Annotated[float, above(0), at_most(1)]
Weight = Annotated[float, at_least(0), at_most(1000)]
Scale = Annotated[float, above(0), at_most(1e9)]
Text = Annotated[str, Rule("text, printable and at most 4096 characters", _is_text)]
Place = Annotated[
    str, Rule(f"a path or an id, its parts of at most {LONGEST_NAME} bytes", _is_place)
]
Pattern = Annotated[Text, Rule("a pattern below the folder: relative, and without ..", _is_pattern)]
Temperature = Annotated[
    float, Rule("0 or at least 0.001", lambda value: value == 0 or value >= 0.001), at_most(100)
]
Name = Annotated[str, Rule("a name that a folder can have, without /", _is_name)]
AUTO = "auto"
Batch = Annotated[
    Any,
    Rule(
        f"a whole number, at least 1, or {AUTO}",
        lambda value: value == AUTO or (type(value) is int and 1 <= value <= MOST),
    ),
]
"""A number to everybody who reads it: `auto` is replaced before anybody does."""
Pair = Rule("2 of them", lambda value: len(value) == 2)
Some = Rule("not empty", bool)

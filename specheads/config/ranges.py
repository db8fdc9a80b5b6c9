"""What a setting may hold, to be declared beside it: types with their ranges, and whole rules.

Each is `Annotated` for pydantic, which holds values against them: see validation.py.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge, GroupedMetadata, Gt, Le, Len, Lt, MinLen, Predicate
from pydantic import AllowInfNan

MOST = 2**31 - 1
"""Largest number of anything that is counted."""

LONGEST_NAME = 255
"""Most bytes of a file's name that common file systems take."""


@dataclass(frozen=True, slots=True)
class Rule(GroupedMetadata):
    """A rule in words, and the test of it."""

    words: str
    holds: Callable[[Any], bool]

    def __iter__(self) -> Iterator[Predicate]:
        """Yield what pydantic tests."""
        yield Predicate(self.holds)


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


Count = Annotated[int, Ge(0), Le(MOST)]
Positive = Annotated[int, Ge(1), Le(MOST)]
Seed = Annotated[int, Ge(0), Le(2**32 - 1)]
Depth = Annotated[int, Ge(1), Le(64)]
Layers = Annotated[int, Ge(0), Le(64)]
Levels = Annotated[int, Ge(0), Le(64)]
Length = Annotated[int, Le(MOST), Rule("0 or at least 2", lambda length: length == 0 or length > 1)]
Width = Annotated[int, Ge(0), Le(2**20)]
Layer = Annotated[int, Ge(0), Le(4096)]
Nodes = Annotated[int, Ge(1), Le(4096)]
Rank = Annotated[int, Ge(0), Le(4095)]
Finite = Annotated[float, AllowInfNan(False)]
Share = Annotated[Finite, Ge(0), Le(1)]
Below1 = Annotated[Finite, Ge(0), Lt(1)]
Part = Annotated[Finite, Gt(0), Le(1)]
Weight = Annotated[Finite, Ge(0), Le(1000)]
Scale = Annotated[Finite, Gt(0), Le(1e9)]
Text = Annotated[str, Rule("text, printable and at most 4096 characters", _is_text)]
Place = Annotated[
    str, Rule(f"a path or an id, its parts of at most {LONGEST_NAME} bytes", _is_place)
]
Pattern = Annotated[Text, Rule("a pattern below the folder: relative, and without ..", _is_pattern)]
Temperature = Annotated[
    Finite, Le(100), Rule("0 or at least 0.001", lambda value: value == 0 or value >= 0.001)
]
Name = Annotated[str, Rule("a name that a folder can have, without /", _is_name)]
Pair = Len(2, 2)
Some = MinLen(1)

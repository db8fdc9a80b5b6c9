"""Types of settings with their ranges, for pydantic to check.

Heads use them for their own settings too, so this module imports nothing heavy.
"""

from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Len, Lt, MinLen, Predicate

MAX_INT = 2**31 - 1
"""Largest value of any count; messages leave this limit out."""

MAX_NAME_BYTES = 255
"""Longest file name that common file systems take."""

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Rule(Predicate):
    """A predicate with its description, such as `one of corpus, distilled`."""

    words: str = ""


def one_of(*names: str) -> Rule:
    """Return the rule that a text is one of these names."""
    return Rule(frozenset(names).__contains__, f"one of {', '.join(n or repr('') for n in names)}")


def _is_printable(value: str) -> bool:
    # lone surrogates are bytes that could not be decoded
    encodable = not any("\ud800" <= letter <= "\udfff" for letter in value)
    return encodable and len(value) <= 4096 and value.isprintable()


def _is_path(value: str) -> bool:
    parts = value.replace("\\", "/").split("/")
    return _is_printable(value) and all(len(part.encode()) <= MAX_NAME_BYTES for part in parts)


def _is_pattern(value: str) -> bool:
    parts = value.split("/")
    return _is_path(value) and value != "" and "" not in parts[:1] and ".." not in parts


def _is_folder_name(value: str) -> bool:
    return _is_path(value) and value.strip() not in ("", ".", "..") and "/" not in value


def _is_batch_size(value: Any) -> bool:
    return value == AUTO or (type(value) is int and 1 <= value <= MAX_INT)


NonNegativeInt = Annotated[int, Ge(0), Le(MAX_INT)]
PositiveInt = Annotated[int, Ge(1), Le(MAX_INT)]
AtLeastTwo = Annotated[int, Ge(2), Le(MAX_INT)]
Seed = Annotated[int, Ge(0), Le(2**32 - 1)]
Depth = Annotated[int, Ge(1), Le(64)]
DepthOrZero = Annotated[int, Ge(0), Le(64)]
SequenceLength = Annotated[
    int, Rule(lambda length: length == 0 or length > 1, "0 or at least 2"), Le(MAX_INT)
]
Width = Annotated[int, Ge(1), Le(2**20)]
WidthOrZero = Annotated[int, Ge(0), Le(2**20)]
LayerIndex = Annotated[int, Ge(0), Le(4096)]
NumNodes = Annotated[int, Ge(1), Le(4096)]
TreeSize = Annotated[int, Ge(2), Le(4096)]
TokenId = Annotated[int, Ge(-1), Le(MAX_INT)]
TokenRank = Annotated[int, Ge(0), Le(4095)]

Probability = Annotated[float, Ge(0), Le(1)]
ProbabilityBelowOne = Annotated[float, Ge(0), Lt(1)]
PositiveProbability = Annotated[float, Gt(0), Le(1)]
Weight = Annotated[float, Ge(0), Le(1000)]
NonNegativeFloat = Annotated[float, Ge(0), Le(1e21)]
PositiveFloat = Annotated[float, Gt(0), Le(1e9)]
Temperature = Annotated[
    float, Rule(lambda value: value == 0 or value >= 0.001, "0 or at least 0.001"), Le(100)
]

PrintableText = Annotated[str, Rule(_is_printable, "text, printable and at most 4096 characters")]
PathOrId = Annotated[
    str, Rule(_is_path, f"a path or an id, its parts of at most {MAX_NAME_BYTES} bytes")
]
GlobPattern = Annotated[
    str, Rule(_is_pattern, "a pattern below the folder: relative, and without ..")
]
FolderName = Annotated[str, Rule(_is_folder_name, "a name that a folder can have, without /")]
BatchSize = Annotated[Any, Rule(_is_batch_size, f"a whole number, at least 1, or {AUTO}")]
"""An integer to every reader: `auto` is replaced before anything reads it."""

Pair = Len(2, 2)
NonEmpty = MinLen(1)

"""Types of settings with their ranges, and the check of a value against them by pydantic.

Heads use them for their own settings too, so this module imports nothing heavy.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from annotated_types import BaseMetadata, Ge, Gt, Le, Lt, MinLen, Predicate
from pydantic import ConfigDict, TypeAdapter, ValidationError

from specheads.core.errors import InputError

MAX_INT = 2**31 - 1
"""Largest value of any count; messages leave this limit out."""
MAX_NAME_BYTES = 255
"""Longest file name that common file systems take."""
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Rule(Predicate):
    """A predicate with its description, such as `one of corpus, distilled`."""

    description: str = ""


def one_of(*names: str) -> Rule:
    """Return the rule that a text is one of these names."""
    description = f"one of {', '.join(name or repr('') for name in names)}"

    def is_one(value: str) -> bool:
        return value in names

    # pydantic's messages name a rule by it
    is_one.__qualname__ = description
    return Rule(is_one, description)


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
PrintableText = Annotated[str, Rule(_is_printable, "text (printable, at most 4096 characters)")]
PathOrId = Annotated[
    str, Rule(_is_path, f"a path or an id (parts of at most {MAX_NAME_BYTES} bytes)")
]
GlobPattern = Annotated[
    str, Rule(_is_pattern, "a glob below the folder (relative, and without ..)")
]
FolderName = Annotated[str, Rule(_is_folder_name, "a folder name (without /)")]
BatchSize = Annotated[Any, Rule(_is_batch_size, f"a whole number, at least 1, or {AUTO}")]
"""An integer to every reader: `auto` is replaced before anything reads it."""
NonEmpty = MinLen(1)
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
BOUNDS = {Ge: ("at least", "ge"), Gt: ("above", "gt"), Le: ("at most", "le"), Lt: ("below", "lt")}
STRICT = ConfigDict(strict=True, allow_inf_nan=False)


def check_fields(
    settings: Any, where: str = "", together: Callable[[Any, str], None] = lambda *_: None
) -> None:
    """Refuse settings with a wrong type, out of range, or unknown.

    Args:
        settings: A dataclass of settings, which may contain others.
        where: Full name of the settings, such as `schedule`; empty for those of a command.
        together: Refuses settings of one group that contradict each other.
    """
    known = setting_hints(type(settings))
    # Hydra's +name=value adds an attribute
    for name in getattr(settings, "__dict__", {}):
        if name not in known:
            raise UnknownSettingError(f"{where}.{name}".lstrip("."))
    for item in fields(settings):
        value, name = getattr(settings, item.name), f"{where}.{item.name}".lstrip(".")
        default = item.default if item.default_factory is MISSING else item.default_factory()
        check_value(name, value, known[item.name], default)
        parts = value.items() if isinstance(value, Mapping) else [("", value)]
        for key, part in parts:
            if is_dataclass(part):
                check_fields(part, f"{name}.{key}".rstrip("."), together)
    together(settings, where)


class UnknownSettingError(InputError):
    """A setting does not exist; `similar` are names that the user may have meant."""

    def __init__(self, name: str, similar: Sequence[str] = ()) -> None:
        meant = f"did you mean {' or '.join(similar)}?"
        remedy = meant if similar else "correct its name or leave it out"
        super().__init__(f"a setting must be one that --help lists, got {name!r}; {remedy}")
        self.name = name


def check_value(name: str, value: Any, hint: Any, default: Any = MISSING) -> None:
    """Refuse a value that its hint does not allow, by the setting's full name."""
    try:
        _validator(hint)(value)
    except ValidationError as error:
        # the position in a list, if one item is wrong
        index = next((part for part in error.errors()[0]["loc"] if isinstance(part, int)), None)
        wrong, inside = (value, "") if index is None else (value[index], f" at {name}[{index}]")
        usable = default is not MISSING and is_allowed(hint, default)
        remedy = f"its default is {default!r}" if usable else f"set {name}"
        text = repr(wrong)
        shown = text if len(text) <= 60 else f"{text[:57]}..."
        raise InputError(
            f"{name} must be {describe_range(hint)}, got {shown}{inside}; {remedy}"
        ) from None


def is_allowed(hint: Any, value: Any) -> bool:
    """Return whether a value has the type of a hint and keeps its rules."""
    try:
        _validator(hint)(value)
    except ValidationError:
        return False
    return True


@cache
def _validator(hint: Any) -> Callable[[Any], Any]:
    # a hint of settings is checked setting by setting
    return TypeAdapter(hint, config=None if _holds_settings(hint) else STRICT).validate_python


def _holds_settings(hint: Any) -> bool:
    # rules are dataclasses too, but instances
    is_settings = isinstance(hint, type) and is_dataclass(hint)
    return is_settings or any(map(_holds_settings, get_args(hint)))


def describe_range(hint: Any) -> str:
    """Return the type and range of a setting in words, such as `a whole number, at least 1`."""
    is_ruled = get_origin(hint) is Annotated
    plain, annotations = (hint.__origin__, hint.__metadata__) if is_ruled else (hint, ())
    # facts about a setting are annotations too
    rules: list[Any] = [rule for rule in annotations if isinstance(rule, BaseMetadata)]
    origin, inner = get_origin(plain), get_args(plain)
    if rules and plain in (str, Any):
        return rules[-1].description
    if origin in (Union, UnionType):
        kind = (
            " or none; ".join(describe_range(one) for one in inner if one is not NoneType)
            + " or none"
        )
    elif origin is list:
        kind = f"a list, each {describe_range(inner[0])}"
    else:
        kind = KINDS.get(plain, "a group of settings")
    return ", ".join([kind, *filter(None, map(_described, rules))])


def _described(rule: Any) -> str:
    if isinstance(rule, Rule):
        return rule.description
    if isinstance(rule, MinLen):
        return "not empty"
    text, name = BOUNDS[type(rule)]
    bound = getattr(rule, name)
    return "" if bound == MAX_INT else f"{text} {bound:,}"


@cache
def setting_hints(kind: type) -> dict[str, Any]:
    """Return the type hint of each setting of a dataclass, with its rules."""
    return get_type_hints(kind, include_extras=True)

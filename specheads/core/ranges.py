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
    names = value.replace("\\", "/").split("/")
    return _is_printable(value) and all(len(name.encode()) <= MAX_NAME_BYTES for name in names)


def _is_pattern(value: str) -> bool:
    names = value.split("/")
    return _is_path(value) and value != "" and "" not in names[:1] and ".." not in names


def _is_folder_name(value: str) -> bool:
    return _is_path(value) and value.strip() not in ("", ".", "..") and "/" not in value


def _is_positive_or_auto(value: Any) -> bool:
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
PositiveIntOrAuto = Annotated[
    Any, Rule(_is_positive_or_auto, f"a whole number, at least 1, or {AUTO}")
]
"""An integer to every reader: `auto` is replaced before anything reads it."""
NonEmpty = MinLen(1)
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
BOUNDS = {Ge: ("at least", "ge"), Gt: ("above", "gt"), Le: ("at most", "le"), Lt: ("below", "lt")}
STRICT = ConfigDict(strict=True, allow_inf_nan=False)


def check_fields(
    settings: Any, prefix: str = "", check_group: Callable[[Any, str], None] = lambda *_: None
) -> None:
    """Refuse settings with a wrong type, out of range, or unknown.

    Args:
        settings: A dataclass of settings, which may contain others.
        prefix: Full name of the settings, such as `schedule`; empty for those of a command.
        check_group: Refuses settings of one group that contradict each other.
    """
    hints = setting_hints(type(settings))
    # Hydra's +name=value adds an attribute
    for name in getattr(settings, "__dict__", {}):
        if name not in hints:
            raise UnknownSettingError(f"{prefix}.{name}".lstrip("."))
    for setting in fields(settings):
        value, name = getattr(settings, setting.name), f"{prefix}.{setting.name}".lstrip(".")
        factory = setting.default_factory
        default = setting.default if factory is MISSING else factory()
        check_value(name, value, hints[setting.name], default)
        groups = value.items() if isinstance(value, Mapping) else [("", value)]
        for key, group in groups:
            if is_dataclass(group):
                check_fields(group, f"{name}.{key}".rstrip("."), check_group)
    check_group(settings, prefix)


class UnknownSettingError(InputError):
    """A setting does not exist; `similar` are names that the user may have meant."""

    def __init__(self, name: str, similar: Sequence[str] = ()) -> None:
        suggestion = f"did you mean {' or '.join(similar)}?"
        remedy = suggestion if similar else "correct its name or leave it out"
        super().__init__(f"a setting must be one that --help lists, got {name!r}; {remedy}")
        self.name = name


def check_value(name: str, value: Any, hint: Any, default: Any = MISSING) -> None:
    """Refuse a value that its hint does not allow, by the setting's full name."""
    try:
        _validator(hint)(value)
    except ValidationError as error:
        # the position in a list, if one item is wrong
        index = next((key for key in error.errors()[0]["loc"] if isinstance(key, int)), None)
        refused, position = (value, "") if index is None else (value[index], f" at {name}[{index}]")
        usable = default is not MISSING and is_allowed(hint, default)
        remedy = f"its default is {default!r}" if usable else f"set {name}"
        text = repr(refused)
        excerpt = text if len(text) <= 60 else f"{text[:57]}..."
        raise InputError(
            f"{name} must be {describe_range(hint)}, got {excerpt}{position}; {remedy}"
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
    # a group of settings is checked setting by setting
    return TypeAdapter(hint, config=None if group_of(hint) else STRICT).validate_python


def group_of(hint: Any) -> type | None:
    """Return the group of settings that a setting is or contains; None for a plain setting."""
    # rules and facts are dataclasses too, but instances
    if isinstance(hint, type) and is_dataclass(hint):
        return hint
    return next(filter(None, map(group_of, get_args(hint))), None)


def describe_range(hint: Any) -> str:
    """Return the type and range of a setting in words, such as `a whole number, at least 1`."""
    is_annotated = get_origin(hint) is Annotated
    bare, annotations = (hint.__origin__, hint.__metadata__) if is_annotated else (hint, ())
    # facts about a setting are annotations too
    rules: list[Any] = [rule for rule in annotations if isinstance(rule, BaseMetadata)]
    if rules and bare in (str, Any):
        return rules[-1].description
    inner = get_args(bare)
    if get_origin(bare) in (Union, UnionType):
        choices = [describe_range(choice) for choice in inner if choice is not NoneType]
        kind = " or none; ".join([*choices, ""]).removesuffix("; ")
    elif get_origin(bare) is list:
        kind = f"a list, each {describe_range(inner[0])}"
    else:
        kind = KINDS.get(bare, "a group of settings")
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

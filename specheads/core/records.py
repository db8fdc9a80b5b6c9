"""What was measured as JSON, and back: one way for all of it."""

import json
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from specheads.core.errors import InputError

T = TypeVar("T")

OWN_FILE = {"own_file": True}
"""Metadata of a field that stands in a file of its own, and in no other."""


def to_json(value: Any) -> Any:
    """Return what json.loads gives back: dataclasses as objects, by their fields' names."""
    return json.loads(dumps(value))


def from_json(kind: type[T], value: Any, where: str = "") -> T:
    """Return the object that `to_json` made this of; keys that it does not know are left out.

    Messages name the place within the file by `where`.

    Raises:
        ValueError: Something is missing, or is not what it has to be.
    """
    assert is_dataclass(kind)
    hints, given = get_type_hints(kind), {}
    _expect(dict, value, where)
    for item in fields(kind):
        name = item.name.rstrip("_")
        if name in value:
            given[item.name] = _field(hints[item.name], value[name], f"{where}.{name}")
        elif item.default is MISSING and item.default_factory is MISSING:
            raise InputError(
                f"results need {where.lstrip('.')}.{name}, and the file has none; measure again"
            )
    return kind(**given)


def _expect(kind: Any, value: Any, where: str) -> None:
    """Refuse a value of another type; a whole number is a float too, and True is no number."""
    wanted = (int, float) if kind is float else kind
    if not isinstance(value, wanted) or (isinstance(value, bool) and kind is not bool):
        raise InputError(
            f"results need a {kind.__name__} in {where.lstrip('.')}, got {value!r:.40}; measure "
            "again"
        )


def _field(kind: Any, value: Any, where: str) -> Any:
    """Return one field's value, by what the field is annotated with."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        one = next(one for one in inner if one is not NoneType)
        return None if value is None else _field(one, value, where)
    if isinstance(kind, type) and is_dataclass(kind):
        return from_json(kind, value, where)
    _expect(list if origin is tuple else origin or kind, value, where)
    if origin is dict:
        return {key: _field(inner[1], one, f"{where}.{key}") for key, one in value.items()}
    if origin is None:
        return float(value) if kind is float else value
    if origin is tuple and len(value) != len(inner):
        raise InputError(
            f"results need {len(inner)} numbers in {where.lstrip('.')}, got {value!r:.40}; measure "
            "again"
        )
    return origin(_field(inner[0], one, where) for one in value)


def dumps(value: Any, indent: int | None = 1) -> str:
    """Return the text of results.json, compare.json, texts.json or tuned.json."""

    def named(item: Any) -> dict[str, Any]:
        return {
            field.name.rstrip("_"): getattr(item, field.name)
            for field in fields(item)
            if "own_file" not in field.metadata
        }

    return json.dumps(value, indent=indent, default=named) + "\n"

"""Results to JSON and back."""

import json
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from specheads.core.errors import InputError

T = TypeVar("T")

OWN_FILE = {"own_file": True}
"""Metadata of a field that is stored in a separate file."""


def to_json(value: Any) -> Any:
    """Return the JSON value of dataclasses, with the names of their fields as keys."""
    return json.loads(dumps(value))


def from_json(kind: type[T], value: Any, where: str = "") -> T:
    """Return the object of a JSON value; unknown keys are ignored.

    `where` is the path within the file, for error messages.

    Raises:
        ValueError: A value is missing or has the wrong type.
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
                f"results need {where.lstrip('.')}.{name}, and the file lacks it; measure again"
            )
    return kind(**given)


def _expect(kind: Any, value: Any, where: str) -> None:
    """Refuse a value of another type; an integer is a valid float, and a bool is not a number."""
    wanted = (int, float) if kind is float else kind
    if not isinstance(value, wanted) or (isinstance(value, bool) and kind is not bool):
        raise InputError(
            f"results need a {kind.__name__} in {where.lstrip('.')}, got {value!r:.40}; measure "
            "again"
        )


def _field(kind: Any, value: Any, where: str) -> Any:
    """Return one field's value, converted by its annotation."""
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
    """Return a value as the text of a JSON file, such as results.json."""

    def named(item: Any) -> dict[str, Any]:
        return {
            field.name.rstrip("_"): getattr(item, field.name)
            for field in fields(item)
            if "own_file" not in field.metadata
        }

    return json.dumps(value, indent=indent, default=named) + "\n"

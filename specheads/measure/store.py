"""Results as JSON, and back: one way for all of them."""

import json
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from specheads.core.errors import InputError

T = TypeVar("T")


def to_json(value: Any) -> Any:
    """Return what json.loads gives back: dataclasses as objects, by their fields' names."""
    return json.loads(dumps(value))


def from_json(kind: type[T], value: dict[str, Any], where: str = "") -> T:
    """Return the object that `to_json` made this of; keys that it does not know are left out.

    Messages name the place within the file by `where`.
    """
    assert is_dataclass(kind)
    hints, given = get_type_hints(kind), {}
    for item in fields(kind):
        name = item.name.rstrip("_")
        if name in value:
            given[item.name] = _field(hints[item.name], value[name], f"{where}.{name}")
        elif item.default is MISSING and item.default_factory is MISSING:
            raise InputError(
                f"results need {where.lstrip('.')}.{name}, and the file has none; measure again"
            )
    return kind(**given)


def _field(kind: Any, value: Any, where: str) -> Any:
    """Return one field's value, by what the field is annotated with."""
    origin, inner = get_origin(kind), get_args(kind)
    if value is None:
        return None
    if origin in (Union, UnionType):
        return _field(next(one for one in inner if one is not NoneType), value, where)
    if origin is list:
        return [_field(inner[0], one, where) for one in value]
    if origin is dict:
        return {key: _field(inner[1], one, f"{where}.{key}") for key, one in value.items()}
    if origin is tuple:
        return tuple(value)
    return from_json(kind, value, where) if isinstance(value, dict) else value


def read(kind: type[T], file: str | Path) -> T | None:
    """Return what a file holds; None where there is no file."""
    file = Path(file)
    if not file.is_file():
        return None
    return from_json(kind, json.loads(file.read_text(encoding="utf-8")), str(file))


def dumps(value: Any) -> str:
    """Return the text of results.json or compare.json."""

    def named(item: Any) -> dict[str, Any]:
        return {field.name.rstrip("_"): getattr(item, field.name) for field in fields(item)}

    return json.dumps(value, indent=1, default=named) + "\n"

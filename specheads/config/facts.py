"""Facts about settings, as annotations next to their types and ranges."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar, get_args

from specheads.core.ranges import setting_hints

Fact = TypeVar("Fact")


@dataclass(frozen=True, slots=True)
class Resumable:
    """The setting may change when a run resumes: training computes the same head.

    With `among` it may only change from one of these values to another.
    """

    among: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SameText:
    """The setting does not change a text that the base generates."""


@dataclass(frozen=True, slots=True)
class Remeasured:
    """A measurement of a run may use another value than its training."""


@dataclass(frozen=True, slots=True)
class Ordered:
    """The order of the names in the group counts."""


def settings_with(fact: type[Fact], group: type, prefix: str = "") -> Iterator[tuple[str, Fact]]:
    """Yield the full name and the fact of every setting of a group that has such a fact.

    Names of phases and sources are `*` in the full name, as in `schedule.phases.*.steps`.
    """
    for setting in fields(group):
        hint = setting_hints(group)[setting.name]
        name = f"{prefix}{setting.name}"
        for annotation in getattr(hint, "__metadata__", ()):
            if isinstance(annotation, fact):
                yield name, annotation
        if inner := group_of(hint):
            yield from settings_with(fact, inner, f"{name}.{'*.' if 'dict[' in str(hint) else ''}")


def group_of(hint: Any) -> type | None:
    """Return the group of settings that a setting is or contains; None for a plain setting."""
    if isinstance(hint, type) and is_dataclass(hint):
        return hint
    return next(filter(None, map(group_of, get_args(hint))), None)

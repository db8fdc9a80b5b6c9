"""Facts about settings, as annotations next to their types and ranges."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from specheads.core.ranges import group_of, setting_hints

Fact = TypeVar("Fact")


@dataclass(frozen=True, slots=True)
class Resumable:
    """The setting may change when a run resumes: training computes the same head.

    With `among` it may only change from one of these values to another.
    """

    among: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FixesDivergence:
    """The setting may also change when a run resumes that diverged: it can be the cause."""


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
    for name, hint in setting_hints(group).items():
        name = f"{prefix}{name}"
        for annotation in getattr(hint, "__metadata__", ()):
            if isinstance(annotation, fact):
                yield name, annotation
        if inner := group_of(hint):
            yield from settings_with(fact, inner, f"{name}.{'*.' if 'dict[' in str(hint) else ''}")

"""Validation of settings: types and ranges by pydantic, and rules between settings.

Facts that only the base, the head or a file can tell (contexts, vocabularies, depths) are checked
by the code that loads them.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Len, Lt, MinLen
from pydantic import ConfigDict, TypeAdapter, ValidationError

from specheads.config.commands import Simulate
from specheads.config.parts import NO_PATH, Data, Source, Tree
from specheads.config.ranges import MAX_INT, FolderName, Rule
from specheads.config.schedule import Phase, Schedule, Validation
from specheads.core.errors import InputError

KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
BOUNDS = {
    Ge: ("at least", "ge"),
    Gt: ("above", "gt"),
    Le: ("at most", "le"),
    Lt: ("below", "lt"),
}
STRICT = ConfigDict(strict=True, allow_inf_nan=False)


def check(settings: Any, where: str = "") -> None:
    """Refuse settings with a wrong type, out of range, unknown, or in contradiction.

    Args:
        settings: A dataclass of settings, which may contain others.
        where: Full name of the settings, such as `schedule`; empty for those of a command.

    Raises:
        InputError: A setting cannot be used.
    """
    if isinstance(settings, Schedule):
        _check_phases(settings.phases)
    known = hints(type(settings))
    # Hydra's +name=value adds an attribute
    for name in getattr(settings, "__dict__", {}):
        if name not in known:
            raise InputError(unknown(f"{where}.{name}".lstrip(".")))
    for item in fields(settings):
        value, name = getattr(settings, item.name), f"{where}.{item.name}".lstrip(".")
        default = item.default if item.default_factory is MISSING else item.default_factory()
        refuse(name, value, known[item.name], default)
        for inner_name, section in _sections(name, value):
            check(section, inner_name)
    _check_together(settings, where)


def unknown(name: str) -> str:
    """Return the message for a setting that does not exist."""
    return (
        f"a setting must be one that --help lists, got {name!r}; correct its name or leave it out"
    )


def _check_together(settings: Any, where: str) -> None:
    """Refuse settings that contradict each other."""
    if run := getattr(settings, "run", ""):
        _check_one_head(run, getattr(settings, "head_path", ""))
    if isinstance(settings, Phase):
        _check_phase(where, settings)
    elif isinstance(settings, Schedule):
        _check_one_adapter(settings.phases)
    elif isinstance(settings, Tree) and settings.kind == "static" and not settings.paths:
        raise InputError(f"a static tree needs {where}.paths, got none; set it, as in [[0],[1]]")
    elif isinstance(settings, Source):
        _check_source(where, settings)
    elif isinstance(settings, Validation):
        _check_validation(where, settings)
    elif isinstance(settings, Simulate):
        _check_simulate(settings)


def refuse(name: str, value: Any, hint: Any, default: Any = MISSING) -> None:
    """Refuse a value that its hint does not allow, by the setting's full name."""
    try:
        _validator(hint)(value)
    except ValidationError as error:
        # the position in a list, if one item is wrong
        index = next((part for part in error.errors()[0]["loc"] if isinstance(part, int)), None)
        wrong, inside = (value, "") if index is None else (value[index], f" at {name}[{index}]")
        usable = default is not MISSING and allows(hint, default)
        remedy = f"its default is {default!r}" if usable else f"set {name}"
        text = repr(wrong)
        shown = text if len(text) <= 60 else f"{text[:57]}..."
        raise InputError(f"{name} must be {words(hint)}, got {shown}{inside}; {remedy}") from None


def allows(hint: Any, value: Any) -> bool:
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


def words(hint: Any) -> str:
    """Return the type and range of a setting in words, such as `a whole number, at least 1`."""
    plain, rules = _parts(hint)
    origin, inner = get_origin(plain), get_args(plain)
    if rules and plain in (str, Any):
        return rules[-1].words
    if origin is UnionType:
        kind = " or none; ".join(words(one) for one in inner if one is not NoneType) + " or none"
    elif origin is list:
        kind = f"a list, each {words(inner[0])}"
    else:
        kind = KINDS.get(plain, "a group of settings")
    return ", ".join([kind, *filter(None, map(_described, rules))])


def _described(rule: Any) -> str:
    if isinstance(rule, Rule):
        return rule.words
    if isinstance(rule, MinLen):
        return "not empty"
    if isinstance(rule, Len):
        return f"{rule.min_length} of them"
    text, name = BOUNDS[type(rule)]
    bound = getattr(rule, name)
    return "" if bound == MAX_INT else f"{text} {bound:,}"


@cache
def hints(kind: type) -> dict[str, Any]:
    """Return the type hint of each setting of a dataclass, with its rules."""
    return get_type_hints(kind, include_extras=True)


def _parts(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the type and the rules of a hint."""
    return (hint.__origin__, hint.__metadata__) if get_origin(hint) is Annotated else (hint, ())


def _sections(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the dataclasses in a setting, each with its full name."""
    if is_dataclass(value):
        yield name, value
    elif isinstance(value, Mapping):
        yield from ((f"{name}.{key}", one) for key, one in value.items() if is_dataclass(one))


def _check_phases(phases: Mapping[str, Phase]) -> None:
    """Refuse settings for phases that the schedule does not have."""
    if extra := [name for name, phase in phases.items() if not phase.text]:
        remedy = " ".join(f"~schedule.phases.{name}" for name in extra)
        raise InputError(
            f"the recipe changes the phase {extra[0]!r}, which the schedule does not have; add "
            f"{remedy}"
        )
    for name in phases:
        # the head of each phase is stored in a folder of this name
        refuse("the name of a phase", name, FolderName)


def _check_phase(where: str, phase: Phase) -> None:
    distill = phase.distill
    if phase.text != ("distilled" if distill else "corpus"):
        raise InputError(
            f"{where} needs text=corpus, or text=distilled with distill settings, got "
            f"text={phase.text!r}; change one"
        )
    if distill is None and not phase.sequence_length:
        raise InputError(
            f"{where} reads a corpus and needs sequence_length of at least 2, got 0; set it"
        )
    if distill and 0 < phase.sequence_length <= distill.prompt_tokens:
        raise InputError(
            f"{where} needs sequence_length above distill.prompt_tokens={distill.prompt_tokens}, "
            f"got {phase.sequence_length}; raise it, or set 0 for the length of the text"
        )
    plain = {"decay": 1.0, "weighting": "geometric", "depth_weights": []}
    changed = [setting for setting, value in plain.items() if getattr(phase, setting) != value]
    if len(changed) > 1:
        shown = " and ".join(f"{setting}={getattr(phase, setting)}" for setting in changed)
        raise InputError(f"{where} weights depths in one way, got {shown}; leave one out")
    if not any(phase.depth_weights or [1.0]):
        raise InputError(
            f"{where} needs depth_weights that are not all 0, got {phase.depth_weights}; raise one"
        )


def _check_source(where: str, source: Source) -> None:
    sources = source.sources if isinstance(source, Data) else {}
    if source.source != "mixture" and sources:
        raise InputError(
            f"{where}.sources needs {where}.source=mixture, got {where}.source={source.source}; "
            "change it, or leave sources out"
        )
    if source.source == "mixture":
        if not any(one.weight for one in sources.values()):
            raise InputError(
                f"a mixture needs one of {where}.sources with a weight above 0, got "
                f"{', '.join(sources) or 'none'}; add one"
            )
        plain = Source(source="mixture")
        names = [one.name for one in fields(Source)]
        if idle := [name for name in names if getattr(source, name) != getattr(plain, name)]:
            raise InputError(
                f"a mixture reads each source with its own settings, got {where}.{idle[0]}="
                f"{getattr(source, idle[0])!r:.80} for the whole; leave it out, or set it for a "
                "source"
            )
    elif source.source not in NO_PATH and not source.path:
        raise InputError(f"{where}.source={source.source} needs {where}.path, got none; set it")
    if source.streaming and not source.max_documents:
        raise InputError(f"{where}.streaming needs {where}.max_documents above 0, got 0; set it")


def _check_validation(where: str, settings: Validation) -> None:
    decodes = settings.patience or settings.keep == "best"
    if decodes and not settings.prompts:
        raise InputError(
            f"{where}.patience and keep=best need prompts to decode, got {where}.prompts=0; raise "
            "it, or leave them out"
        )
    if settings.patience and not settings.every:
        raise InputError(
            f"{where}.patience={settings.patience} needs measurements within a phase, got "
            f"{where}.every=0; raise it"
        )


def _check_simulate(settings: Simulate) -> None:
    for recorded, sampled in (("arrivals", "rates"), ("accepted", "acceptance")):
        if getattr(settings, recorded) and (other := getattr(settings, sampled)):
            raise InputError(
                f"{recorded}={getattr(settings, recorded)} replaces {sampled}, got "
                f"{sampled}={other} too; leave one out"
            )


def _check_one_head(run: str, head: str) -> None:
    if head:
        raise InputError(f"a run has its own head, got run={run} and head={head}; leave one out")


def _check_one_adapter(phases: Mapping[str, Phase]) -> None:
    joint = [phase.joint for phase in phases.values() if phase.joint]
    for setting in ("rank", "alpha", "dropout", "target_modules"):
        values = [getattr(one, setting) for one in joint]
        if any(value != values[0] for value in values):
            raise InputError(
                f"all joint phases train one adapter and need the same joint.{setting}, got "
                f"{values}; make them equal"
            )

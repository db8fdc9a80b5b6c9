"""Validation of settings: types and ranges by pydantic, rules between settings, files of runs.

A run's config.yaml is read as plain values, without interpolations, tags and aliases. Facts that
only the base, the head or a file can tell (contexts, vocabularies, depths) are checked by the code
that loads them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from specheads.config import data_dir
from specheads.config.commands import Train
from specheads.config.data import DataSettings, SourceSettings
from specheads.config.shared import (
    EvaluationSettings,
    FixesDivergence,
    Ordered,
    Resumable,
    TreeSettings,
    all_settings,
    settings_with,
)
from specheads.config.training import Phase, Schedule, ValidationSettings
from specheads.core.errors import InputError, one_line
from specheads.core.files import MAX_SETTINGS_BYTES, refuse_outside
from specheads.core.ranges import FolderName, check_fields, check_value

MAX_DEPTH = 20
"""Deepest nesting that is read; our own settings have six levels."""
REMOVED: dict[str, Any] = {"weighting": "geometric", "own_drafts": 0.0, "depth_weights": []}
"""Former settings of a phase, and the values that train as today."""


def check(settings: Any, name: str = "") -> None:
    """Refuse settings with a wrong type, out of range, unknown, or in contradiction.

    `name` is the full name of the settings, such as `schedule`; empty for those of a command.
    """
    for schedule in (settings, getattr(settings, "schedule", None)):
        if isinstance(schedule, Schedule):
            _check_phases(schedule.phases)
    check_fields(settings, name, _check_together)


def _check_together(settings: Any, name: str) -> None:
    """Refuse settings that contradict each other."""
    if getattr(settings, "run", "") and getattr(settings, "head_path", ""):
        raise InputError(
            f"a run has its own head, got run={settings.run}, head={settings.head_path}; drop one"
        )
    if isinstance(settings, Phase):
        _check_phase(name, settings)
    elif isinstance(settings, Schedule):
        _check_one_adapter(settings.phases)
    elif isinstance(settings, TreeSettings) and settings.kind == "static" and not settings.paths:
        raise InputError(f"a static tree needs {name}.paths, got none; set it, as in [[0],[1]]")
    elif isinstance(settings, SourceSettings):
        _check_source(name, settings)
    elif isinstance(settings, ValidationSettings):
        if settings.keep == "best" and not settings.prompts:
            raise InputError(
                f"{name}.keep=best needs {name}.prompts above 0, got 0; raise it, or set keep=last"
            )
    elif isinstance(settings, EvaluationSettings):
        _check_evaluation(settings)
    elif isinstance(settings, Train) and settings.features.source == "vllm":
        _check_served(settings)


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
        check_value("the name of a phase", name, FolderName)


def _check_phase(name: str, phase: Phase) -> None:
    distill = phase.distill
    if phase.text != ("distilled" if distill else "corpus"):
        raise InputError(
            f"{name}.text must be distilled with distill settings, else corpus, got {phase.text!r}"
        )
    if distill is None and not phase.sequence_length:
        raise InputError(
            f"{name} reads a corpus and needs sequence_length of at least 2, got 0; set it"
        )
    if distill and 0 < phase.sequence_length <= distill.prompt_tokens:
        raise InputError(
            f"{name} needs sequence_length above distill.prompt_tokens={distill.prompt_tokens}, "
            f"got {phase.sequence_length}; raise it, or set 0 for the length of the text"
        )


def _check_source(name: str, source: SourceSettings) -> None:
    sources = source.sources if isinstance(source, DataSettings) else {}
    if source.source != "mixture" and sources:
        raise InputError(
            f"{name}.sources needs {name}.source=mixture, got {name}.source={source.source}; "
            "change it, or leave sources out"
        )
    if source.source == "mixture":
        if not any(mixed.weight for mixed in sources.values()):
            raise InputError(
                f"a mixture needs one of {name}.sources with a weight above 0, got "
                f"{', '.join(sources) or 'none'}; add one"
            )
        default = SourceSettings(source="mixture")
        names = [setting.name for setting in fields(SourceSettings)]
        if idle := [name for name in names if getattr(source, name) != getattr(default, name)]:
            raise InputError(
                f"a mixture reads each source with its own settings, got {name}.{idle[0]}="
                f"{getattr(source, idle[0])!r:.80} for the whole; leave it out, or set it for a "
                "source"
            )
    elif source.kind.needs_path and not source.path:
        raise InputError(f"{name}.source={source.source} needs {name}.path, got none; set it")


def _check_evaluation(settings: EvaluationSettings) -> None:
    # the first token comes with the prompt, and a step is timed between the ends of two
    if settings.max_new_tokens < 3:
        raise InputError(
            "a measurement needs 3 new tokens at least, got evaluation.max_new_tokens="
            f"{settings.max_new_tokens}; raise it"
        )
    if settings.mode == "offline" and settings.contexts:
        raise InputError(
            "evaluation.contexts are decoded, which evaluation.mode=offline does not do; set "
            "mode=online or mode=all"
        )
    if settings.mode == "offline" and settings.temperature > 0 and settings.acceptance != "match":
        raise InputError(
            "evaluation.acceptance must be match for evaluation.mode=offline above temperature "
            f"zero, got {settings.acceptance}; set mode=online"
        )


def _check_served(settings: Train) -> None:
    """Refuse what needs the layers of a base that is at a server."""
    base, phases = settings.base, settings.schedule.phases
    needs = {
        f"base.adapter={base.adapter}": base.adapter,
        "base.compile=true": base.compile,
        "base.exact=true": base.exact,
        **{f"schedule.phases.{name}.joint": phase.joint for name, phase in phases.items()},
    }
    if conflicts := [name for name, value in needs.items() if value]:
        merge = "; merge it with peft, and give the merged base to the server and as base.model"
        raise InputError(
            f"features.source=vllm leaves the layers of the base at a server, got {conflicts[0]}"
            f"{merge if base.adapter else '; leave it out, or set features=local'}"
        )


def _check_one_adapter(phases: Mapping[str, Phase]) -> None:
    joint = [phase.joint for phase in phases.values() if phase.joint]
    for setting in ("rank", "alpha", "dropout", "target_modules"):
        values = [getattr(adapter, setting) for adapter in joint]
        if any(value != values[0] for value in values):
            raise InputError(
                f"all joint phases need the same joint.{setting}, got {values}; make them equal"
            )


# --- settings of a run, read back from its config.yaml --------------------------------------------


class _Loader(yaml.SafeLoader):
    """Loads scalars as OmegaConf writes them, without dates."""


_Loader.yaml_implicit_resolvers = {
    letter: [(tag, rule) for tag, rule in resolvers if not tag.endswith(":timestamp")]
    for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def read_settings(file: Path, *, resumes: bool = False) -> dict[str, Any]:
    """Return the settings of a run, whose file is not trusted: see `parse_settings`.

    Removed settings are left out; if the run `resumes`, only those that change nothing.
    """
    if not file.is_file():
        raise InputError(
            f"a run directory needs a {file.name}, got {file.parent} without it; name another"
        )
    refuse_outside(file)
    if (size := file.stat().st_size) > MAX_SETTINGS_BYTES:
        raise InputError(
            f"{file} must be at most {MAX_SETTINGS_BYTES} bytes of settings, got {size}; shorten it"
        )
    try:
        return _renamed(parse_settings(file.read_text(encoding="utf-8")), resumes)
    except (ValueError, yaml.YAMLError) as error:
        reason = one_line(error)
        raise InputError(
            f"{file} is not a run's settings: {reason}; restore the file that training wrote"
        ) from error


def parse_settings(text: str) -> dict[str, Any]:
    """Return settings from YAML of mappings, lists and scalars; raise a ValueError for the rest."""
    depth = 0
    # events are read one by one, without recursion, before any object is built
    for event in yaml.parse(text, Loader=_Loader):
        if getattr(event, "anchor", None) or getattr(event, "tag", None):
            line = event.start_mark.line + 1
            raise ValueError(f"tags, anchors and aliases are refused, and line {line} has one")
        if "${" in getattr(event, "value", ""):
            raise ValueError(f"interpolations are refused, got {event.value!r}")
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ValueError(f"settings must be at most {MAX_DEPTH} levels deep")
    value = yaml.load(text, Loader=_Loader)
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"settings must be a mapping of names, got a {type(value).__name__}")
    return value


def _renamed(settings: dict[str, Any], resumes: bool) -> dict[str, Any]:
    """Return the settings of an older run with the names of today."""
    settings.pop("minutes", None)
    cache_settings, features = settings.pop("feature_cache", {}), settings.get("features", {})
    if cache_settings.get("gib"):
        features |= {"source": "cache", "max_gib": cache_settings["gib"]}
        features["folder"] = cache_settings["folder"]
    for phase in settings.get("schedule", {}).get("phases", {}).values():
        for former, value in REMOVED.items():
            if not resumes or phase.get(former) == value:
                phase.pop(former, None)
    data = settings.get("data", {})
    for source in (data, *data.get("sources", {}).values()):
        if source.get("source") == "stdlib_instructions":
            questions = data_dir("recipes") / "smollm2" / "stdlib_questions.jsonl.gz"
            source |= {"source": "chat", "path": str(questions)}
    return settings


def differences(
    before: Any, after: Any, name: str = "", *, after_divergence: bool = False
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name and both values of each change that a resume does not allow."""
    facts = _settings_of_train(Resumable)
    if after_divergence:
        facts = facts | dict.fromkeys(_settings_of_train(FixesDivergence), Resumable())
    for pattern, fact in facts.items():
        is_among = all(value in fact.among for value in (before, after))
        if fnmatchcase(name, pattern) and (is_among or not fact.among):
            return
    if not (isinstance(before, dict) and isinstance(after, dict)):
        if before != after:
            yield name, before, after
    elif name in _settings_of_train(Ordered) and [*before] != [*after]:
        yield name, [*before], [*after]
    else:
        for key in {**after, **before}:
            inner = before.get(key), after.get(key), f"{name}.{key}".lstrip(".")
            if key not in before and _is_default(inner[2], after[key]):
                # the run is older than the setting
                continue
            yield from differences(*inner, after_divergence=after_divergence)


def _is_default(name: str, value: Any) -> bool:
    return any(fnmatchcase(name, pattern) and value == default for pattern, default in _defaults())


@cache
def _defaults() -> list[tuple[str, Any]]:
    """Return the full name and the default of each setting of training that has a plain one."""
    settings = all_settings(Train)
    return [(name, default) for name, _, default in settings if default is not MISSING]


@cache
def _settings_of_train(fact: type) -> dict[str, Any]:
    return dict(settings_with(fact, Train))

"""Read the config.yaml of a run as plain values, without interpolations, tags and aliases."""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from specheads.config import data_dir
from specheads.config.commands import Train
from specheads.config.shared import FixesDivergence, Ordered, Resumable, settings_with
from specheads.core.errors import InputError, one_line
from specheads.core.files import MAX_SETTINGS_BYTES, refuse_outside

MAX_DEPTH = 20
"""Deepest nesting that is read; our own settings have six levels."""
REMOVED: dict[str, Any] = {"weighting": "geometric", "own_drafts": 0.0, "depth_weights": []}
"""Former settings of a phase, and the values that train as today."""


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
    cache_settings, features = settings.pop("feature_cache", {}), settings.get("features", {})
    if cache_settings.get("gib"):
        features |= {"source": "cache", "max_gib": cache_settings["gib"]}
        features["folder"] = cache_settings["folder"]
    for phase in settings.get("schedule", {}).get("phases", {}).values():
        phase.setdefault("lk_eta", 3.0)
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
            yield from differences(*inner, after_divergence=after_divergence)


@cache
def _settings_of_train(fact: type) -> dict[str, Any]:
    return dict(settings_with(fact, Train))

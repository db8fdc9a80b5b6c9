"""Read the config.yaml of a run as plain values, without interpolations, tags and aliases."""

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from specheads.core.errors import InputError, one_line
from specheads.core.files import MAX_SETTINGS_BYTES, refuse_outside

MAX_DEPTH = 20
"""Deepest nesting that is read; our own settings have six levels."""

RESUMABLE = (
    "name", "run_dir", "tree", "tracker", "evaluation", "evaluate_after", "log_every",
    "checkpoint_every", "validation", "feature_cache", "minutes", "base.device",
    "features.url", "features.folder", "features.concurrency", "features.timeout_seconds",
    "features.patience_seconds", "features.max_gib",
    "base.compile", "base.exact", "dry_run", "schedule.phases.*.accumulation_steps",
    "schedule.phases.*.distill.folder",
    "schedule.phases.*.distill.engine", "schedule.phases.*.distill.batch_size",
    "schedule.phases.*.distill.use_head", "schedule.phases.*.distill.url",
    "schedule.phases.*.distill.served_as", "schedule.phases.*.distill.timeout_seconds",
)  # fmt: skip
"""Settings that do not change what training computes, and may change when a run resumes."""
ORDERED = ("schedule.phases", "data.sources")
"""Groups whose order counts."""


class _Loader(yaml.SafeLoader):
    """Loads scalars as OmegaConf writes them, without dates."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, rule) for tag, rule in known if not tag.endswith(":timestamp")]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def read_settings(file: Path) -> dict[str, Any]:
    """Return the settings of a run, whose file is not trusted, or refuse it: see `parse`."""
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
        return parse(file.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError) as error:
        reason = one_line(error)
        raise InputError(
            f"{file} is not a run's settings: {reason}; restore the file that training wrote"
        ) from error


def parse(text: str) -> dict[str, Any]:
    """Return settings from YAML of mappings, lists and scalars; raise a ValueError for the rest."""
    depth = 0
    # events are read one by one, without recursion, before any object is built
    for event in yaml.parse(text, Loader=_Loader):
        if getattr(event, "anchor", None) or getattr(event, "tag", None):
            place = event.start_mark.line + 1
            raise ValueError(f"tags, anchors and aliases are refused, and line {place} has one")
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


def first_difference(before: Any, now: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """Return the name and both values of the first change that a resume does not allow."""
    if any(fnmatchcase(name, pattern) for pattern in RESUMABLE):
        return None
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return None if before == now else (name, before, now)
    if name in ORDERED and [*before] != [*now]:
        return name, [*before], [*now]
    inner = ((key, before.get(key), now.get(key)) for key in {**now, **before})
    found = (first_difference(a, b, f"{name}.{key}".lstrip(".")) for key, a, b in inner)
    return next(filter(None, found), None)

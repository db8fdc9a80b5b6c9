"""The one place that knows Hydra: schemas, recipes, overrides, and its errors in one line."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from itertools import chain
from pathlib import Path
from threading import RLock
from types import UnionType
from typing import Annotated, Any, cast, get_args, get_origin

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.version import VersionBase
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from specheads.config import commands, data_dir, recipe_dirs
from specheads.config.shared import EvaluationSettings, Remeasured, settings_with
from specheads.config.training import DistillSettings
from specheads.config.validation import check
from specheads.core.errors import InputError
from specheads.core.files import local_path
from specheads.core.ranges import UnknownSettingError, setting_hints


def command_of(schema: type) -> str:
    """Return the command with these settings: `serve-features` for `ServeFeatures`."""
    return re.sub(r"\B(?=[A-Z])", "-", schema.__name__).lower()


SCHEMAS: dict[str, type] = {
    command_of(kind): kind
    for kind in vars(commands).values()
    if getattr(kind, "__module__", "") == commands.__name__
}
"""The settings of each command by its name: every class of `commands`."""
EVALUATION = {setting.name: f"evaluation.{setting.name}" for setting in fields(EvaluationSettings)}
HEAD = {"head": "head_path", "base": "base.model"}
# Hydra adds names to a mapping only after a plus
MIXTURE = {"data.sources": "+data.sources"}
# out= names the folder of the text, and head= the head that drafts
DISTILL = {
    setting.name: f"schedule.phases.distilled.distill.{setting.name}"
    for setting in fields(DistillSettings)
    if setting.name not in ("folder", "use_head")
}
SHORT: dict[str, dict[str, str]] = {
    "train": MIXTURE | {"base": "base.model"},
    "distill": HEAD | DISTILL | MIXTURE,
    "evaluate": HEAD | EVALUATION | MIXTURE,
    "compare": EVALUATION | MIXTURE | {"base": "base.model"},
    "tune": HEAD | MIXTURE,
    "export": HEAD,
    "chat": HEAD,
    "serve-features": MIXTURE | {"base": "base.model", "run": "start", "folder": "features.folder"},
}
"""Short names of nested settings, by command."""
HOME = re.compile(r"(?<=[=,\[])~(?=/)")
"""A `~` for the home folder that the shell did not expand."""
OPTIONAL = re.compile(r"\+{0,2}(schedule\.phases\.[^.=]+)\.(distill|joint)(?:\.|=\{)")
"""A setting of a group that a phase may lack; Hydra cannot set it before the group exists."""
PLAIN = re.compile(
    r"'.*'|\".*\"|.*\$\{.*|(?!(?:true|false|null|inf|nan)$)[a-z/][\w/.-]*",
    re.ASCII | re.IGNORECASE | re.DOTALL,
)
"""A text that Hydra reads as it is: quoted, with a reference, or a plain word or path."""
ENDS = (" full_key:", " object_type=", " Config search path:", " See https:", " 1. To use it as")
"""What follows the rule in a message of Hydra or OmegaConf."""
CHOICES = re.compile(
    r"(?:You must specify '(\w+)'.*|Could not find '(\w+)/(.*)') Available options.*?: ?(.*)"
)
"""Hydra's messages about a choice: its group, and the choices."""
GROUP = re.compile(
    r"([\w.]+)=(.*?): (?:Invalid type assigned: |Cannot assign \w+ to Dict|Cannot merge Dict)",
    re.DOTALL,
)
"""OmegaConf's messages about one value for a group, after the override."""
COMPOSING = RLock()
"""Hydra has one global state."""
MAX_SIMILAR = 4
"""Names of settings that the message for an unknown one suggests."""
REMEASURED = [name for name, _ in settings_with(Remeasured, commands.Train)]
"""Settings that a measurement may change for a run."""


def register(command: str) -> None:
    """Register a command's schema, the `recipes:` resolver, and recipes by their folders' names."""
    store, schema = ConfigStore.instance(), f"{command}_schema"
    if f"{schema}.yaml" not in store.repo:
        store.store(name=schema, node=SCHEMAS[command])
    OmegaConf.register_new_resolver(
        "recipes", lambda inner: str(data_dir("recipes") / inner), replace=True
    )
    for name, path in recipes().items():
        node = _load_recipe(path, path.stat().st_mtime_ns)
        store.store(group="recipe", name=name, node=node, package="_global_", provider=str(path))


@cache
def _load_recipe(path: Path, changed: int) -> Any:
    """Return a recipe's settings; `changed` is the time of its last change."""
    del changed
    try:
        return OmegaConf.load(path)
    except (OSError, UnicodeDecodeError, YAMLError) as error:
        raise InputError(
            f"a recipe must be a YAML file, and {path} is not; fix it, or move its folder away"
        ) from error


def recipes() -> dict[str, Path]:
    """Return every recipe by name; a user's own recipe replaces ours of the same name."""
    return {
        path.parent.name: path
        for folder in recipe_dirs()
        for path in sorted(folder.glob("*/recipe.yaml"))
    }


def settings_of(command: str, overrides: Sequence[str]) -> Any:
    """Return the checked settings of a command; refuse overrides that cannot be used.

    Hydra composes only: if it ran the command, it would print lines and create folders.
    """
    with _our_hydra():
        register(command)
        try:
            return _settings_of(command, overrides)
        except UnknownSettingError as error:
            similar = _similar(command, overrides, error.name)
            raise UnknownSettingError(error.name, similar) from error


@contextmanager
def _our_hydra() -> Iterator[None]:
    """Initialise Hydra for our settings, next to an application's own; other threads wait."""
    with COMPOSING:
        application, base_version = GlobalHydra.instance(), VersionBase.instance()
        application_hydra, application.hydra = application.hydra, None
        application_version = vars(base_version).copy()
        try:
            with hydra.initialize_config_dir(str(data_dir("configs")), version_base="1.3"):
                yield
        finally:
            application.hydra = application_hydra
            GlobalHydra.set_instance(application)
            vars(base_version).update(application_version)


def _settings_of(command: str, overrides: Sequence[str]) -> Any:
    try:
        composed = hydra.compose(command, expand_overrides(command, overrides))
        if missing := sorted(map(str, OmegaConf.missing_keys(composed))):
            raise InputError(f"a setting without a default must be given; add {missing[0]}=")
        settings = OmegaConf.to_object(composed)
    except InputError:
        raise
    # Hydra raises errors of any type for a strange override
    except Exception as error:
        text = str(error)
        # Hydra advises a plus before an unknown name, which would be refused too
        if match := re.match(r"Could not (?:override|delete from config\.) '(.*?)'", text):
            raise UnknownSettingError(match[1]) from error
        if text.startswith("Error merging override") and error.__cause__:
            # Hydra names the override, and only the wrapped error gives the reason
            text = f"{text.removeprefix('Error merging override ')}: {error.__cause__}"
        if match := GROUP.match(text):
            text = (
                f"{match[1]} is a group of settings, got {match[2]!r:.200}; set one by its name, "
                f"as {match[1]}.NAME=VALUE"
            )
        if override := getattr(error, "override", None):
            rule = "an override must be NAME=VALUE"
            if "=" in override:
                rule += (
                    ", and text in a list or a group with one of = # ( ) [ ] { } in quotes, "
                    "as path:'a=b.jsonl'"
                )
            text = f"{rule}, got {override!r:.200}"
        raise InputError(f"{_rule(text)}; --help lists the settings") from error
    check(settings)
    return settings


def _similar(command: str, overrides: Sequence[str], name: str) -> list[str]:
    """Return the names of settings that are like `name`, from its own group or else from any.

    Phases and the settings of a head depend on the recipe and on other choices.
    """
    groups = {"recipe", *(path.name for path in data_dir("configs").iterdir() if path.is_dir())}
    choices = [override for override in overrides if override.partition("=")[0] in groups]
    try:
        composed = OmegaConf.to_container(
            hydra.compose(command, expand_overrides(command, choices))
        )
    # a choice that Hydra refuses
    except Exception:
        return []
    short_names = {full: short for short, full in SHORT.get(command, {}).items()}
    names: dict[str, list[str]] = {}
    for full in _names(composed):
        names.setdefault(full.rpartition(".")[2], []).append(short_names.get(full, full))
    group, _, last = name.lstrip("-").replace("-", "_").rpartition(".")
    similar = [names[similar_last] for similar_last in get_close_matches(last, names, cutoff=0.75)]
    if not similar:
        return []
    in_group = [full for full in chain(*similar) if full.rpartition(".")[0] == group]
    return in_group[:1] or get_close_matches(name, similar[0], n=MAX_SIMILAR, cutoff=0)


def _names(values: Any, prefix: str = "") -> Iterator[str]:
    """Yield the full names of all groups and settings."""
    for name, value in values.items() if isinstance(values, Mapping) else ():
        yield f"{prefix}{name}"
        yield from _names(value, f"{prefix}{name}.")


def expand_overrides(command: str, overrides: Sequence[str]) -> list[str]:
    """Return the overrides of a command as Hydra reads them, with full names.

    Hydra takes every `head=...` for a choice in configs/head, so a path needs another name. The
    home folder is written out, text is put into quotes, and an optional group of a phase is created
    before it is set.
    """
    expanded, full_names = [], SHORT.get(command, {})
    for override in overrides:
        key, equals, value = override.partition("=")
        # Hydra would ignore its own settings
        if key.lstrip("+~").startswith(("-", "hydra")):
            raise UnknownSettingError(key)
        is_path = "/" in value
        if is_path or not data_dir("configs").joinpath(key, f"{value}.yaml").is_file():
            key = full_names.get(key, key)
        if group := OPTIONAL.match(f"{key}={value}"):
            expanded.append(f"{group[1]}={{{group[2]}:{{}}}}")
        value = HOME.sub(lambda _: str(local_path("~")), equals + value).removeprefix("=")
        if equals and (kind := _text_kind(command, key.lstrip("+"))):
            if kind == "list":
                value = value if re.match(r"\[|\$|null$", value) else f"[{value}]"
            else:
                value = _quoted(value) if kind == "text" else _quoted_list(value)
        expanded.append(f"{key}{equals}{value}")
    return expanded


def _quoted(value: str) -> str:
    """Put a text into quotes, unless Hydra reads it as it is."""
    if PLAIN.fullmatch(value):
        return value
    # a backslash is an escape only before a quote
    escaped = re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + match[2], value)
    return "'" + escaped.replace("'", "\\'") + "'"


def _quoted_list(value: str) -> str:
    """Put the texts of a list into quotes; one text without brackets is a list too."""
    if value == "null" or re.search(r"['\"]|\$\{", value):
        return value
    inner = value[1:-1] if re.fullmatch(r"\[.*\]", value, re.DOTALL) else value
    return f"[{','.join(_quoted(text.strip()) for text in inner.split(',') if text.strip())}]"


def _text_kind(command: str, name: str) -> str:
    """Return "text", "texts" (a list of them) or "list" for such a setting, and nothing for others.

    Texts stay as they are: `name=1e5` is no number.
    """
    hint: Any = SCHEMAS[command]
    for key in name.split("."):
        if is_dataclass(hint):
            hint = setting_hints(cast(type, hint)).get(key)
        else:
            hint = get_args(hint)[1] if get_origin(hint) is dict else None
        hint = _bare(hint)
    # no schema has the choice of a recipe
    if hint is str or name == "recipe":
        return "text"
    if get_origin(hint) is not list:
        return ""
    return "texts" if _bare(get_args(hint)[0]) is str else "list"


def _bare(hint: Any) -> Any:
    """Return a type without its range, and without None."""
    while get_origin(hint) in (Annotated, UnionType):
        hint = get_args(hint)[0]
    return hint


def copy_run_settings(settings: Any, trained: commands.Train, overrides: Sequence[str]) -> None:
    """Copy the settings of a run into those of a command, except what the overrides name.

    The base and the data of a run stay, but not how the base computes.
    """
    for override in overrides:
        name = override.partition("=")[0].lstrip("+~")
        group, _, inner = name.partition(".")
        if name == "seed":
            trained.seed = settings.seed
        elif (group == "evaluation" and inner) or name in REMEASURED:
            setattr(getattr(trained, group), inner, getattr(getattr(settings, group), inner))
        elif group in ("base", "data", "evaluation"):
            raise InputError(
                f"a run is measured on its own base and data, got {override}; leave it out, or "
                "name head=RUN/head and base=PATH"
            )
    for group in ("seed", "base", "data", "evaluation"):
        if hasattr(settings, group):
            setattr(settings, group, getattr(trained, group))


def _rule(text: str) -> str:
    """Return the rule in a message of Hydra or OmegaConf, in one line."""
    text = " ".join(text.split())
    for end in ENDS:
        text = text.partition(end)[0]
    if match := CHOICES.search(text):
        group, value = match[1] or match[2], f"{match[3]!r:.200}" if match[2] else "none"
        return f"{group} must be one of {', '.join(match[4].split())}, got {value}"
    return text[:1000]


def as_yaml(settings: Any) -> str:
    """Return resolved settings as YAML."""
    return OmegaConf.to_yaml(OmegaConf.structured(settings), resolve=True)


def typed_settings(schema: type, values: Mapping[str, Any], path: Path) -> Any:
    """Return the typed settings of plain values, which were read from a run's config.yaml."""
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), values))
    except OmegaConfBaseException as error:
        raise InputError(
            f"{path} must be the config.yaml of a run, got {_rule(str(error))}; restore it"
        ) from error

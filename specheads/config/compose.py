"""The one place that knows Hydra: schemas, recipes, overrides, and its errors in one line."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, cast, get_args, get_origin

import hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from specheads.config import commands
from specheads.config.places import data_dir, recipe_dirs
from specheads.config.validation import check
from specheads.core.errors import InputError
from specheads.core.ranges import hints, new_name, unknown
from specheads.training.settings import Distill

MISTAKES = (InputError, HydraException, OmegaConfBaseException)
"""Errors that the user's settings cause."""

SCHEMAS: dict[str, type] = {
    kind.__name__.lower(): kind
    for kind in (
        commands.Train,
        commands.Distill,
        commands.Evaluate,
        commands.Compare,
        commands.Chat,
        commands.Tune,
        commands.Export,
        commands.Push,
        commands.Simulate,
    )
}

EVALUATION = {
    name: f"evaluation.{name}"
    for name in ("prompts", "num_prompts", "all_turns", "max_new_tokens", "temperature", "coupled")
}
HEAD = {"head": "head_path", "base": "base.model"}
# Hydra adds names to a mapping only after a plus
MIXTURE = {"data.sources": "+data.sources"}
# out= names the folder of the text, and head= the head that drafts
DISTILL = {
    item.name: f"schedule.phases.distilled.distill.{item.name}"
    for item in fields(Distill)
    if item.name not in ("folder", "use_head")
}
SHORT: dict[str, dict[str, str]] = {
    "train": MIXTURE,
    "distill": HEAD | DISTILL | MIXTURE,
    "evaluate": HEAD | EVALUATION | MIXTURE | {"mode": "evaluation.mode"},
    "compare": EVALUATION | MIXTURE | {"base": "base.model"},
    "tune": HEAD | MIXTURE,
    "export": HEAD,
    "chat": HEAD,
    "simulate": {"head": "head_path"},
}
"""Short names of nested settings, by command."""

HOME = re.compile(r"(?<=[=,\[])~(?=/)")
"""A `~` for the home folder that the shell did not expand."""

OPTIONAL = re.compile(r"\+{0,2}(schedule\.phases\.[^.=]+)\.(distill|joint)(?:\.|=\{)")
"""A setting of a group that a phase may lack; Hydra cannot set it before the group exists."""

FLAG = re.compile(r"-|\+*hydra[./]")
"""A flag or a setting of Hydra's own command line, which is not used."""

ABSENT = re.compile(r"Could not find '(\w+)/(.*)' Available options in '\1': (.*) Config search")
"""Hydra's message for an unknown choice, in one line."""

SEVERAL = re.compile(r"Ambiguous value for argument '([^']*)'")
"""Hydra's message for `seed=1,2`; it advises a sweep, which we refuse."""


def register() -> None:
    """Register schemas, recipes and the `recipes:` resolver with Hydra.

    Hydra names a group after its folder. Each `recipes/*/recipe.yaml` is registered in the group
    `recipe` under the name of its folder.
    """
    found = recipes()
    _register(tuple((name, path, path.stat().st_mtime_ns) for name, path in found.items()))


@lru_cache(maxsize=1)
def _register(found: tuple[tuple[str, Path, int], ...]) -> None:
    """Register recipes, again only if a file changed."""
    store = ConfigStore.instance()
    for name, schema in SCHEMAS.items():
        store.store(name=f"{name}_schema", node=schema)
    for name, path, _ in found:
        store.store(
            group="recipe",
            name=name,
            node=_load_recipe(path),
            package="_global_",
            provider=str(path),
        )
    OmegaConf.register_new_resolver(
        "recipes", lambda inner: str(data_dir("recipes") / inner), replace=True
    )


def _load_recipe(path: Path) -> Any:
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


def list_recipes() -> str:
    """Return one line for each recipe: its name and the first comment of its file."""
    found = recipes()
    width = max(map(len, found))
    first = {
        name: path.read_text(encoding="utf-8").partition("\n")[0] for name, path in found.items()
    }
    return "\n".join(f"  {name:{width}}  {line.lstrip('# ')}" for name, line in first.items())


def from_command_line(name: str, overrides: Sequence[str]) -> Any:
    """Return the checked settings of a command.

    Hydra composes only. If it also ran the command, it would print lines before our errors and
    create folders.
    """
    if flag := next(filter(FLAG.match, overrides), ""):
        raise InputError(
            f"a call takes settings and --help, got {flag:.80}; leave it out, and call the command "
            "once for each of several values"
        )
    folder = str(data_dir("configs"))
    with _reading(overrides), hydra.initialize_config_dir(folder, version_base="1.3"):
        composed = hydra.compose(name, [_quoted(name, word) for word in overrides])
    if missing := sorted(map(str, OmegaConf.missing_keys(composed))):
        raise InputError(f"a setting without a default must be given; add {missing[0]}=")
    settings = OmegaConf.to_object(composed)
    check(settings)
    return settings


def _quoted(command: str, override: str) -> str:
    """Quote the value of a text setting: Hydra would read a=b.txt as a mistake and 1_000 as 1000.

    A value in quotes stays as it is, and so does one with a reference to another setting.
    """
    name, equals, value = override.partition("=")
    is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    if not equals or is_quoted or "${" in value or not _is_text(command, name.lstrip("+")):
        return override
    # a backslash is an escape only before a quote
    escaped = re.sub(
        r"(\\*)('|$)", lambda found: found[1] * 2 + found[2].replace("'", "\\'"), value
    )
    return f"{name}='{escaped}'"


def _is_text(command: str, name: str) -> bool:
    """Return whether a setting of a command is a text."""
    hint: Any = SCHEMAS[command]
    for part in name.split("."):
        if is_dataclass(hint):
            hint = hints(cast(type, hint)).get(part)
        else:
            hint = get_args(hint)[1] if get_origin(hint) is dict else None
        if get_origin(hint) is Annotated:
            hint = get_args(hint)[0]
        if isinstance(hint, UnionType):
            hint = get_args(hint)[0]
    return hint is str


@contextmanager
def _reading(overrides: Sequence[str]) -> Iterator[None]:
    """Turn any error of Hydra into a mistake in the overrides: it reads nothing else."""
    register()
    try:
        yield
    except (HydraException, OmegaConfBaseException):
        raise
    except Exception as error:
        raise InputError(
            f"overrides must read group=choice or setting=value, got {' '.join(overrides)[:200]!r} "
            f"({type(error).__name__}: {error}); --help lists them"
        ) from error


def settings_of(name: str, overrides: Sequence[str]) -> Any:
    """Return the checked settings of a command, for a caller in Python."""
    try:
        return from_command_line(name, lengthen(name, overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise InputError(message(error).removeprefix("error: ").rstrip()) from error


def lengthen(command: str, overrides: Sequence[str]) -> list[str]:
    """Return the overrides of a command with full names, except for choices: base=tiny_code.

    Hydra takes every `head=...` for a choice in configs/head, so a path needs another name. The
    home folder is written out, and an optional group of a phase is created before it is set.
    """
    out, short = [], SHORT.get(command, {})
    for override in overrides:
        key, equals, value = override.partition("=")
        is_choice = data_dir("configs").joinpath(key, f"{value}.yaml").is_file()
        full = override if is_choice else f"{short.get(key, key)}{equals}{value}"
        if group := OPTIONAL.match(full):
            out.append(f"{group[1]}={{{group[2]}:{{}}}}")
        out.append(HOME.sub(lambda _: str(Path.home()), full))
    return out


def overlay(trained: commands.Train, settings: Any, overrides: Sequence[str]) -> None:
    """Copy what overrides (full names) change from a command's settings into those of a run.

    The base of a run stays, but not how it computes.
    """
    for override in overrides:
        group, _, name = override.partition("=")[0].lstrip("+~").partition(".")
        if group == "seed":
            trained.seed = settings.seed
        if group not in ("evaluation", "base"):
            continue
        if not name and group == "evaluation":
            raise InputError(f"change single settings of evaluation, got {override}; name them")
        if group == "base" and name not in ("compile", "exact", "device", "dtype"):
            raise InputError(
                f"a run is measured on its own base, got {override}; leave it out, or name "
                f"head={settings.run}/head and base=PATH"
            )
        setattr(getattr(trained, group), name, getattr(getattr(settings, group), name))


def message(error: Exception) -> str:
    """Return a mistake in one line; for a missing recipe a list of them follows."""
    text = str(error)
    if text.startswith("Error merging override") and error.__cause__:
        # Hydra names the override, and only the wrapped error gives the reason
        text = f"{text.removeprefix('Error merging override ')}: {error.__cause__}"
    text = " ".join(text.split())
    if "specify 'recipe'" in text or "Could not find 'recipe/" in text:
        wanted = text.partition("Could not find 'recipe/")[2].partition("'")[0]
        rule = f"there is no recipe {wanted!r}" if wanted else "name a recipe, as in recipe=smoke"
        return f"{rule}; the recipes are\n{list_recipes()}\n"
    return f"error: {_shorten(text)}\n"


def _shorten(text: str) -> str:
    """Return a message of Hydra or OmegaConf with its rule only, and with our remedy.

    Hydra's own remedy for an unknown setting, a plus before its name, would be refused too.
    """
    if absent := ABSENT.search(text):
        group, value, known = absent.groups()
        return f"{group} must be one of {', '.join(known.split())}, got '{group}/{value:.80}'"
    if several := SEVERAL.search(text):
        return (
            f"a setting has one value, got {several[1]:.80}; call the command once for each, or "
            "write a list in brackets and a text with a comma in quotes: name='\"first,second\"'"
        )
    for tail in (" full_key:", " object_type=", " Config search path:"):
        text = text.partition(tail)[0]
    found = re.match(r"Could not override '(.*?)'\.", text)
    return (unknown(found[1]) if found else text) + new_name(text)


def as_yaml(settings: Any) -> str:
    """Return resolved settings as YAML."""
    return OmegaConf.to_yaml(OmegaConf.structured(settings), resolve=True)


def from_values(schema: type, values: Mapping[str, Any], path: Path) -> Any:
    """Return the typed settings of plain values, which were read from a run's config.yaml."""
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), values))
    except OmegaConfBaseException as error:
        raise InputError(
            f"{path} must be the config.yaml of a run, got {_shorten(str(error))}; restore it"
        ) from error

"""Where Hydra meets the rest: schemas, recipes, and mistakes told in one line."""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from specheads import config
from specheads.config import commands
from specheads.core.errors import InputError

KINDS = (
    config.Train,
    commands.Distill,
    config.Evaluate,
    config.Compare,
    config.Chat,
    config.Tune,
    config.Export,
    config.Push,
    config.Simulate,
)
SCHEMAS: dict[str, type] = {kind.__name__.lower(): kind for kind in KINDS}

EVALUATION = {
    name: f"evaluation.{name}"
    for name in ("prompts", "num_prompts", "all_turns", "max_new_tokens", "temperature", "coupled")
}
HEAD = {"head": "head_path", "base": "base.model"}
# Hydra adds names to a mapping only behind a plus
MIXTURE = {"data.sources": "+data.sources"}
# the command says by out= where text lies, and by head= who drafts
DISTILL = {
    item.name: f"schedule.phases.distilled.distill.{item.name}"
    for item in fields(config.Distill)
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
"""Names that docs and scripts use for settings further down, by command."""

HOME = re.compile(r"(?<=[=,\[])~(?=/)")
"""Where the user's own folder stands for its name: no shell expands it there, and Hydra cannot."""

OPTIONAL = re.compile(r"\+{0,2}(schedule\.phases\.[^.=]+)\.(distill|joint)(?:\.|=\{)")
"""A setting of a group that a phase may lack; Hydra sets none in what is not there."""

MULTIRUN = {"-m", "--multirun", "hydra.mode=MULTIRUN"}

ABSENT = re.compile(r"Could not find '(\w+)/(.*)' Available options in '\1': (.*) Config search")
"""What Hydra says of a choice that there is not, in one line."""

SEVERAL = re.compile(r"Ambiguous value for argument '([^']*)'")
"""What Hydra says of `seed=1,2`, before it advises to sweep, which is refused."""


def register() -> None:
    """Make schemas, recipes and the `data:` resolver known to Hydra.

    Hydra names a group after its folder; registering each `recipes/*/recipe.yaml` in the group
    `recipe` lets a recipe be a folder of its own and still answer to `recipe=`.
    """
    found = recipes()
    _register(tuple((name, path, path.stat().st_mtime_ns) for name, path in found.items()))


@lru_cache(maxsize=1)
def _register(found: tuple[tuple[str, Path, int], ...]) -> None:
    """Register recipes as they were when last written."""
    store = ConfigStore.instance()
    for name, schema in SCHEMAS.items():
        store.store(name=f"{name}_schema", node=schema)
    for name, path, _ in found:
        store.store(
            group="recipe",
            name=name,
            node=_loaded(path),
            package="_global_",
            provider=str(path),
        )
    OmegaConf.register_new_resolver(
        "recipes", lambda inner: str(config.data_dir("recipes") / inner), replace=True
    )


def _loaded(path: Path) -> Any:
    try:
        return OmegaConf.load(path)
    except (OSError, UnicodeDecodeError, YAMLError) as error:
        raise InputError(
            f"a recipe must be a file of YAML, and {path} is none; mend it, or take its folder away"
        ) from error


def recipes() -> dict[str, Path]:
    """Return every recipe by name; a user's own replaces ours of the same name."""
    return {
        path.parent.name: path
        for folder in config.recipe_dirs()
        for path in sorted(folder.glob("*/recipe.yaml"))
    }


def list_recipes() -> str:
    """Return one line a recipe: its name and the first comment of its file."""
    found = recipes()
    width = max(map(len, found))
    first = {
        name: path.read_text(encoding="utf-8").partition("\n")[0] for name, path in found.items()
    }
    return "\n".join(f"  {name:{width}}  {line.lstrip('# ')}" for name, line in first.items())


def from_command_line(name: str, overrides: Sequence[str]) -> list[Any]:
    """Return the typed settings of a command, checked; none where Hydra only shows them.

    Hydra composes and we run: it would put lines of its own before our errors, and leave folders.
    """
    if asked := MULTIRUN.intersection(word.lstrip("+") for word in overrides):
        raise InputError(
            f"a call is one run, got {asked.pop()}; call the command once for each, as in the "
            "shell's for seed in 1 2; do ... seed=$seed; done"
        )
    if any(word.startswith("-") for word in overrides):
        # its own flags, as --cfg job; then it composes twice
        return [_checked(one) for one in _by_flags(name, overrides)]
    return [_composed(name, overrides)]


def _by_flags(name: str, overrides: Sequence[str]) -> list[Any]:
    # so that mistakes come up to us instead of being printed by Hydra
    os.environ["HYDRA_FULL_ERROR"] = "1"
    composed: list[Any] = []
    folder = str(config.data_dir("configs"))
    decorate = hydra.main(version_base="1.3", config_path=folder, config_name=name)
    given, sys.argv[1:] = sys.argv[1:], overrides
    try:
        with _reading(overrides):
            decorate(composed.append)()
    finally:
        sys.argv[1:] = given
    return composed


def _composed(name: str, overrides: Sequence[str]) -> Any:
    folder = str(config.data_dir("configs"))
    with _reading(overrides), hydra.initialize_config_dir(folder, version_base="1.3"):
        found = hydra.compose(name, list(overrides))
    return _checked(found)


@contextmanager
def _reading(overrides: Sequence[str]) -> Iterator[None]:
    """Tell whatever Hydra raises as a mistake in the overrides: it reads nothing else."""
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


def _checked(composed: Any) -> Any:
    """Return composed settings as dataclasses; one that is missing, unknown or wrong is refused."""
    if missing := sorted(map(str, OmegaConf.missing_keys(composed))):
        raise InputError(f"a setting without a default must be given; add {missing[0]}=")
    try:
        settings = OmegaConf.to_object(composed)
    except AttributeError as error:
        # +name=value adds a setting that no dataclass has a place for
        name = str(error).rstrip("'").rpartition("'")[2]
        raise InputError(_unknown(name)) from error
    config.check(settings)
    return settings


def _unknown(name: str) -> str:
    rule = f"a setting must be one that --help lists, and there is no {name!r}"
    return f"{rule}; leave it out, or mend its name"


def settings_of(name: str, overrides: Sequence[str]) -> Any:
    """Return the typed settings of a command, for a caller in Python."""
    try:
        return _composed(name, lengthen(name, overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise InputError(message(error).removeprefix("error: ").rstrip()) from error


def lengthen(command: str, overrides: Sequence[str]) -> list[str]:
    """Return a command's overrides with short names replaced, but for choices: base=tiny_code.

    Hydra takes every `head=...` for a choice among configs/head, so a path needs another name. A
    path's `~` is expanded, and a group that a phase may lack is made before it is set.
    """
    out, short = [], SHORT.get(command, {})
    for override in overrides:
        key, equals, value = override.partition("=")
        is_choice = config.data_dir("configs").joinpath(key, f"{value}.yaml").is_file()
        full = override if is_choice else f"{short.get(key, key)}{equals}{value}"
        if group := OPTIONAL.match(full):
            out.append(f"{group[1]}={{{group[2]}:{{}}}}")
        out.append(HOME.sub(lambda _: str(Path.home()), full))
    return out


def overlay(trained: config.Train, settings: Any, overrides: Sequence[str]) -> None:
    """Put what overrides, in full names, ask for into a run's settings; its base is its own."""
    for override in overrides:
        group, _, name = override.partition("=")[0].lstrip("+~").partition(".")
        if group == "seed":
            trained.seed = settings.seed
        if group not in ("evaluation", "base"):
            continue
        if not name and group == "evaluation":
            raise InputError(f"of a run's evaluation one setting is asked for, got {override}")
        # how the base computes may change, and which one it is may not
        if group == "base" and name not in ("compile", "exact", "device", "dtype", "attention"):
            raise InputError(
                f"a run is measured on its own base, got {override}; leave it out, or name "
                f"head={settings.run}/head and base=PATH"
            )
        setattr(getattr(trained, group), name, getattr(getattr(settings, group), name))


def message(error: Exception) -> str:
    """Return a mistake in one line; behind a missing recipe, a list of them."""
    text = str(error)
    if text.startswith("Error merging override") and error.__cause__:
        # Hydra says which override, and only what it wraps says why
        text = f"{text.removeprefix('Error merging override ')}: {error.__cause__}"
    text = " ".join(text.split())
    if "specify 'recipe'" in text or "Could not find 'recipe/" in text:
        wanted = text.partition("Could not find 'recipe/")[2].partition("'")[0]
        rule = f"there is no recipe {wanted!r}" if wanted else "name a recipe, as in recipe=smoke"
        return f"{rule}; the recipes are\n{list_recipes()}\n"
    return f"error: {_shorten(text)}\n"


def _shorten(text: str) -> str:
    """Cut what OmegaConf adds after its first sentence: full keys and object types.

    Hydra says of an unknown setting to put a plus before it, which would be refused as well. What
    there is in place of an unknown choice it lists below.
    """
    if absent := ABSENT.search(text):
        group, value, known = absent.groups()
        there = ", ".join(known.split())
        return f"{group} must be one of {there}, and there is no '{group}/{value:.80}'"
    if several := SEVERAL.search(text):
        return (
            f"a setting has one value, got {several[1]:.80}; call the command once for each, or "
            "write a list in brackets and a text with a comma in quotes: name='\"first,second\"'"
        )
    for tail in (" full_key:", " object_type=", " Config search path:"):
        text = text.partition(tail)[0]
    unknown = re.match(r"Could not override '(.*?)'\.", text)
    return (_unknown(unknown[1]) if unknown else text) + config.new_name(text)


def as_yaml(settings: Any) -> str:
    """Return resolved settings as YAML."""
    return OmegaConf.to_yaml(OmegaConf.structured(settings), resolve=True)


def read_run(path: Path, schema: type) -> Any:
    """Return the typed settings that a run directory's config.yaml holds."""
    # what knows torch comes when it is needed
    from specheads.runs.settings import read_settings

    try:
        merged = OmegaConf.merge(OmegaConf.structured(schema), read_settings(path))
        return OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise InputError(f"{path} is not a run's config.yaml: {_shorten(str(error))}") from error

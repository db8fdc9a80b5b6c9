"""Text of `specheads COMMAND --help`: choices and settings, without a recipe and without torch."""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from textwrap import fill
from typing import Any, get_args

from specheads import config
from specheads.commands import described
from specheads.config import compose
from specheads.core import ranges

ROOT = Path(__file__).parents[2]
"""Parent folder of the package."""

KINDS = ROOT / "specheads" / "heads" / "kinds"

BRIEF = {
    ranges.words(ranges.PrintableText): "text",
    ranges.words(ranges.PathOrId): "a path or an id",
}
"""Short forms of rules that a user rarely breaks."""

Line = tuple[str, str, str, str]
"""Full name, type and range, default, and description of a setting."""


def settings(command: str) -> str:
    """Return the help of a command: usage, examples, choices and every setting."""
    kind = compose.SCHEMAS[command]
    groups = sorted(item.name for item in fields(kind) if _choices(item.name))
    if issubclass(kind, config.Train):
        groups.insert(0, "recipe")
    choices = [f"{group}={'|'.join(_choices(group))}" for group in groups]
    short = [f"{name} is {full}" for name, full in compose.SHORT.get(command, {}).items()]
    about = (inspect.getdoc(kind) or "").removeprefix(f"`specheads {command}`.").strip()
    purpose, _, *examples = described(command)
    parts = [
        f"usage: specheads {command} [group=choice] [key=value] ...",
        purpose,
        *filter(None, [about]),
        "\nexamples",
        *(f"  {line}" for line in examples),
        *(["\nchoices", *(f"  {line}" for line in choices)] if choices else []),
        *(["\nshort names", *(f"  {line}" for line in short)] if short else []),
        "\nsettings",
        *(_shown(*line) for line in _settings(kind, command)),
    ]
    return "\n".join(parts) + "\n"


def _choices(group: str) -> list[str]:
    if group == "recipe":
        return sorted(compose.recipes())
    return sorted(path.stem for path in config.data_dir("configs").joinpath(group).glob("*.yaml"))


def _shown(name: str, rule: str, default: str, about: str) -> str:
    first = f"  {name}: {rule}{f' [{default}]' if default else ''}"
    return f"{first}\n{fill(about, 96, initial_indent='      ', subsequent_indent='      ')}"


def _settings(kind: Any, command: str, where: str = "") -> Iterator[Line]:
    """Yield the settings of a dataclass: plain ones first, then groups."""
    hints = ranges.hints(kind)
    about: dict[str, str] = {}
    for one in reversed(kind.__mro__[:-1]):
        about |= _descriptions(ast.parse(inspect.getsource(one)).body[0])
    has_head = command in ("train", "distill") and not where

    def is_group(item: Any) -> bool:
        return _group(hints[item.name]) is not None or (has_head and item.name == "head")

    for item in sorted(fields(kind), key=is_group):
        name, hint = f"{where}{item.name}", hints[item.name]
        if has_head and name == "head":
            yield from _heads()
        elif group := _group(hint):
            yield from _settings(group, command, f"{name}.{_key(hint)}")
        else:
            default = "" if item.default is MISSING else repr(item.default)
            if item.default_factory is not MISSING:
                default = repr(item.default_factory())
            yield name, _rule(hint), default, about.get(item.name, "")


def _group(hint: Any) -> Any:
    """Return the dataclass that a setting is or contains; None for a plain setting."""
    if isinstance(hint, type) and is_dataclass(hint):
        return hint
    return next(filter(None, map(_group, get_args(hint))), None)


def _key(hint: Any) -> str:
    return "NAME." if "dict[" in str(hint) else ""


def _descriptions(body: Any) -> dict[str, str]:
    """Return the text below each setting of a class."""
    return {
        ast.unparse(setting.target): " ".join(ast.literal_eval(text.value).split())
        for setting, text in zip(body.body, body.body[1:], strict=False)
        if isinstance(setting, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def _heads() -> Iterator[Line]:
    """Yield the settings of every kind of head from its file: importing one loads torch."""
    for file in sorted(KINDS.glob("[!_]*.py")):
        for name, line in _parsed(file, "Config").items():
            yield f"head.{name} (head={file.stem})", *line


def _parsed(file: Path, name: str) -> dict[str, tuple[str, str, str]]:
    """Return the settings of a class, inherited ones first, parsed from its file."""
    module = ast.parse(file.read_text(encoding="utf-8"))
    kind = next(one for one in module.body if getattr(one, "name", "") == name)
    assert isinstance(kind, ast.ClassDef)
    found: dict[str, tuple[str, str, str]] = {}
    for base in map(ast.unparse, kind.bases):
        imports = (one for one in module.body if isinstance(one, ast.ImportFrom) and one.module)
        source = next(one for one in imports if base in {alias.name for alias in one.names})
        place = ROOT.joinpath(*str(source.module).split("."))
        found |= _parsed(place.with_suffix(".py"), base)
    about = _descriptions(kind)
    for item in kind.body:
        if isinstance(item, ast.AnnAssign):
            setting = ast.unparse(item.target)
            # annotations of heads use the names of ranges.py and typing only
            hint = eval(ast.unparse(item.annotation), vars(ranges) | {"Any": Any})
            default = _default(item.value) if item.value else ""
            found[setting] = _rule(hint), default, about.get(setting, "")
    return found


def _default(value: ast.expr) -> str:
    """Return a default as it is written, or the result of its factory."""
    made = {"field(default_factory=list)": "[]", "field(default_factory=dict)": "{}"}
    text = ast.unparse(value)
    return made.get(text, text)


def _rule(hint: Any) -> str:
    """Return the type and range of a setting."""
    words = ranges.words(hint)
    for full, brief in BRIEF.items():
        words = words.replace(full, brief)
    return words

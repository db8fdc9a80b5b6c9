"""What `specheads COMMAND --help` shows: choices and settings; needs no recipe and no torch."""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from textwrap import fill
from typing import Any, get_args

from specheads import config
from specheads.__main__ import described
from specheads.commands import _compose
from specheads.config import ranges, validation

ROOT = Path(__file__).parents[2]
"""Folder of the package, below which modules lie by their names."""

KINDS = ROOT / "specheads" / "heads" / "kinds"

BRIEF = {
    validation.words(ranges.PrintableText): "text",
    validation.words(ranges.PathOrId): "a path or an id",
}
"""Rules of which a user need not think before one is broken."""

Line = tuple[str, str, str, str]
"""A setting's full name, what it may be, its default and what it is."""


def settings(command: str) -> str:
    """Return the help of a command: how to call it, examples, its choices, and every setting."""
    kind = _compose.SCHEMAS[command]
    groups = [item.name for item in fields(kind) if _choices(item.name)]
    if issubclass(kind, config.Train):
        groups.insert(0, "recipe")
    shown = [f"{group}={'|'.join(_choices(group))}" for group in groups]
    short = [f"{name} is {full}" for name, full in _compose.SHORT.get(command, {}).items()]
    about = (inspect.getdoc(kind) or "").removeprefix(f"`specheads {command}`.").strip()
    what, _, *examples = described(command)
    parts = [
        f"usage: specheads {command} [group=choice] [key=value] ...",
        what,
        *filter(None, [about]),
        "\nexamples",
        *(f"  {line}" for line in examples),
        *(["\nchoices", *(f"  {line}" for line in shown)] if shown else []),
        *(["\nshort names", *(f"  {line}" for line in short)] if short else []),
        "\nsettings",
        *(_shown(*line) for line in _settings(kind, command)),
    ]
    return "\n".join(parts) + "\n"


def _choices(group: str) -> list[str]:
    if group == "recipe":
        return sorted(_compose.recipes())
    return sorted(path.stem for path in config.data_dir("configs").joinpath(group).glob("*.yaml"))


def _shown(name: str, rule: str, default: str, about: str) -> str:
    head = f"  {name}: {rule}{f' [{default}]' if default else ''}"
    return f"{head}\n{fill(about, 96, initial_indent='      ', subsequent_indent='      ')}"


def _settings(kind: Any, command: str, where: str = "") -> Iterator[Line]:
    """Yield a dataclass's settings, and those below it."""
    hints = validation.hints(kind)
    about: dict[str, str] = {}
    for one in reversed(kind.__mro__[:-1]):
        about |= _about(ast.parse(inspect.getsource(one)).body[0])
    for item in fields(kind):
        name, hint = f"{where}{item.name}", hints[item.name]
        if name == "head" and command in ("train", "distill"):
            yield from _heads()
        elif below := _below(hint):
            yield from _settings(below, command, f"{name}.{_key(hint)}")
        else:
            default = "" if item.default is MISSING else repr(item.default)
            if item.default_factory is not MISSING:
                default = repr(item.default_factory())
            yield name, _rule(hint), default, about.get(item.name, "")


def _below(hint: Any) -> Any:
    """Return the dataclass that a setting is, or holds by name; None for a plain one."""
    found = (_below(one) for one in get_args(hint))
    is_group = isinstance(hint, type) and is_dataclass(hint)
    return hint if is_group else next(filter(None, found), None)


def _key(hint: Any) -> str:
    return "NAME." if "dict[" in str(hint) else ""


def _about(body: Any) -> dict[str, str]:
    """Return what stands below each setting of a class."""
    return {
        ast.unparse(setting.target): " ".join(ast.literal_eval(text.value).split())
        for setting, text in zip(body.body, body.body[1:], strict=False)
        if isinstance(setting, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def _heads() -> Iterator[Line]:
    """Yield the settings of every kind of head, from its file: importing one loads torch."""
    for file in sorted(KINDS.glob("[!_]*.py")):
        for name, line in _written(file, "Config").items():
            yield f"head.{name} (head={file.stem})", *line


def _written(file: Path, name: str) -> dict[str, tuple[str, str, str]]:
    """Return the settings of a class, those it inherits first, from the files of both."""
    module = ast.parse(file.read_text(encoding="utf-8"))
    kind = next(one for one in module.body if getattr(one, "name", "") == name)
    assert isinstance(kind, ast.ClassDef)
    found: dict[str, tuple[str, str, str]] = {}
    for base in map(ast.unparse, kind.bases):
        imports = (one for one in module.body if isinstance(one, ast.ImportFrom) and one.module)
        source = next(one for one in imports if base in {alias.name for alias in one.names})
        place = ROOT.joinpath(*str(source.module).split("."))
        found |= _written(place.with_suffix(".py"), base)
    about = _about(kind)
    for item in kind.body:
        if isinstance(item, ast.AnnAssign):
            setting = ast.unparse(item.target)
            default = _default(item.value) if item.value else ""
            found[setting] = _words(item.annotation), default, about.get(setting, "")
    return found


def _default(value: ast.expr) -> str:
    """Return a default as it is written, or what its factory makes."""
    made = {"field(default_factory=list)": "[]", "field(default_factory=dict)": "{}"}
    text = ast.unparse(value)
    return made.get(text, text)


def _words(annotation: ast.expr) -> str:
    """Return what a setting may be, of an annotation that was not run."""
    # the annotations of heads use the names of ranges.py and typing only
    return _rule(eval(ast.unparse(annotation), vars(ranges) | {"Any": Any}))


def _rule(hint: Any) -> str:
    """Return what a setting may be, of its annotation."""
    words = validation.words(hint)
    for whole, brief in BRIEF.items():
        words = words.replace(whole, brief)
    return words

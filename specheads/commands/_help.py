"""Text of `specheads COMMAND --help`: choices and settings, without a recipe and without torch."""

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from textwrap import fill
from typing import Any

import yaml

from specheads import config
from specheads.commands import docstring_lines
from specheads.config import compose
from specheads.config.commands import Train
from specheads.core import ranges

FAR_LIMITS = re.compile(r" \(.*?\)|, at most (1e\+|\d,\d{3},\d{3},)\S*")
"""Limits that no sensible value reaches. Messages name them, the help leaves them out."""


def help_text(command: str) -> str:
    """Return the help of a command: usage, examples, choices and every setting."""
    schema = compose.SCHEMAS[command]
    groups = sorted(item.name for item in fields(schema) if _choices(item.name))
    if issubclass(schema, Train):
        groups.insert(0, "recipe")
    choices = [_wrapped(f"{group}=  {', '.join(_choices(group))}", 2) for group in groups]
    short = compose.SHORT.get(command, {}).items()
    details = (inspect.getdoc(schema) or "").removeprefix(f"`specheads {command}`.").strip()
    purpose, _, *examples = docstring_lines(command)
    lines = [
        f"usage: specheads {command} [group=choice] [key=value] ...",
        purpose,
        *filter(None, [details]),
        "\nexamples",
        *(f"  {line}" for line in examples),
        *(["\nchoices", *choices] if choices else []),
        *(["\nshort names"] if short else []),
        *(f"  {name}=  sets {full}" for name, full in short if not full.startswith("+")),
        "\nsettings",
        *(
            _paragraph(f"{name}: {rule}{f' [{default}]' if default else ''}", description)
            for name, rule, default, description in list_settings(schema)
        ),
        *(_heads() if "head" in groups else []),
    ]
    return "\n".join(lines) + "\n"


def _choices(group: str) -> list[str]:
    if group == "recipe":
        return sorted(compose.recipes())
    return sorted(path.stem for path in config.data_dir("configs").joinpath(group).glob("*.yaml"))


def _paragraph(title: str, text: str) -> str:
    return f"  {title}\n{_wrapped(text, 6)}"


def _wrapped(text: str, indent: int) -> str:
    return fill(text, 96, initial_indent=" " * indent, subsequent_indent=" " * 6)


def list_settings(schema: Any, prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Yield full name, rule, default and description of each setting: plain ones before groups."""
    hints = ranges.setting_hints(schema)
    descriptions: dict[str, str] = {}
    for ancestor in reversed(schema.__mro__[:-1]):
        descriptions |= _descriptions(ast.parse(inspect.getsource(ancestor)).body[0])
    groups = {name: ranges.group_of(hint) for name, hint in hints.items()}
    for item in sorted(fields(schema), key=lambda item: groups[item.name] is not None):
        name, hint = f"{prefix}{item.name}", hints[item.name]
        if group := groups[item.name]:
            yield from list_settings(group, f"{name}.{'NAME.' if 'dict[' in str(hint) else ''}")
        else:
            default = "" if item.default is MISSING else repr(item.default)
            if item.default_factory is not MISSING:
                default = repr(item.default_factory())
            # the description explains an empty value
            default = "" if default in ("''", "[]", "{}") else default
            rule = FAR_LIMITS.sub("", ranges.describe_range(hint))
            yield name, rule, default, descriptions.get(item.name, "")


def _descriptions(body: Any) -> dict[str, str]:
    """Return the text below each setting of a class."""
    return {
        ast.unparse(setting.target): " ".join(ast.literal_eval(text.value).split())
        for setting, text in zip(body.body, body.body[1:], strict=False)
        if isinstance(setting, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def _heads() -> Iterator[str]:
    """Yield each kind of head with the defaults of its settings."""
    for file in sorted(config.data_dir("configs").joinpath("head").glob("*.yaml")):
        defaults = yaml.safe_load(file.read_text(encoding="utf-8")).items()
        words = [f"head.{name}={value}" for name, value in defaults if name != "kind"]
        yield _paragraph(f"head={file.stem}", " ".join(words))

"""Instructions about the running interpreter's standard library, available on every machine."""

import ast
import hashlib
import json
import re
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from specheads.data.files import Rows

WORDINGS = Path(__file__).with_suffix(".json")
ONE_OF = ("document", "annotate", "rename", "fix")
"""Every function gets one of these kinds, and all of the others that fit it."""
NEEDS = {"write": "stub", "document": "bare", "fix": "broken", "module": "outline"}
"""The text that a kind needs; the others need `code`."""
LINES = range(5, 61)
"""Number of lines of a function, including its docstring."""
DOCSTRING_CHARACTERS = 40
"""Shorter docstrings do not describe the function well enough to write it."""
BUGS = ((" == ", " != "), (" < ", " <= "), (" > ", " >= "), (" and ", " or "), (" + 1", " - 1"))
"""Right operators, and the wrong ones of a broken function."""
Texts = dict[str, str]
"""Texts about a function: `name`, `code`, `stub` (signature and docstring), `bare` (without the
docstring), `start` (the first half) and `broken`. A module has only an `outline`."""


def instructions(files: Rows, split_of: Callable[[str], str]) -> Rows:
    """Yield conversations of one user message about Python files and their functions.

    A row has its file's split. A function in several files is used once, and not at all if the
    files are in different splits. Each message comes once. `category` is the kind of instruction.
    """
    found: dict[str, tuple[str, str, Texts]] = {}
    shared: set[str] = set()
    outlines: list[tuple[str, str, Texts]] = []
    for where, row in files:
        text, split = row["text"], split_of(row["text"])
        try:
            tree = ast.parse(text)
        # some files of the standard library are not valid in this version
        except (SyntaxError, ValueError, RecursionError):
            continue
        if outline := _outline(tree):
            outlines.append((where, split, {"outline": outline}))
        for texts in _functions(text, tree):
            place = f"{texts['name']} of {where}"
            if found.setdefault(texts["code"], (place, split, texts))[1] != split:
                shared.add(texts["code"])
    asked: set[str] = set()
    functions = [one for code, one in found.items() if code not in shared]
    for where, split, texts in outlines + functions:
        for kind, content in _questions(texts):
            if content not in asked:
                asked.add(content)
                messages = [{"role": "user", "content": content}]
                yield where, {"messages": messages, "tools": None, "category": kind, "split": split}


def _functions(text: str, tree: ast.Module) -> Iterator[Texts]:
    lines = text.splitlines()
    for node in _statements(tree.body):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
        last = node.end_lineno or node.lineno
        if last - first + 1 not in LINES or node.body[0].lineno == node.lineno:
            continue
        code = textwrap.dedent("\n".join(lines[first - 1 : last]))
        half = code.splitlines()
        docstring, stub, bare = ast.get_docstring(node) or "", "", ""
        if docstring and len(node.body) > 1:
            begin, end = node.body[0].lineno, node.body[0].end_lineno or 0
            bare = textwrap.dedent("\n".join([*lines[first - 1 : begin - 1], *lines[end:last]]))
            if len(docstring) >= DOCSTRING_CHARACTERS:
                stub = textwrap.dedent("\n".join(lines[first - 1 : end]))
        yield {
            **{"name": node.name, "code": code, "stub": stub, "bare": bare},
            "start": "\n".join(half[: (len(half) + 1) // 2]),
            "broken": _broken(code),
        }


def _statements(body: list[Any]) -> Iterator[ast.AST]:
    """Yield statements at every depth; unlike ast.walk it does not visit expressions."""
    for node in body:
        yield node
        for name in ("body", "handlers", "orelse", "finalbody"):
            yield from _statements(getattr(node, name, []))


def _outline(tree: ast.Module) -> str:
    """Return a module's docstring and public names; empty if it has no docstring."""
    kinds = {ast.FunctionDef: "def", ast.AsyncFunctionDef: "def", ast.ClassDef: "class"}
    names = [
        f"{kinds[type(node)]} {node.name}"
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
    ]
    docstring = ast.get_docstring(tree)
    return "\n".join([docstring[:800], "", *names[:30]]) if docstring and names else ""


def _questions(texts: Texts) -> Iterator[tuple[str, str]]:
    """Yield the kind and the message of each instruction; a hash of the code chooses wordings."""
    kinds = wordings()
    fits = [kind for kind in kinds if texts.get(NEEDS.get(kind, "code"))]
    rest = [kind for kind in fits if kind in ONE_OF]
    fenced = {
        name: text if name == "name" else f"```python\n{text}\n```" for name, text in texts.items()
    }
    for kind in fits:
        if kind not in ONE_OF or kind == rest[_number(texts["code"]) % len(rest)]:
            place = _number(kind + "".join(texts.values())) % len(kinds[kind])
            yield kind, kinds[kind][place].format(**fenced)


@cache
def wordings() -> dict[str, list[str]]:
    """Return the wordings of each kind of instruction."""
    return json.loads(WORDINGS.read_text(encoding="utf-8"))


def _broken(code: str) -> str:
    """Return the code with one wrong operator; empty if it has no such operator."""
    # skip lines with a comment or a string before the operator
    for right, wrong in BUGS:
        if found := re.search(rf"^[^#'\"\n]*{re.escape(right)}", code, re.MULTILINE):
            start = found.end() - len(right)
            return code[:start] + wrong + code[found.end() :]
    return ""


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])

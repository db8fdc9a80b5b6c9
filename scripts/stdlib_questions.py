"""Write questions about Python's standard library, which the quickstart's base answers.

    python scripts/stdlib_questions.py --out recipes/smollm2/stdlib_questions.jsonl.gz
    python scripts/stdlib_questions.py --folder .venv/lib --out packages.jsonl.gz

The questions are about the files of the running interpreter and their functions, so another version
of Python gives others. The file in the recipe was written with Python 3.11.7. With --folder they
are about the Python files in a folder. A row has the split of its file, so no function of a
held-out question is in a training question.
"""

import argparse
import ast
import gzip
import hashlib
import json
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from specheads.core.files import write_atomic
from specheads.data.bad_rows import BadRows
from specheads.data.files import STDLIB_MIN_CHARACTERS, Rows, read_text_files, stdlib_files
from specheads.data.sources import SPLIT_COLUMN, split_of

WORDINGS = Path(__file__).with_suffix(".json")
ALTERNATIVES = ("document", "annotate", "rename", "fix")
"""Every function gets one of these kinds, and all other kinds that fit it."""
REQUIRED_TEXTS = {"write": "stub", "document": "bare", "fix": "broken", "module": "outline"}
"""The text that a kind needs; the kinds that are not here need `code`."""
LINES = range(5, 61)
"""Number of lines of a function, including its docstring."""
DOCSTRING_CHARACTERS = 40
"""Shorter docstrings do not describe the function well enough to write it."""
BUGS = ((" == ", " != "), (" < ", " <= "), (" > ", " >= "), (" and ", " or "), (" + 1", " - 1"))
"""Right operators, and the wrong ones of a broken function."""
Texts = dict[str, str]
"""Texts about a function: `name`, `code`, `stub` (signature and docstring), `bare` (without the
docstring), `start` (the first half) and `broken`. A module has only an `outline`."""


def main() -> None:
    """Write the questions as JSON lines, compressed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", required=True, type=Path, help="file to write, .jsonl.gz")
    parser.add_argument("--folder", type=Path, help="of Python files; default: the library's")
    options = parser.parse_args()
    files = sorted(options.folder.rglob("*.py")) if options.folder else stdlib_files()
    rows = questions(read_text_files(files, BadRows(), STDLIB_MIN_CHARACTERS))
    lines = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
    # without a date, so that the same questions are the same file
    write_atomic(options.out, gzip.compress(lines.encode(), mtime=0))


def questions(files: Rows) -> Iterator[dict[str, Any]]:
    """Yield rows of one user message about Python files and their functions.

    A row has its file's split. A function in several files is used once, and not at all if the
    files are in different splits. Each message comes once. `category` is the kind of question.
    """
    functions: dict[str, tuple[str, Texts]] = {}
    in_two_splits: set[str] = set()
    modules: list[tuple[str, Texts]] = []
    for _, row in files:
        text, split = row["text"], split_of(row["text"])
        try:
            tree = ast.parse(text)
        # some files of the standard library are not valid in this version
        except (SyntaxError, ValueError, RecursionError):
            continue
        if outline := _outline(tree):
            modules.append((split, {"outline": outline}))
        for texts in _functions(text, tree):
            code = texts["code"]
            if functions.setdefault(code, (split, texts))[0] != split:
                in_two_splits.add(code)
    contents: set[str] = set()
    usable = [function for code, function in functions.items() if code not in in_two_splits]
    for split, texts in modules + usable:
        for kind, content in _messages(texts):
            if content not in contents:
                contents.add(content)
                message = {"role": "user", "content": content}
                yield {"messages": [message], "category": kind, SPLIT_COLUMN: split}


def _functions(text: str, tree: ast.Module) -> Iterator[Texts]:
    """Yield the texts about each function of a file."""
    lines = text.splitlines()
    for node in _statements(tree.body):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        last = node.end_lineno or node.lineno
        if last - first + 1 not in LINES or node.body[0].lineno == node.lineno:
            continue
        code = textwrap.dedent("\n".join(lines[first - 1 : last]))
        code_lines = code.splitlines()
        docstring, stub, bare = ast.get_docstring(node) or "", "", ""
        if docstring and len(node.body) > 1:
            begin, end = node.body[0].lineno, node.body[0].end_lineno or 0
            bare = textwrap.dedent("\n".join([*lines[first - 1 : begin - 1], *lines[end:last]]))
            if len(docstring) >= DOCSTRING_CHARACTERS:
                stub = textwrap.dedent("\n".join(lines[first - 1 : end]))
        yield {
            **{"name": node.name, "code": code, "stub": stub, "bare": bare},
            "start": "\n".join(code_lines[: (len(code_lines) + 1) // 2]),
            "broken": _break_operator(code),
        }


def _statements(body: list[Any]) -> Iterator[ast.AST]:
    """Yield statements at every depth; unlike ast.walk it does not visit expressions."""
    for node in body:
        yield node
        for name in ("body", "handlers", "orelse", "finalbody"):
            yield from _statements(getattr(node, name, []))


def _outline(tree: ast.Module) -> str:
    """Return a module's docstring and public names; empty if it has no docstring."""
    keywords = {ast.FunctionDef: "def", ast.AsyncFunctionDef: "def", ast.ClassDef: "class"}
    names = [
        f"{keywords[type(node)]} {node.name}"
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
    ]
    docstring = ast.get_docstring(tree)
    return "\n".join([docstring[:800], "", *names[:30]]) if docstring and names else ""


def _messages(texts: Texts) -> Iterator[tuple[str, str]]:
    """Yield the kind and the message of each question; a hash of the code chooses wordings."""
    wordings = read_wordings()
    kinds = [kind for kind in wordings if texts.get(REQUIRED_TEXTS.get(kind, "code"))]
    alternatives = [kind for kind in kinds if kind in ALTERNATIVES]
    fenced = {
        name: text if name == "name" else f"```python\n{text}\n```" for name, text in texts.items()
    }
    for kind in kinds:
        chosen = alternatives and alternatives[_hash(texts.get("code", "")) % len(alternatives)]
        if kind not in ALTERNATIVES or kind == chosen:
            index = _hash(kind + "".join(texts.values())) % len(wordings[kind])
            yield kind, wordings[kind][index].format(**fenced)


@cache
def read_wordings() -> dict[str, list[str]]:
    """Return the wordings of each kind of question."""
    return json.loads(WORDINGS.read_text(encoding="utf-8"))


def _break_operator(code: str) -> str:
    """Return the code with one wrong operator; empty if it has no such operator."""
    # skip lines with a comment or a string before the operator
    for right, wrong in BUGS:
        if match := re.search(rf"^[^#'\"\n]*{re.escape(right)}", code, re.MULTILINE):
            start = match.end() - len(right)
            return code[:start] + wrong + code[match.end() :]
    return ""


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])


if __name__ == "__main__":
    main()

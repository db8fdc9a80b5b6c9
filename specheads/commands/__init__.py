"""Commands of `specheads`: each module whose name does not begin with an underscore has a `run`.

Each also has a function for Python: `overrides` are as on the command line. `settings` are checked
ones, in place of the other arguments, and `base` is a loaded base, in place of the one they name.
"""

import ast
from pathlib import Path

FOLDER = Path(__file__).parent
ORDER = ("train", "distill", "tune", "evaluate", "compare", "chat", "export", "push")
"""The order in which a user needs the commands; the others follow."""


def commands() -> dict[str, str]:
    """Return the first docstring line of every command, by name."""
    names = [path.stem.replace("_", "-") for path in sorted(FOLDER.glob("[!_]*.py"))]
    return {name: docstring_lines(name)[0] for name in names}


def docstring_lines(command: str) -> list[str]:
    """Return the docstring of a command by lines: its purpose, an empty line, and examples.

    Modules are parsed, not imported: a list of commands should not load torch and Hydra.
    """
    text = FOLDER.joinpath(f"{command.replace('-', '_')}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(text)) or "").split("\n")


def usage() -> str:
    """Return the help text: how to call specheads, and the purpose of each command."""
    purposes = commands()
    width = max(map(len, purposes), default=0)
    ordered = [*ORDER, *(name for name in purposes if name not in ORDER)]
    return "\n".join(
        [
            "usage: specheads <command> [group=choice] [key=value] ...",
            "Train heads that draft tokens for a language model, and measure and export them.",
            "",
            *(f"  {name:{width}}  {purposes[name]}" for name in ordered),
            "",
            "start with     specheads train recipe=tiny_code",
            "own data       specheads train recipe=conversations base.model=MODEL data.path=FILE",
            "all settings   specheads <command> --help\n",
        ]
    )

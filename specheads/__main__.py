"""`specheads <command> [overrides]`: every module of `specheads.commands` is a command."""

import ast
import sys
from importlib import import_module
from pathlib import Path

FOLDER = Path(__file__).with_name("commands")


def commands() -> dict[str, str]:
    """Return the first docstring line of every command, by name."""
    return {path.stem: described(path.stem)[0] for path in sorted(FOLDER.glob("[!_]*.py"))}


def described(command: str) -> list[str]:
    """Return the docstring of a command by lines: what it does, a blank one, and examples.

    Modules are parsed, not imported: a list of commands should not wait for torch and Hydra.
    """
    text = FOLDER.joinpath(f"{command}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(text)) or "").split("\n")


def usage() -> str:
    """Return the help text: how to call specheads, and what each command does."""
    known = commands()
    width = max(map(len, known), default=0)
    lines = [f"  {name:{width}}  {about}" for name, about in known.items()]
    return "\n".join(
        [
            "usage: specheads <command> [group=choice] [key=value] ...",
            "",
            *lines,
            "",
            "specheads <command> --help shows a command's settings.\n",
        ]
    )


def main() -> None:
    """Run the command named first on the command line; the rest are its overrides."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        sys.stdout.write(usage())
        return
    known = commands()
    if name not in known:
        sys.stderr.write(f"no command is called {name!r}: choose one of {', '.join(known)}\n")
        sys.exit(2)
    del sys.argv[1]
    # late, so that a list of commands waits for nothing
    import_module("specheads.commands._call").call(name, sys.argv[1:])


if __name__ == "__main__":
    main()

"""`specheads <command> [overrides]`."""

import sys

from specheads.commands import commands, usage


def main() -> None:
    """Run the command named first on the command line; the rest are its overrides."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        sys.stdout.write(usage())
        return
    if name not in (names := commands()):
        sys.stderr.write(f"the command must be one of {', '.join(names)}, got {name!r}\n")
        sys.exit(2)
    # imported late: it loads Hydra
    from specheads.commands import _call

    del sys.argv[1]
    _call.call(name, sys.argv[1:])


if __name__ == "__main__":
    main()

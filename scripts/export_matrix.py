"""Render the tables of engines, heads and verification in docs/export_matrix.md.

    python scripts/export_matrix.py            write it
    python scripts/export_matrix.py --check    write nothing; exit 1 when it is not current

Only the text between `<!-- matrix -->` and `<!-- /matrix -->` is replaced.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from specheads.export.layouts import engine_module, engines
from specheads.export.layouts._shared import Layout
from specheads.heads.load import kinds

PAGE = Path(__file__).resolve().parents[1] / "docs" / "export_matrix.md"
SECTION = re.compile(r"(<!-- matrix -->\n).*?(<!-- /matrix -->)", re.DOTALL)
CELLS = {"run": "run", "layout": "layout"}
NOTHING = "no"


def render() -> str:
    """Return both tables: every head on every engine, and the details of each cell."""
    known = engines()
    matrix = [("head", *known)]
    details = [("engine", "head", "holds", "verified")]
    for kind in kinds():
        matrix.append((kind, *(_cell(kind, engine) for engine in known)))
    for engine in known:
        module = engine_module(engine)
        for kind, layout in sorted(module.LAYOUTS.items()):
            verified = f"{CELLS[layout.verified]}: {layout.note}"
            details.append((f"`{engine}`: {module.ABOUT}", kind, _limits(layout), verified))
    return f"{_table(matrix)}\n\n{_table(details)}\n"


def _cell(kind: str, engine: str) -> str:
    layout = engine_module(engine).LAYOUTS.get(kind)
    return NOTHING if layout is None else CELLS[layout.verified]


def _limits(layout: Layout) -> str:
    """Return the restrictions of a layout on a head's settings."""
    bound = [
        f"{name} {' or '.join(map(str, allowed))} only"
        for name, allowed in layout.settings.items()
        if allowed is not None
    ]
    if "draft_tokens" not in layout.settings:
        bound.append("whole vocabulary only")
    if layout.limits:
        bound.append(layout.limits)
    return "; ".join(bound) or "every setting"


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = ("| " + " | ".join(row) + " |" for row in rows)
    return "\n".join([head, "|" + " --- |" * len(rows[0]), *body])


def main() -> None:
    """Write the page, or report that it is not current."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    old = PAGE.read_text(encoding="utf-8")
    new = SECTION.sub(lambda found: found[1] + render() + found[2], old)
    if check and new != old:
        sys.stderr.write(f"{PAGE} is not current: run python scripts/export_matrix.py\n")
        sys.exit(1)
    if not check:
        PAGE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()

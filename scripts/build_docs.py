"""Build the pages and an API reference as a site: make docs.

    python scripts/build_docs.py --out site

The pages keep their names and their links to other files of the repository. A dead link, a dead
anchor, or a public name without a docstring ends the build. It reads the sources and imports no
module of them, so its environment needs mkdocs-material and mkdocstrings only.
"""

import argparse
import ast
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import griffe  # pyright: ignore[reportMissingImports]
import yaml

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE")
FOLDERS = ("docs", "recipes")
INDEX = "docs/README.md"
SETTINGS = {
    "site_name": "specheads",
    "theme": {"name": "material", "font": False},
    "docs_dir": "pages",
    "use_directory_urls": False,
    "nav": [
        {"Documentation": INDEX},
        {"Tutorial": "docs/tutorial.md"},
        {"8B on a node of GPUs": "docs/8b.md"},
        {"Recipes": "recipes/README.md"},
        {"API": "api.md"},
    ],
    # pages out of the navigation are linked from the first one
    "validation": {
        "nav": {"omitted_files": "ignore"},
        "links": {"not_found": "warn", "anchors": "warn", "unrecognized_links": "ignore"},
    },
    "markdown_extensions": ["tables", "fenced_code", {"toc": {"permalink": True}}],
    "plugins": [
        "search",
        {
            "mkdocstrings": {
                "handlers": {
                    "python": {
                        "paths": [str(ROOT)],
                        "options": {
                            "docstring_style": "google",
                            # a line can describe several parameters
                            "docstring_options": {
                                "warn_unknown_params": False,
                                "warn_missing_types": False,
                            },
                            "show_source": False,
                            "show_if_no_docstring": False,
                            "heading_level": 3,
                        },
                    }
                }
            }
        },
    ],
}


def public_names() -> dict[str, list[str]]:
    """Return the public names of the package by their modules, as `__init__` lists them."""
    tree = ast.parse((ROOT / "specheads" / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_PUBLIC":
            return ast.literal_eval(node.value)
    raise SystemExit("error: specheads/__init__.py needs its table _PUBLIC of public names")


def undocumented(names: Sequence[str]) -> list[str]:
    """Return the public names, and public members of classes, without a docstring."""
    package = griffe.load("specheads", search_paths=[str(ROOT)], allow_inspection=False)
    missing = []
    for name in names:
        thing = package[name.removeprefix("specheads.")]
        members = thing.members.values() if thing.is_class else ()
        functions = [member for member in members if member.is_function and member.is_public]
        missing += [
            item.path
            for item in [thing, *functions]
            # properties and methods with a dunder say nothing that their class does not
            if not item.has_docstring and not item.name.startswith("__")
        ]
    return missing


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the site; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "site", help="folder of the site")
    options = parser.parse_args(arguments)
    modules = public_names()
    names = [f"specheads.{module}.{name}" for module, names in modules.items() for name in names]
    if missing := undocumented(names):
        sys.stderr.write(f"error: a public name needs a docstring: {', '.join(missing)}\n")
        return 1
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        pages = folder / "pages"
        for name in FOLDERS:
            shutil.copytree(
                ROOT / name, pages / name, ignore=shutil.ignore_patterns("*.safetensors")
            )
        for name in PAGES:
            shutil.copy(ROOT / name, pages / name)
        api = "".join(f"## `{name.rpartition('.')[2]}`\n\n::: {name}\n\n" for name in names)
        (pages / "api.md").write_text(f"# API\n\n{api}", encoding="utf-8")
        (folder / "mkdocs.yml").write_text(yaml.safe_dump(SETTINGS, sort_keys=False))
        command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
        command += ["--config-file", str(folder / "mkdocs.yml")]
        return subprocess.run([*command, "--site-dir", str(options.out.resolve())]).returncode


if __name__ == "__main__":
    sys.exit(main())

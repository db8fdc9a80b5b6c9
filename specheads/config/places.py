"""Where configurations and recipes lie: in a checkout, in a wheel, and with the user."""

import os
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


def data_dir(name: str) -> Path:
    """Return `configs` or `recipes`: inside the wheel, else next to the package."""
    packaged = PACKAGE / "_data" / name
    return packaged if packaged.is_dir() else PACKAGE.parent / name


RENAMED = {"rule": "acceptance", "taps": "aux_layers"}
"""Settings that are called something else now, for whoever still says the old name."""


def new_name(text: str) -> str:
    """Return a hint where a message quotes a setting that was renamed; empty where none was."""
    quoted = (old for old in RENAMED if f".{old}'" in text or f"'{old}'" in text)
    return "".join(f"; {old} is called {RENAMED[old]} now" for old in quoted)


def recipe_dirs() -> list[Path]:
    """Return the folders that hold recipes: ours, then those of SPECHEADS_RECIPES."""
    extra = os.environ.get("SPECHEADS_RECIPES", "").split(os.pathsep)
    return [data_dir("recipes"), *(Path(folder) for folder in extra if folder)]

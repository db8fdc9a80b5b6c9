"""Every setting once, with its type, range and unit, and the folders that hold settings."""

import os
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


def data_dir(name: str) -> Path:
    """Return the folder `configs` or `recipes`: in the wheel, else next to the package."""
    packaged = PACKAGE / "_data" / name
    return packaged if packaged.is_dir() else PACKAGE.parent / name


def recipe_dirs() -> list[Path]:
    """Return the folders of recipes: ours, then those of SPECHEADS_RECIPES."""
    extra = os.environ.get("SPECHEADS_RECIPES", "").split(os.pathsep)
    return [data_dir("recipes"), *(Path(folder) for folder in extra if folder)]

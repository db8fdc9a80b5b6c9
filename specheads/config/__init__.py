"""Every setting, declared once, with its type, range and unit. Hydra composes them."""

from specheads.config.commands import (
    Chat,
    Compare,
    Evaluate,
    Export,
    Push,
    ServeFeatures,
    Simulate,
    Train,
    Tune,
)
from specheads.config.parts import Base, Evaluation, Hardware, Tracker, Tree
from specheads.config.places import data_dir, recipe_dirs
from specheads.config.validation import check
from specheads.data.settings import Data

__all__ = [
    "Base",
    "Chat",
    "Compare",
    "Data",
    "Evaluate",
    "Evaluation",
    "Export",
    "Hardware",
    "Push",
    "ServeFeatures",
    "Simulate",
    "Tracker",
    "Train",
    "Tree",
    "Tune",
    "check",
    "data_dir",
    "recipe_dirs",
]

"""Every setting, with its unit and what its zero means. Hydra fills these; nothing else does."""

from specheads.config.commands import Compare, Evaluate, Export, Push, Train
from specheads.config.parts import (
    Base,
    Data,
    Distill,
    Evaluation,
    Joint,
    Phase,
    Schedule,
    Tracker,
    Tree,
)
from specheads.config.places import data_dir, recipe_dirs

__all__ = [
    "Base",
    "Compare",
    "Data",
    "Distill",
    "Evaluate",
    "Evaluation",
    "Export",
    "Joint",
    "Phase",
    "Push",
    "Schedule",
    "Tracker",
    "Train",
    "Tree",
    "data_dir",
    "recipe_dirs",
]

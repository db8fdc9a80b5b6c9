"""Every setting, with its unit and what its zero means. Hydra fills these; nothing else does."""

from specheads.config.commands import Chat, Export, Push, Train
from specheads.config.measuring import Compare, Evaluate, Simulate, Tune
from specheads.config.parts import Base, Data, Evaluation, Hardware, Tracker, Tree
from specheads.config.places import data_dir, new_name, recipe_dirs
from specheads.config.schedule import Distill, FeatureCache, Joint, Phase, Schedule, Validation
from specheads.config.validation import check

__all__ = [
    "Base",
    "Chat",
    "Compare",
    "Data",
    "Distill",
    "Evaluate",
    "Evaluation",
    "Export",
    "FeatureCache",
    "Hardware",
    "Joint",
    "Phase",
    "Push",
    "Schedule",
    "Simulate",
    "Tracker",
    "Train",
    "Tree",
    "Tune",
    "Validation",
    "check",
    "data_dir",
    "new_name",
    "recipe_dirs",
]

"""Every setting, with its unit and what its zero means. Hydra fills these; nothing else does."""

from specheads.config.commands import Compare as Compare
from specheads.config.commands import Evaluate as Evaluate
from specheads.config.commands import Export as Export
from specheads.config.commands import Push as Push
from specheads.config.commands import Train as Train
from specheads.config.parts import Base as Base
from specheads.config.parts import Data as Data
from specheads.config.parts import Distill as Distill
from specheads.config.parts import Evaluation as Evaluation
from specheads.config.parts import Joint as Joint
from specheads.config.parts import Phase as Phase
from specheads.config.parts import Schedule as Schedule
from specheads.config.parts import Tracker as Tracker
from specheads.config.parts import Tree as Tree
from specheads.config.places import data_dir as data_dir
from specheads.config.places import recipe_dirs as recipe_dirs

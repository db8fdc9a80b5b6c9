"""tuned.json: what `specheads tune` measured on a machine, and the trees it chose.

See docs/tune.md.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch

from specheads.core.errors import InputError
from specheads.core.files import from_json
from specheads.core.machine import device_name, dtype_name
from specheads.core.ranges import (
    NonEmpty,
    NonNegativeInt,
    Probability,
)
from specheads.decoding.calibration import Curve
from specheads.decoding.cost import StepCost
from specheads.decoding.load import StepLoad
from specheads.decoding.trees import policies
from specheads.decoding.trees.named import TimedTree, TunedTree

FILE = "tuned.json"
"""Its name in a head's folder."""
SCHEMA = 1


class SwitchingPolicy(policies.TreePolicy):
    """Uses one of several trees in each step of an engine, the one whose index `choose` returns.

    Source: Chen et al. 2024, arXiv:2402.12374, for trees that depend on the machine; Together AI's
    adaptive Sequoia, 2024, for trees that depend on the context.
    """

    def __init__(
        self,
        name: str,
        trees: Sequence[policies.TreePolicy],
        choose: Callable[[StepLoad], int],
    ) -> None:
        self.name, self.trees, self.choose = name, trees, choose
        for limit in ("num_nodes", "depth", "num_guesses", "lookup_length"):
            setattr(self, limit, max(getattr(tree, limit) for tree in trees))

    @property
    def draft_depth(self) -> int:
        """Levels of the deepest of the head's own trees."""
        return max(tree.draft_depth for tree in self.trees)

    def choose_policy(self, load: StepLoad) -> policies.TreePolicy:
        """Return the chosen tree."""
        return self.trees[self.choose(load)]


# --- the file ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine on which times were measured."""

    device: str
    name: str
    """Name of the GPU or CPU."""
    dtype: str

    @classmethod
    def of(cls, device: torch.device, dtype: torch.dtype) -> "Machine":
        """Return the machine of a device and a dtype."""
        return cls(device=device.type, name=device_name(device), dtype=dtype_name(dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchRates:
    """How often prompt lookup finds a match of one length, and is right then."""

    share: Probability
    """Fraction of steps whose longest match has this length."""
    rates: Annotated[list[Probability], NonEmpty]
    """Conditional acceptance rate of each copied token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceRates:
    """Measured acceptance rates."""

    per_depth: list[Probability]
    """Conditional acceptance rate of the best guess at each depth, in steps of a chain as deep as
    the head."""
    matches: list[MatchRates] = field(default_factory=list)
    """Rates of prompt lookup after a match of one, two, ... tokens. Empty if not measured."""
    curves: list[Curve] = field(default_factory=list)
    """Calibration of each depth. Empty if not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """Contents of tuned.json."""

    schema: int = SCHEMA
    machine: Machine
    base: str
    """Fingerprint of the base."""
    cost: StepCost
    cost_error: dict[str, float | int]
    """Relative errors of the fitted costs, median and largest, and the number of points."""
    acceptance: AcceptanceRates
    trees: Annotated[list[TunedTree], NonEmpty]
    tried: list[TimedTree] = field(default_factory=list)
    new_tokens: NonNegativeInt = 0
    """New tokens per text in the measurements; longer texts repeat themselves more. 0 if not
    recorded."""

    @classmethod
    def read(cls, value: Mapping[str, Any], path: str, depth: int | None = None) -> "Tuned":
        """Return the contents of a file, for a head of this depth; None accepts any depth.

        Unknown fields, as of early files, are ignored. An InputError is raised for another schema,
        a damaged file, or one of another head.
        """
        remedy = f"delete {path}, and measure again with specheads tune"
        if value.get("schema") != SCHEMA:
            raise InputError(
                f"tuned.json must be of schema {SCHEMA}, got {value.get('schema')!r:.40}; {remedy}"
            )
        try:
            tuned = from_json(cls, dict(value), path)
            deepest = max(tree.policy().draft_depth for tree in tuned.trees)
            rates, curves = tuned.acceptance.per_depth, tuned.acceptance.curves
            if curves and len(curves) != len(rates):
                raise InputError(
                    "acceptance must have as many curves as depths, or none, got "
                    f"{len(curves)} for {len(rates)}"
                )
            if depth is not None and deepest > depth:
                raise InputError(
                    f"tuned.json holds a tree of {deepest} levels and its head drafts {depth}"
                )
        except InputError as error:
            raise InputError(f"{error}; {remedy}") from error
        return tuned

    def fits(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether its times were measured on such a machine."""
        return self.machine == Machine.of(device, dtype)

    def best(self, batch: int, context: int | float) -> TunedTree:
        """Return the tree of the nearest batch, then context, by ratio."""

        def distance(tree: TunedTree) -> tuple[float, float]:
            ratios = tree.batch / max(batch, 1), tree.context / max(context, 1)
            return abs(math.log(ratios[0])), abs(math.log(ratios[1]))

        return min(self.trees, key=distance)

    def policy(self) -> policies.TreePolicy:
        """Return the tree policy, which follows batch and context in each step."""
        trees = [tree.policy() for tree in self.trees]
        if all(tree.shape() == self.trees[0].shape() for tree in self.trees):
            return trees[0]
        return SwitchingPolicy("tuned", trees, self._nearest)

    def _nearest(self, load: StepLoad) -> int:
        """Return the index of the tree for the batch and the mean context."""
        return self.trees.index(self.best(load.batch, load.mean_context))

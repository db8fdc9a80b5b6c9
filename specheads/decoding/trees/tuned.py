"""The one place that knows every tree policy: settings, what `tune` tries, and tuned.json.

See docs/tune.md.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import torch

from specheads.config.shared import TreeSettings
from specheads.core.errors import InputError
from specheads.core.files import from_json
from specheads.core.machine import device_name, dtype_name
from specheads.core.ranges import (
    NonEmpty,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    one_of,
)
from specheads.decoding.calibration import AcceptanceEstimate, Curve
from specheads.decoding.cost import StepCost, StepLoad
from specheads.decoding.trees import policies
from specheads.decoding.trees.hybrid import HybridTree, remove_lookup

FILE = "tuned.json"
"""Its name in a head's folder."""
SCHEMA = 1


def fixed_policy(settings: TreeSettings, head_depth: int) -> policies.TreePolicy | None:
    """Return the tree policy of settings, for a head of this depth; None for a tuned tree."""
    depth = settings.depth or head_depth
    branches = settings.branches or [1] * depth
    match settings.kind:
        case "tuned":
            return None
        case "chain":
            policy = policies.chain(depth, settings.confidence)
        case "static":
            policy = policies.Static(settings.paths, confidence=settings.confidence)
        case "best_first":
            beam = settings.beam
            policy = policies.BestFirst(settings.num_nodes, depth, beam, beam)
        case "beam":
            policy = policies.Beam(settings.beam, depth)
        case "product":
            policy = policies.Product(branches, settings.num_nodes)
        case "sampled":
            policy = policies.Sampled(branches)
        case kind:
            raise InputError(f"tree.kind must be a kind of tree, got {kind!r}; see docs/tune.md")
    if policy.depth > head_depth:
        raise InputError(
            f"a tree can be as deep as the head, {head_depth} levels, got {policy.depth}; lower "
            "tree.depth, or give shorter tree.paths or tree.branches"
        )
    return policy


def fixed_tree(policy: policies.TreePolicy) -> policies.Static | None:
    """Return the head's own tree if it is the same in every step, else None."""
    tree = remove_lookup(policy)
    return tree if isinstance(tree, policies.Static) and not tree.confidence else None


def candidate_policies(
    head_depth: int, drafted_size: int, num_nodes: int, max_nodes: int
) -> list[policies.TreePolicy]:
    """Return the policies that `specheads tune` times, next to static trees, for a head.

    They have about `num_nodes` nodes, the number of the best static tree, and at most `max_nodes`.
    """
    branch = min(4, drafted_size or 4)
    if branch == 1:
        return []
    largest = min(max_nodes, 1 + branch + (head_depth - 1) * 4 * branch)
    num_nodes = min(max(num_nodes, head_depth + 3), largest)
    return [policies.BestFirst(num_nodes, head_depth, 4, branch)]


class SwitchingPolicy(policies.TreePolicy):
    """Uses one of several trees in each step of an engine, the one whose index `choose` returns.

    Source: Chen et al. 2024, arXiv:2402.12374, for trees that depend on the machine; Together AI's
    adaptive Sequoia, 2024, for trees that depend on the context.
    """

    def __init__(
        self, name: str, trees: Sequence[policies.TreePolicy], choose: Callable[[StepLoad], int]
    ) -> None:
        self.name, self.trees, self.choose = name, trees, choose
        for limit in ("num_nodes", "depth", "num_guesses", "lookup_length"):
            setattr(self, limit, max(getattr(tree, limit) for tree in trees))

    @property
    def draft_depth(self) -> int:
        """Levels of the deepest of the head's own trees."""
        return max(tree.draft_depth for tree in self.trees)

    @property
    def is_chain(self) -> bool:
        """Whether each tree is a chain."""
        return all(tree.is_chain for tree in self.trees)

    def choose_policy(self, load: StepLoad) -> policies.TreePolicy:
        """Return the chosen tree."""
        return self.trees[self.choose(load)]


# --- the file ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedTree:
    """A tree whose decoding was timed."""

    batch: int = 1
    context: int = 0
    tree: str
    num_nodes: int
    depth: int
    tokens_per_forward: float
    """Measured on text that was not used to choose the trees."""
    step_overhead: float
    """Time of a step divided by that of the base alone."""
    speedup: float
    interval: list[float] = field(default_factory=list)
    """95 % bootstrap interval of the speed-up over texts. Empty if not measured."""
    chosen: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedTree:
    """The best tree at a batch and a context; kind "none" does not draft.

    All fields except `copied` describe the head's own tree, without copied text.
    """

    batch: PositiveInt
    context: PositiveInt
    tokens_per_forward: PositiveFloat
    predicted_speedup: NonNegativeFloat
    interval: list[float] = field(default_factory=list)
    """95 % interval of the speed-up, as in `TimedTree`."""
    kind: Annotated[str, one_of("none", "static", "best_first")]
    paths: list[list[int]] = field(default_factory=list)
    """Rank paths of a static tree or chain."""
    confidence: Probability = 0.0
    """As in `policies.Static`."""
    stop: AcceptanceEstimate | None = None
    """Estimate that is compared with the confidence; None is the head's probability."""
    num_nodes: int = 1
    depth: int = 0
    beam: int = 0
    branch: int = 0
    copied: NonNegativeInt = 0
    """Nodes for copied text: see `HybridTree`."""

    @classmethod
    def of(cls, policy: policies.TreePolicy, timed: TimedTree) -> "TunedTree":
        """Return a policy as tuned.json stores it, with the measurements of its decoding."""
        tree = remove_lookup(policy)
        tuned = cls(
            batch=timed.batch,
            context=timed.context,
            tokens_per_forward=timed.tokens_per_forward,
            predicted_speedup=timed.speedup,
            interval=timed.interval,
            kind="static" if tree.depth else "none",
            num_nodes=tree.num_nodes,
            depth=tree.depth,
            copied=policy.num_copied if isinstance(policy, HybridTree) else 0,
        )
        if isinstance(tree, policies.BestFirst):
            return replace(tuned, kind="best_first", beam=tree.beam, branch=tree.branch)
        assert isinstance(tree, policies.Static)
        paths = [list(path) for path in tree.paths]
        return replace(tuned, paths=paths, confidence=tree.confidence, stop=tree.estimate)

    def policy(self) -> policies.TreePolicy:
        """Return the tree policy."""
        tree: policies.TreePolicy = policies.NOTHING
        if self.kind == "static":
            tree = policies.Static(self.paths, "tuned", self.confidence, self.stop)
        elif self.kind == "best_first":
            tree = policies.BestFirst(self.num_nodes, self.depth, self.beam, self.branch)
        return HybridTree(tree, self.copied) if self.copied else tree

    def shape(self) -> "TunedTree":
        """Return the tree without its place and measurements, to compare it with others."""
        gains: dict[str, Any] = {"tokens_per_forward": 1.0, "predicted_speedup": 1.0}
        return replace(self, batch=1, context=1, interval=[], **gains)


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

        def nearest(load: StepLoad) -> int:
            return self.trees.index(self.best(load.batch, load.mean_context))

        return SwitchingPolicy("tuned", trees, nearest)

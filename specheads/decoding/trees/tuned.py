"""tuned.json: what `specheads tune` measured on a machine, and the trees it chose.

See docs/tune.md.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from specheads.core.drafter import Drafter
from specheads.core.errors import InputError
from specheads.core.features import Committed
from specheads.core.files import from_json
from specheads.core.machine import device_name, dtype_name
from specheads.core.tree import TokenTree
from specheads.decoding.cost import StepCost
from specheads.decoding.sampling import SamplingState
from specheads.decoding.trees import policies
from specheads.decoding.trees.early_stop import Estimate
from specheads.decoding.trees.hybrid import HybridTree, own_tree
from specheads.decoding.trees.policies import RequestProgress

Place = tuple[int, int]
"""A batch and a context length in tokens per row."""


def nearest(places: Sequence[Place], batch: int, context: int | float) -> int:
    """Return the index of the place with the nearest batch, then context, by ratio."""

    def far(place: int) -> tuple[float, float]:
        near, deep = (
            abs(math.log(max(one, 1) / max(other, 1)))
            for one, other in zip(places[place], (batch, context), strict=True)
        )
        return near, deep

    return min(range(len(places)), key=far)


class Adaptive(policies.TreePolicy):
    """Uses the tuned tree nearest to the batch and context of each step.

    Source: Chen et al. 2024, arXiv:2402.12374, for trees that depend on the machine; Together AI's
    adaptive Sequoia, 2024, for trees that depend on the context.

    Args:
        trees: Trees to choose from.
        places: The batch and context that each tree was chosen for.
    """

    def __init__(self, trees: Sequence[policies.TreePolicy], places: Sequence[Place]) -> None:
        self.name, self.trees, self.places = "tuned", trees, places
        self.num_nodes = max(one.num_nodes for one in trees)
        self.depth = max(one.depth for one in trees)
        self.num_guesses = max(one.num_guesses for one in trees)
        self.num_answers = max(one.num_answers for one in trees)
        self.copied = max(one.copied for one in trees)

    @property
    def own_depth(self) -> int:
        """Levels of the deepest of the head's own trees."""
        return max(one.own_depth for one in self.trees)

    def of_step(self, requests: Sequence[RequestProgress]) -> policies.TreePolicy:
        """Return the nearest tree."""
        return self._nearest([one.length for one in requests])

    def _nearest(self, lengths: Sequence[int]) -> policies.TreePolicy:
        context = sum(lengths) / len(lengths)
        return self.trees[nearest(self.places, len(lengths), context)]

    def grow(
        self, drafter: Drafter, committed: Committed, memory: Any, rows: SamplingState | None = None
    ) -> TokenTree:
        """Draft with the nearest tree, for steps without an engine."""
        assert rows is not None
        policy = self._nearest(rows.lengths.tolist())
        if not policy.depth:
            # a later step may draft again, and needs the tokens committed until then
            drafter.read(committed, memory)
        return policy.grow(drafter, committed, memory, rows)


SCHEMA = 1

FILE = "tuned.json"
"""Its name in a head's folder."""


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
        return cls(
            device=device.type,
            name=device_name(device),
            dtype=dtype_name(dtype),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CostError:
    """Relative errors of the fitted costs."""

    points: int
    median: float
    largest: float
    held_out: float
    """Largest error at points that were left out of the fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathRates:
    """How often the base's text follows each rank path, at one context length."""

    context: int
    places: int
    """Number of positions that were drafted from."""
    paths: dict[str, float]
    """Fraction of positions whose next tokens follow the path: "0.1" is the best guess and then the
    second best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchRates:
    """How often prompt lookup finds a match of one length, and is right then."""

    share: float
    """Fraction of steps whose longest match has this length."""
    rates: list[float]
    """Conditional acceptance rate of each copied token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceRates:
    """Measured acceptance rates."""

    per_depth: list[float]
    """Conditional acceptance rate of the best guess at each depth, in steps of a chain as deep as
    the head."""
    by_context: list[PathRates] = field(default_factory=list)
    matches: list[MatchRates] = field(default_factory=list)
    """Rates of prompt lookup after a match of one, two, ... tokens. Empty if not measured."""

    def alone(self) -> "AcceptanceRates":
        """Return the rates of the head alone, without copied text."""
        return replace(self, matches=[])


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedTree:
    """The best tree at a batch and a context; kind "none" does not draft.

    All fields except `copied` describe the head's own tree, without copied text.
    """

    batch: int
    context: int
    tokens_per_forward: float
    predicted_speedup: float
    interval: list[float] = field(default_factory=list)
    """95 % interval of the speed-up, as in `Tried`."""
    kind: str
    """none, static or best_first."""
    paths: list[list[int]] = field(default_factory=list)
    """Rank paths of a static tree or chain."""
    confidence: float = 0.0
    """As in `policies.Static`."""
    stop: Estimate | None = None
    """Estimate that is compared with the confidence; None is the head's probability."""
    num_nodes: int = 1
    depth: int = 0
    beam: int = 0
    branch: int = 0
    copied: int = 0
    """Nodes for copied text: see `HybridTree`."""
    rates: list[float] = field(default_factory=list)
    """Conditional acceptance rate of each level, drafted or not. Empty if not measured."""

    def policy(self) -> policies.TreePolicy:
        """Return the tree policy."""
        own = self._own()
        return HybridTree(own, self.copied) if self.copied else own

    def _own(self) -> policies.TreePolicy:
        match self.kind:
            case "none":
                return policies.NOTHING
            case "static":
                return policies.Static(self.paths, "tuned", self.confidence, self.stop)
            case "best_first":
                return policies.BestFirst(self.num_nodes, self.depth, self.beam, self.branch)
        raise InputError(
            f"a tuned tree's kind must be none, static or best_first, got {self.kind!r:.40}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A tree whose decoding was timed."""

    batch: int
    context: int
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
    fitted: float | None = None
    """Speed-up predicted by the fitted costs; None if the number of nodes varies."""
    chosen: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """Contents of tuned.json."""

    schema: int = SCHEMA
    machine: Machine
    base: str
    """Fingerprint of the base."""
    cost: StepCost
    cost_error: CostError
    acceptance: AcceptanceRates
    trees: list[TunedTree]
    tried: list[Tried] = field(default_factory=list)
    new_tokens: int = 0
    """New tokens per text in the measurements; longer texts repeat themselves more. 0 if not
    recorded."""

    @classmethod
    def read(cls, value: Mapping[str, Any], where: str, depth: int | None = None) -> "Tuned":
        """Return the contents of a file, for a head of this depth; None accepts any depth.

        Raises:
            ValueError: The file has another schema, is damaged, or is for another head.
        """
        remedy = f"delete {where}, and measure again with specheads tune"
        if value.get("schema") != SCHEMA:
            raise InputError(
                f"tuned.json must be of schema {SCHEMA}, got {value.get('schema')!r:.40}; {remedy}"
            )
        try:
            tuned = from_json(cls, dict(value), where)
            tuned._check(depth)
        except InputError as error:
            raise InputError(f"{error}; {remedy}") from error
        return tuned

    def _check(self, depth: int | None) -> None:
        for cost in (self.cost.verify, self.cost.draft):
            paid = [cost.fixed, cost.token, cost.context, cost.several, cost.free]
            _refuse_outside("a cost", paid, 0.0)
            _refuse_outside("a cost's power", [cost.power], 0.0, 1.0)
        _refuse_outside("a rate of acceptance", self.acceptance.per_depth, 0.0, 1.0)
        for one in self.acceptance.matches:
            _refuse_outside("a rate of copied text", [one.share, *one.rates], 0.0, 1.0)
            _refuse_outside("copied tokens", [len(one.rates)], 1.0)
        _refuse_outside("new tokens", [self.new_tokens], 0.0)
        if not self.trees:
            raise InputError("tuned.json needs a tree, got none")
        for tree in self.trees:
            _refuse_outside("a batch or context", [tree.batch, tree.context], 1.0)
            _refuse_outside("a tree's gain", [tree.tokens_per_forward], 1.0)
            _refuse_outside("a tree's gain", [tree.predicted_speedup], 0.0)
            _refuse_outside("copied tokens", [tree.copied], 0.0)
            _refuse_outside("a rate of acceptance", tree.rates, 0.0, 1.0)
            own = own_tree(tree.policy())
            if len(tree.rates) not in (0, own.depth):
                raise InputError(
                    f"tuned.json needs a rate for each of {own.depth} levels of a tree, or none, "
                    f"got {len(tree.rates)}"
                )
            if tree.copied and not own.depth:
                raise InputError(
                    f"tuned.json has {tree.copied} copied tokens with a tree that drafts nothing"
                )
            deepest = own.depth
            if depth is not None and deepest > depth:
                raise InputError(
                    f"tuned.json holds a tree of {deepest} levels and its head drafts {depth}"
                )

    def branching(self) -> list[TunedTree]:
        """Return the distinct branching trees of fixed size whose rates were measured."""
        found: list[TunedTree] = []
        for tree in self.trees:
            wide = tree.num_nodes > tree.depth + 1 and not tree.confidence
            one = replace(tree, copied=0)
            if wide and tree.rates and not any(_same_shape(one, other) for other in found):
                found.append(one)
        return found

    def fits(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether its times were measured on such a machine."""
        return self.machine == Machine.of(device, dtype)

    def best(self, batch: int, context: int | float) -> TunedTree:
        """Return the tree of the nearest batch and context, by ratio."""
        return self.trees[nearest(self._places(), batch, context)]

    def _places(self) -> list[Place]:
        return [(one.batch, one.context) for one in self.trees]

    def policy(self) -> policies.TreePolicy:
        """Return the tree policy, which follows batch and context in each step."""
        grown = [tree.policy() for tree in self.trees]
        first = self.trees[0]
        if all(_same_shape(tree, first) for tree in self.trees):
            return grown[0]
        if any(tree.copied for tree in self.trees):
            # prompt lookup must store the text of every step, also of those that copy nothing
            grown = [HybridTree(one, 0) if one.depth and not one.copied else one for one in grown]
        return Adaptive(grown, self._places())


def _same_shape(tree: TunedTree, other: TunedTree) -> bool:
    gains = ("tokens_per_forward", "predicted_speedup", "interval", "rates")
    measured = ("batch", "context", *gains)
    return replace(tree, **{name: getattr(other, name) for name in measured}) == other


def _refuse_outside(
    what: str, values: Sequence[int | float], low: float, high: float = math.inf
) -> None:
    if wrong := [one for one in values if not (math.isfinite(one) and low <= one <= high)]:
        most = "and finite" if high == math.inf else f"and at most {high:g}"
        raise InputError(f"{what} in tuned.json must be at least {low:g}, {most}, got {wrong[0]}")

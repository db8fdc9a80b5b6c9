"""What `specheads tune` measured of a head on a machine, and the tree it chose: tuned.json.

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
from specheads.core.machine import device_name, dtype_name
from specheads.core.records import from_json
from specheads.core.tree import TokenTree
from specheads.decoding.cost import StepCost
from specheads.decoding.sampling import SamplingState
from specheads.decoding.trees import policies
from specheads.decoding.trees.early_stop import Estimate
from specheads.decoding.trees.hybrid import HybridTree, own_tree
from specheads.decoding.trees.policies import RequestProgress

Place = tuple[int, int]
"""A batch and a context, in tokens of a row."""


def nearest(places: Sequence[Place], batch: int, context: int | float) -> int:
    """Return which place lies nearest to a batch, and then to a context, by their ratios."""

    def far(place: int) -> tuple[float, float]:
        near, deep = (
            abs(math.log(max(one, 1) / max(other, 1)))
            for one, other in zip(places[place], (batch, context), strict=True)
        )
        return near, deep

    return min(range(len(places)), key=far)


class Adaptive(policies.TreePolicy):
    """The tuned tree that is nearest to the batch and the context of each step.

    Source: Chen et al. 2024, arXiv:2402.12374, whose trees follow the machine; the context as well
    in Together AI's adaptive Sequoia, 2024.

    Args:
        trees: Those to choose from.
        places: The batch and context that each was chosen for.
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
        """Draft as is best now, for whoever steps without an engine."""
        assert rows is not None
        policy = self._nearest(rows.lengths.tolist())
        if not policy.depth:
            # a later step may draft again, from all that was committed until then
            drafter.read(committed, memory)
        return policy.grow(drafter, committed, memory, rows)


SCHEMA = 1

FILE = "tuned.json"
"""Its name in a head's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where times were measured."""

    device: str
    name: str
    """The GPU's, or the processor's."""
    dtype: str

    @classmethod
    def of(cls, device: torch.device, dtype: torch.dtype) -> "Machine":
        """Return what a base computes on, and in."""
        return cls(
            device=device.type,
            name=device_name(device),
            dtype=dtype_name(dtype),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CostError:
    """How far the fitted costs lie from times that were measured, as shares of these."""

    points: int
    median: float
    largest: float
    held_out: float
    """Largest of points that were left out of the fit they are held against."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathRates:
    """How often the base's own text follows each rank path, after prompts of some length."""

    context: int
    places: int
    """Places of the text that were drafted from."""
    paths: dict[str, float]
    """Share of the places whose next tokens are those of the path: "0.1" is the best guess and
    then the second best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchRates:
    """How often prompt lookup finds so many tokens before, and is right then."""

    share: float
    """Of the steps, those in which no more tokens than these stood in the text before."""
    rates: list[float]
    """Conditional rate of each copied token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceRates:
    """How often guesses are right."""

    per_depth: list[float]
    """Conditional rate of the best guess at each depth, every guess above it being right: in the
    steps of a chain as deep as the head."""
    by_context: list[PathRates] = field(default_factory=list)
    matches: list[MatchRates] = field(default_factory=list)
    """Of what prompt lookup copies after one, two, ... tokens that stood in the text before. Empty
    where it was not measured."""

    def alone(self) -> "AcceptanceRates":
        """Return that of the head's own guesses."""
        return replace(self, matches=[])


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedTree:
    """The best way to draft at a batch and a context; `kind` none is not to.

    What is said of the tree is said of the head's own, to which copied text is joined.
    """

    batch: int
    context: int
    tokens_per_forward: float
    predicted_speedup: float
    interval: list[float] = field(default_factory=list)
    """95 % interval of that over the texts that judged it, as of `Tried`."""
    kind: str
    """none, static or best_first."""
    paths: list[list[int]] = field(default_factory=list)
    """Rank paths of a static tree, a chain among them."""
    confidence: float = 0.0
    """As of `policies.Static`."""
    stop: Estimate | None = None
    """What the confidence is held against; None is the head's own probability."""
    num_nodes: int = 1
    depth: int = 0
    beam: int = 0
    branch: int = 0
    copied: int = 0
    """Nodes for text that prompt lookup copies: see `HybridTree`."""
    rates: list[float] = field(default_factory=list)
    """How often each level was right where the one above was, drafted there or not. Empty where it
    was not measured."""

    def policy(self) -> policies.TreePolicy:
        """Return how drafts grow."""
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
    """One way to draft that was timed for real."""

    batch: int
    context: int
    tree: str
    num_nodes: int
    depth: int
    tokens_per_forward: float
    """On text that the trees were not grown from."""
    step_overhead: float
    """Time of a step over that of the base alone."""
    speedup: float
    interval: list[float] = field(default_factory=list)
    """95 % interval of the speed-up, texts drawn anew. Empty where it was not measured."""
    fitted: float | None = None
    """Speed-up by the fitted costs; none where the number of nodes differs from step to step."""
    chosen: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """tuned.json."""

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
    """Tokens by which the texts went on that all this was measured on: longer ones repeat
    themselves more. 0 where it was not recorded."""

    @classmethod
    def read(cls, value: Mapping[str, Any], where: str, depth: int | None = None) -> "Tuned":
        """Return what a file holds, for a head that drafts so many levels; None: any number.

        Raises:
            ValueError: It is of another schema or head, or damaged.
        """
        remedy = f"delete {where}, and measure anew with specheads tune"
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
                    f"tuned.json has {tree.copied} copied tokens beside a tree that drafts nothing"
                )
            deepest = own.depth
            if depth is not None and deepest > depth:
                raise InputError(
                    f"tuned.json holds a tree of {deepest} levels and its head drafts {depth}"
                )

    def branching(self) -> list[TunedTree]:
        """Return the trees that are no chains and draft as much in every step, each once.

        None whose rates were not measured.
        """
        found: list[TunedTree] = []
        for tree in self.trees:
            wide = tree.num_nodes > tree.depth + 1 and not tree.confidence
            one = replace(tree, copied=0)
            if wide and tree.rates and not any(_same_shape(one, other) for other in found):
                found.append(one)
        return found

    def fits(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether its times were measured on a machine like this one."""
        return self.machine == Machine.of(device, dtype)

    def best(self, batch: int, context: int | float) -> TunedTree:
        """Return the tree that was chosen nearest to a batch and a context, by their ratios."""
        return self.trees[nearest(self._places(), batch, context)]

    def _places(self) -> list[Place]:
        return [(one.batch, one.context) for one in self.trees]

    def policy(self) -> policies.TreePolicy:
        """Return how drafts grow, in each step as batch and context have it then."""
        grown = [tree.policy() for tree in self.trees]
        first = self.trees[0]
        if all(_same_shape(tree, first) for tree in self.trees):
            return grown[0]
        if any(tree.copied for tree in self.trees):
            # what is copied in some steps stands in the text of all
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

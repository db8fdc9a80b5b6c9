"""The one place that knows every tree policy: settings, tuned.json and what `tune` tries.

See docs/tune.md.
"""

from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from specheads.config.shared import TreeSettings
from specheads.core.errors import InputError
from specheads.core.ranges import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    one_of,
)
from specheads.decoding.trees import policies
from specheads.decoding.trees.early_stop import AcceptanceEstimate
from specheads.decoding.trees.hybrid import HybridTree, remove_lookup


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
    confidence: float = 0.0
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

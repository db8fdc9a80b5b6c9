"""How to draft, if at all: whatever gives most tokens a second for the present batch.

See docs/serve.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from specheads.core.drafter import Drafter
from specheads.core.errors import InputError
from specheads.core.features import Committed
from specheads.core.tree import TokenTree
from specheads.decoding.acceptance import sampling
from specheads.decoding.cost import Cost
from specheads.decoding.loop import Step
from specheads.decoding.matches import Matches, agreed
from specheads.decoding.payoff import Acceptance, Draft, Known, best_draft, copying
from specheads.decoding.progress import Progress
from specheads.decoding.trees import policies
from specheads.decoding.trees.hybrid import HybridTree, own_tree
from specheads.decoding.trees.tuned import Tuned

SIZES = 2, 4, 7
"""Tokens that may be copied, besides as many as the tree copies."""


class Goodput(policies.TreePolicy):
    """Drafts as deep as pays for the batch of each step, and not at all where nothing pays.

    A chain or a static tree is cut at that depth, and other trees are taken whole; where there is
    copied text in it, each is drafted with some of that and without, and copied text is drafted
    alone. It is known before a step which requests have anything to copy. What a request was
    accepted so far moves the averages that it is judged by; its text is the base's own whatever is
    chosen.

    Args:
        cost: What a step takes on this machine.
        rates: Measured conditional acceptance of each depth, where every request begins.
        tree: The deepest to draft; None is a chain as deep as there are rates.
        copied: The same of copied text, a rate for each of its tokens: after one token that stood
            in the text before, after two, and so on, as long as prompt lookup looks for.
        others: More trees to choose from, of the drafter's own guesses and any kind, each with the
            conditional acceptance of its levels.
    """

    def __init__(
        self,
        cost: Cost,
        rates: Sequence[float],
        tree: policies.Static | HybridTree | None = None,
        copied: Sequence[Sequence[float]] = (),
        others: Sequence[tuple[policies.TreePolicy, Sequence[float]]] = (),
    ) -> None:
        tree = policies.chain(len(rates)) if tree is None else tree
        own, size = own_tree(tree), tree.size if isinstance(tree, HybridTree) else 0
        if not isinstance(own, policies.Static):
            raise InputError(f"goodput cuts chains and static trees, got {own.name}")
        for one, known in ((own, rates), *others):
            if len(known) < one.depth:
                raise InputError(
                    f"goodput needs a rate for each depth: the tree has {one.depth} levels, got "
                    f"{len(known)} rates; measure more, or choose a shallower tree"
                )
        if size and min(map(len, copied), default=0) < size:
            raise InputError(
                f"goodput needs {size} rates to copy {size} tokens, got "
                f"{[*map(len, copied)]}; run specheads tune, or copy fewer"
            )
        self.cost, self.tree = cost, tree
        self.rates = [tuple(rates[: own.depth]), *(tuple(known) for _, known in others)]
        self.copied_rates = [tuple(known[:size]) for known in copied] if size else []
        self.trees, self.drafts = _ways(own, tree, [one for one, _ in others])
        self.name = "goodput"
        self.num_nodes = max(one.num_nodes for one in self.trees)
        self.depth = max(one.depth for one in self.trees)
        self.num_guesses = max(one.num_guesses for one in self.trees)
        self.num_answers = max(one.num_answers for one in self.trees)
        self.copied = max(one.copied for one in self.trees)
        self._told: WeakKeyDictionary[Progress, _Told] = WeakKeyDictionary()

    @classmethod
    def of(cls, tuned: Tuned) -> "Goodput":
        """Return what chooses by the measured times and rates of a head.

        It drafts chains as deep as was measured and the tuned trees, and copies as many tokens.
        """
        rates, copied = tuned.acceptance.per_depth, [one.rates for one in tuned.acceptance.matches]
        tree = policies.chain(len(rates))
        if copied:
            tree = HybridTree(tree, min(map(len, copied)))
        others = [(own_tree(one.policy()), one.rates) for one in tuned.branching()]
        return cls(tuned.cost, rates, tree, copied, others)

    @property
    def own_depth(self) -> int:
        """Levels of the deepest tree."""
        return max(one.own_depth for one in self.trees)

    def of_step(self, requests: Sequence[Progress]) -> policies.TreePolicy:
        """Return the tree that gives these requests most tokens a second."""
        known = [(one, self._of(one)) for one in requests]
        place = best_draft(self.cost, self.drafts, known)
        for _, one in known:
            one.last = self.drafts[place]
        return self.trees[place]

    def _of(self, request: Progress) -> Known:
        told = self._told.get(request)
        if told is None:
            known = Known([*map(Acceptance, self.rates)], [*map(Acceptance, self.copied_rates)])
            matches = Matches(request.all_tokens) if self.copied_rates else None
            told = self._told[request] = _Told(known, matches, len(request.steps))
        told.take(request.steps, self.copied)
        return told.known

    def grow(
        self, drafter: Drafter, committed: Committed, memory: Any, rows: sampling.Rows | None = None
    ) -> TokenTree:
        """Draft the whole tree, for whoever steps without an engine."""
        return self.tree.grow(drafter, committed, memory, rows)


@dataclass(slots=True)
class _Told:
    """What a request has told so far."""

    known: Known
    matches: Matches | None
    """Where text is copied."""
    num_steps: int
    """Steps that were taken in."""
    copied: list[int] = field(default_factory=list)
    """What prompt lookup copies in the coming step, if it is asked."""

    def take(self, steps: Sequence[Step], size: int) -> None:
        """Take in what happened since, and look for what there is to copy, at most so much."""
        for step in steps[self.num_steps :]:
            # what was not copied is held against the text as well
            right = agreed(self.copied, step.tokens)
            refused = right < min(len(self.copied), len(step.tokens))
            self.known.note(seen(step, self.known.last), (right, refused))
            if self.matches is not None:
                self.matches.extend(step.tokens)
        self.num_steps = len(steps)
        if self.matches is not None:
            matched, self.copied = self.matches.find(size)
            self.known.look(matched)


def _ways(
    own: policies.Static, tree: policies.TreePolicy, others: Sequence[policies.TreePolicy]
) -> tuple[list[policies.TreePolicy], list[Draft]]:
    """Return the trees to choose from: cut at every depth, others, and each with copied text."""
    trees: list[policies.TreePolicy] = [cut(own, depth) for depth in range(own.depth + 1)]
    drafts = [Draft(one.depth, one.num_nodes) for one in trees]
    trees += others
    drafts += [
        Draft(one.depth, one.num_nodes, tree=place) for place, one in enumerate(others, start=1)
    ]
    if isinstance(tree, HybridTree) and tree.size:
        sizes = [*(one for one in SIZES if one < tree.size), tree.size]
        # what is copied in some steps stands in the text of all
        joined = [HybridTree(one, size, trim=tree.trim) for size in (0, *sizes) for one in trees]
        return [*joined], copying(drafts, sizes)
    return trees, drafts


def seen(step: Step, draft: Draft) -> tuple[int, bool]:
    """Return what a step tells of the head's own drafts: see `Known.note`.

    Where nothing stands below what was accepted the next level is refused as well: rates are those
    of levels, drafted or not.

    Args:
        step: Of a tree that is the head's own, or has copied text joined to it.
        draft: What was drafted in it.
    """
    size = len(step.drafted) - step.num_copied
    levels = sum(node < size for node in step.path) - 1
    return levels, levels < draft.depth


def cut(tree: policies.Static, depth: int) -> policies.Static:
    """Return a static tree without the paths that are longer than this."""
    paths = [path for path in tree.paths if len(path) <= depth]
    return policies.Static(paths, tree.name, tree.confidence, tree.estimate)

"""How to draft, if at all: whatever gives most tokens a second for the present batch.

See docs/serve.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from operator import mul
from typing import Any
from weakref import WeakKeyDictionary

from specheads.core.drafter import Drafter
from specheads.core.errors import InputError
from specheads.core.features import Committed
from specheads.core.tree import TokenTree
from specheads.decoding import sampling
from specheads.decoding.cost import Cost
from specheads.decoding.loop import DecodingStep
from specheads.decoding.prompt_lookup import LookupIndex, common_prefix_length
from specheads.decoding.trees import policies
from specheads.decoding.trees.hybrid import HybridTree, own_tree
from specheads.decoding.trees.policies import RequestLength, RequestProgress
from specheads.decoding.trees.tuned import Tuned

WEIGHT, RETURN = 0.05, 0.01
"""Weight of a new observation in a moving average, and of the seed where nothing was observed: what
was given up after a bad stretch is tried again."""


@dataclass(slots=True)
class MovingRates:
    """A request's conditional acceptance of each depth: moving averages, from measured rates on."""

    seed: Sequence[float]
    rates: list[float] = field(init=False)
    """Share of drafts accepted at each depth among those accepted at every earlier one."""
    tokens: list[float] = field(init=False)
    """Expected tokens of a step by drafted depth, zero first, the base's own included."""

    def __post_init__(self) -> None:
        if not all(0 <= rate <= 1 for rate in self.seed):
            raise InputError(f"acceptance rates must lie in [0, 1], got {list(self.seed)}")
        self.rates = list(self.seed)
        self.tokens = expected_tokens(self.rates)

    def note(self, accepted: int, *, refused: bool) -> None:
        """Take in a step: drafts accepted, and whether the one after them was refused."""
        observed = accepted + refused
        for depth, rate in enumerate(self.rates):
            if depth < observed:
                self.rates[depth] += WEIGHT * ((depth < accepted) - rate)
            else:
                self.rates[depth] += RETURN * (self.seed[depth] - rate)
        self.tokens = expected_tokens(self.rates)


def expected_tokens(rates: Sequence[float]) -> list[float]:
    """Return tokens of a step by drafted depth, zero first: 1, 1 + a, 1 + a + a b, ..."""
    return list(accumulate(accumulate(rates, mul), initial=1.0))


@dataclass(frozen=True, slots=True)
class Draft:
    """A way to draft: what it costs, and how far it may be right."""

    depth: int
    """Levels that the drafter drafts."""
    nodes: int
    """Nodes of its own tree, root included; one is no draft."""
    copied: int = 0
    """Nodes for copied text beside them, and so its tokens: those that stand in the own tree too
    leave room for more, which is not counted."""
    tree: int = 0
    """Which of `RequestRates.own` says how often it is right: all cuts of one tree share theirs."""

    def seconds(self, cost: Cost, batch: int, context: int | float) -> float:
        """Return what a step takes in which a row has something to copy, if that is drafted.

        Args:
            cost: What a step takes without copied text.
            batch: Rows.
            context: Committed tokens of a row, on average.
        """
        alone = cost.seconds(batch, context, self.nodes, self.depth)
        if not self.copied:
            return alone
        # copied nodes are verified and not drafted: they cost the base's forward alone
        more = cost.seconds(batch, context, self.nodes + self.copied, 0)
        return alone + more - cost.seconds(batch, context, self.nodes, 0)


def chains(depth: int, copied: Sequence[int] = ()) -> list[Draft]:
    """Return chains of every depth, zero first, and then each of them beside copied text."""
    return copying([Draft(one, one + 1) for one in range(depth + 1)], copied)


def copying(drafts: Sequence[Draft], copied: Sequence[int]) -> list[Draft]:
    """Return these, and then each of them with so many nodes for copied text."""
    return [*drafts, *(replace(one, copied=size) for size in copied for one in drafts)]


@dataclass(slots=True)
class RequestRates:
    """What is known of a request: how often its own drafts are right, and the text it copies.

    Both are taken for independent: at each depth one of them is right with 1 - (1 - a)(1 - b).
    """

    own: Sequence[MovingRates]
    """Of each tree; only that of the last step's draft is seen, and the others return."""
    copied: Sequence[MovingRates] = ()
    """Of what is copied after one, two, ... tokens that stood in the text before."""
    last: Draft = Draft(0, 1)
    """What its last step drafted."""
    matched: int = 0
    """Tokens before the coming step that stood in the text before; without any nothing is copied.
    """
    both: list[list[float]] = field(init=False, default_factory=list)
    """Expected tokens that each tree and copied text have right both, by the depth of the shorter.
    """

    def look(self, matched: int) -> None:
        """Take in what the coming step could copy: see `matched`."""
        self.matched = min(matched, len(self.copied))
        if self.matched:
            copied = _chances(self.copied[self.matched - 1].tokens)
            self.both = [
                list(accumulate(map(mul, _chances(one.tokens), copied), initial=0.0))
                for one in self.own
            ]

    def note(self, own: tuple[int, bool], copied: tuple[int, bool] = (0, False)) -> None:
        """Take in a step: levels that were right of each, and whether the one after was wrong.

        What could be copied is told by the text, whether it was copied or not.
        """
        for tree, known in enumerate(self.own):
            accepted, refused = own if tree == self.last.tree else (0, False)
            known.note(accepted, refused=refused)
        if self.matched:
            self.copied[self.matched - 1].note(copied[0], refused=copied[1])


def _chances(tokens: Sequence[float]) -> list[float]:
    """Return the chance of each depth to be right: what it adds to the expected tokens."""
    return [more - less for less, more in pairwise(tokens)]


def step_tokens(
    drafts: Sequence[Draft], rows: Sequence[tuple[RequestLength, RequestRates]]
) -> list[float]:
    """Return the expected tokens of a step of these rows, by draft.

    Nobody yields more tokens than there is room for.
    """
    trees = range(len(rows[0][1].own))
    alone = [_summed([(known.own[tree].tokens, row) for row, known in rows]) for tree in trees]
    # both give what either gives but for what both do
    copying = [(row, known) for row, known in rows if known.matched]
    if not copying:
        return [alone[draft.tree][draft.depth] for draft in drafts]
    copied = _summed([(known.copied[known.matched - 1].tokens, row) for row, known in copying])
    both = [_summed([(known.both[tree], row) for row, known in copying]) for tree in trees]
    return [
        alone[draft.tree][draft.depth]
        + (copied[draft.copied] - copied[0])
        - both[draft.tree][min(draft.depth, draft.copied)]
        for draft in drafts
    ]


def _summed(curves: Sequence[tuple[list[float], RequestLength]]) -> list[float]:
    """Return the sum of what rows gain by drafted depth, each as far as it has room."""
    reached = [_within(one, row.room) for one, row in curves]
    return [*map(sum, zip(*reached, strict=False))]


def _within(curve: list[float], room: int) -> list[float]:
    if room >= len(curve):
        return curve
    most = max(room, 1)
    return curve[:most] + [curve[most - 1]] * (len(curve) - most)


def best_draft(
    cost: Cost, drafts: Sequence[Draft], rows: Sequence[tuple[RequestLength, RequestRates]]
) -> int:
    """Return the place of the draft with the highest goodput, tokens a second; of equals the first.

    Copied text is not drafted where no row has any.

    Args:
        cost: What a step takes.
        drafts: Those to choose from, the smaller first, and those with copied text last.
        rows: At least one.
    """
    batch = len(rows)
    context = cost.context([row.length for row, _ in rows])
    copies = any(known.matched for _, known in rows)
    drafts = [draft for draft in drafts if copies or not draft.copied]
    tokens = step_tokens(drafts, rows)
    goodput = [
        expected / draft.seconds(cost, batch, context)
        for expected, draft in zip(tokens, drafts, strict=True)
    ]
    # such that differ by rounding alone are equal
    enough = max(goodput) * (1 - 1e-9)
    return next(place for place, one in enumerate(goodput) if one >= enough)


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
        self._told: WeakKeyDictionary[RequestProgress, _Told] = WeakKeyDictionary()

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

    def of_step(self, requests: Sequence[RequestProgress]) -> policies.TreePolicy:
        """Return the tree that gives these requests most tokens a second."""
        known = [(one, self._of(one)) for one in requests]
        place = best_draft(self.cost, self.drafts, known)
        for _, one in known:
            one.last = self.drafts[place]
        return self.trees[place]

    def _of(self, request: RequestProgress) -> RequestRates:
        told = self._told.get(request)
        if told is None:
            known = RequestRates(
                [*map(MovingRates, self.rates)], [*map(MovingRates, self.copied_rates)]
            )
            matches = LookupIndex(request.all_tokens) if self.copied_rates else None
            told = self._told[request] = _Told(known, matches, len(request.steps))
        told.take(request.steps, self.copied)
        return told.known

    def grow(
        self,
        drafter: Drafter,
        committed: Committed,
        memory: Any,
        rows: sampling.SamplingState | None = None,
    ) -> TokenTree:
        """Draft the whole tree, for whoever steps without an engine."""
        return self.tree.grow(drafter, committed, memory, rows)


@dataclass(slots=True)
class _Told:
    """What a request has told so far."""

    known: RequestRates
    matches: LookupIndex | None
    """Where text is copied."""
    num_steps: int
    """Steps that were taken in."""
    copied: list[int] = field(default_factory=list)
    """What prompt lookup copies in the coming step, if it is asked."""

    def take(self, steps: Sequence[DecodingStep], size: int) -> None:
        """Take in what happened since, and look for what there is to copy, at most so much."""
        for step in steps[self.num_steps :]:
            # what was not copied is held against the text as well
            right = common_prefix_length(self.copied, step.tokens)
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


def seen(step: DecodingStep, draft: Draft) -> tuple[int, bool]:
    """Return what a step tells of the head's own drafts: see `RequestRates.note`.

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

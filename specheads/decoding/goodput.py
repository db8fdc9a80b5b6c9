"""Choose in each step the draft with the most tokens per second, or none.

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
"""Weight of a new observation in a moving average, and of the seed if nothing was observed. A depth
that stopped paying is thus tried again later."""


@dataclass(slots=True)
class MovingRates:
    """Moving averages of a request's conditional acceptance rates, starting at `seed`."""

    seed: Sequence[float]
    rates: list[float] = field(init=False)
    """Share of drafts accepted at each depth among those accepted at every earlier one."""
    tokens: list[float] = field(init=False)
    """Expected tokens per step by drafted depth, starting at depth zero, bonus token included."""

    def __post_init__(self) -> None:
        if not all(0 <= rate <= 1 for rate in self.seed):
            raise InputError(f"acceptance rates must be in [0, 1], got {list(self.seed)}")
        self.rates = list(self.seed)
        self.tokens = expected_tokens(self.rates)

    def note(self, accepted: int, *, refused: bool) -> None:
        """Update the rates with a step's accepted tokens and whether the next one was refused."""
        observed = accepted + refused
        for depth, rate in enumerate(self.rates):
            if depth < observed:
                self.rates[depth] += WEIGHT * ((depth < accepted) - rate)
            else:
                self.rates[depth] += RETURN * (self.seed[depth] - rate)
        self.tokens = expected_tokens(self.rates)


def expected_tokens(rates: Sequence[float]) -> list[float]:
    """Return the expected tokens per step by drafted depth: 1, 1 + a, 1 + a + a b, ..."""
    return list(accumulate(accumulate(rates, mul), initial=1.0))


@dataclass(frozen=True, slots=True)
class Draft:
    """The size of a draft, which determines its cost and its expected tokens."""

    depth: int
    """Levels that the drafter drafts."""
    nodes: int
    """Nodes of the drafter's tree, root included; one is no draft."""
    copied: int = 0
    """Nodes for copied text next to them. Copied tokens that the drafter's tree contains too leave
    room for more; that is not counted."""
    tree: int = 0
    """Index into `RequestRates.own`; all cuts of one tree share their rates."""

    def seconds(self, cost: Cost, batch: int, context: int | float) -> float:
        """Return the seconds of a step in which a row has text to copy.

        Args:
            cost: Cost of a step without copied text.
            batch: Number of rows.
            context: Mean number of committed tokens per row.
        """
        alone = cost.seconds(batch, context, self.nodes, self.depth)
        if not self.copied:
            return alone
        # copied nodes are verified but not drafted: they only make the base's forward larger
        more = cost.seconds(batch, context, self.nodes + self.copied, 0)
        return alone + more - cost.seconds(batch, context, self.nodes, 0)


def chains(depth: int, copied: Sequence[int] = ()) -> list[Draft]:
    """Return chains of every depth from zero on, first without and then with copied text."""
    return copying([Draft(one, one + 1) for one in range(depth + 1)], copied)


def copying(drafts: Sequence[Draft], copied: Sequence[int]) -> list[Draft]:
    """Return the drafts, followed by each of them with each number of copied tokens."""
    return [*drafts, *(replace(one, copied=size) for size in copied for one in drafts)]


@dataclass(slots=True)
class RequestRates:
    """Acceptance rates of one request: of drafted and of copied tokens.

    Both are assumed to be independent: at each depth one of them is right with probability
    1 - (1 - a)(1 - b).
    """

    own: Sequence[MovingRates]
    """Rates of each tree; a step updates those of its tree, and the others return to their seed."""
    copied: Sequence[MovingRates] = ()
    """Rates of copied tokens after a match of one, two, ... tokens."""
    last: Draft = Draft(0, 1)
    """The draft of the last step."""
    matched: int = 0
    """Length of the match before the next step; zero copies nothing."""
    both: list[list[float]] = field(init=False, default_factory=list)
    """Expected tokens that each tree and the copied text both get right, by common depth."""

    def look(self, matched: int) -> None:
        """Set the length of the match before the next step."""
        self.matched = min(matched, len(self.copied))
        if self.matched:
            copied = _chances(self.copied[self.matched - 1].tokens)
            self.both = [
                list(accumulate(map(mul, _chances(one.tokens), copied), initial=0.0))
                for one in self.own
            ]

    def note(self, own: tuple[int, bool], copied: tuple[int, bool] = (0, False)) -> None:
        """Update the rates with the accepted levels of a step and whether the next was refused.

        Copied tokens are compared with the decoded text, whether they were drafted or not.
        """
        for tree, known in enumerate(self.own):
            accepted, refused = own if tree == self.last.tree else (0, False)
            known.note(accepted, refused=refused)
        if self.matched:
            self.copied[self.matched - 1].note(copied[0], refused=copied[1])


def _chances(tokens: Sequence[float]) -> list[float]:
    """Return the probability that each depth is accepted."""
    return [more - less for less, more in pairwise(tokens)]


def step_tokens(
    drafts: Sequence[Draft], rows: Sequence[tuple[RequestLength, RequestRates]]
) -> list[float]:
    """Return the expected tokens of a step of these rows, for each draft.

    A row yields at most as many tokens as its limit allows.
    """
    trees = range(len(rows[0][1].own))
    alone = [_summed([(known.own[tree].tokens, row) for row, known in rows]) for tree in trees]
    # expected tokens of either = of one + of the other - of both
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
    """Return the sum over rows of expected tokens by depth, each row limited by its room."""
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
    """Return the index of the draft with the highest goodput in tokens per second.

    The first of equals is chosen. Copied text is not drafted if no row has a match.

    Args:
        cost: Cost of a step.
        drafts: Candidates: the smaller first, those with copied text last.
        rows: At least one request and its rates.
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
    # values that differ by rounding only are equal
    enough = max(goodput) * (1 - 1e-9)
    return next(place for place, one in enumerate(goodput) if one >= enough)


SIZES = 2, 4, 7
"""Numbers of copied tokens to choose from, in addition to the tree's own."""


class Goodput(policies.TreePolicy):
    """Chooses the draft with the highest goodput for the batch of each step, or no draft.

    A chain or a static tree can be cut at any depth; other trees are used as they are. If the tree
    has copied text, the candidates are every tree with and without copied text, and copied text
    alone. Which requests have a match is known before the step. The rates of a request are moving
    averages over its own steps. The choice never changes the decoded text.

    Args:
        cost: Cost of a step on this machine.
        rates: Measured conditional acceptance rate of each depth, the start of every request.
        tree: The deepest tree to draft; None is a chain with one level per rate.
        copied: Measured rates of copied text, one per token: after a match of one token, of two,
            and so on, up to the longest match that prompt lookup looks for.
        others: More trees of drafted tokens to choose from, each with the conditional acceptance
            rates of its levels.
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
        self.trees, self.drafts = _candidates(own, tree, [one for one, _ in others])
        self.name = "goodput"
        self.num_nodes = max(one.num_nodes for one in self.trees)
        self.depth = max(one.depth for one in self.trees)
        self.num_guesses = max(one.num_guesses for one in self.trees)
        self.num_answers = max(one.num_answers for one in self.trees)
        self.copied = max(one.copied for one in self.trees)
        self._observed: WeakKeyDictionary[RequestProgress, _Observed] = WeakKeyDictionary()

    @classmethod
    def of(cls, tuned: Tuned) -> "Goodput":
        """Return the policy for the measured times and rates of a head.

        Its candidates are chains of every measured depth and the tuned trees, with copied text if
        that was measured.
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
        """Return the tree with the most tokens per second for these requests."""
        known = [(one, self._rates(one)) for one in requests]
        place = best_draft(self.cost, self.drafts, known)
        for _, one in known:
            one.last = self.drafts[place]
        return self.trees[place]

    def _rates(self, request: RequestProgress) -> RequestRates:
        observed = self._observed.get(request)
        if observed is None:
            known = RequestRates(
                [*map(MovingRates, self.rates)], [*map(MovingRates, self.copied_rates)]
            )
            matches = LookupIndex(request.all_tokens) if self.copied_rates else None
            observed = self._observed[request] = _Observed(known, matches, len(request.steps))
        observed.take(request.steps, self.copied)
        return observed.known

    def grow(
        self,
        drafter: Drafter,
        committed: Committed,
        memory: Any,
        rows: sampling.SamplingState | None = None,
    ) -> TokenTree:
        """Draft the whole tree, for steps without an engine."""
        return self.tree.grow(drafter, committed, memory, rows)


@dataclass(slots=True)
class _Observed:
    """Observations of one request."""

    known: RequestRates
    matches: LookupIndex | None
    """None if no text is copied."""
    num_steps: int
    """Number of steps already observed."""
    copied: list[int] = field(default_factory=list)
    """Tokens that prompt lookup would copy in the next step."""

    def take(self, steps: Sequence[DecodingStep], size: int) -> None:
        """Observe the new steps, and look for at most `size` tokens to copy."""
        for step in steps[self.num_steps :]:
            # copied tokens that were not drafted are compared with the text too
            right = common_prefix_length(self.copied, step.tokens)
            refused = right < min(len(self.copied), len(step.tokens))
            self.known.note(seen(step, self.known.last), (right, refused))
            if self.matches is not None:
                self.matches.extend(step.tokens)
        self.num_steps = len(steps)
        if self.matches is not None:
            matched, self.copied = self.matches.find(size)
            self.known.look(matched)


def _candidates(
    own: policies.Static, tree: policies.TreePolicy, others: Sequence[policies.TreePolicy]
) -> tuple[list[policies.TreePolicy], list[Draft]]:
    """Return the candidates: the tree cut at every depth, others, and each with copied text."""
    trees: list[policies.TreePolicy] = [cut(own, depth) for depth in range(own.depth + 1)]
    drafts = [Draft(one.depth, one.num_nodes) for one in trees]
    trees += others
    drafts += [
        Draft(one.depth, one.num_nodes, tree=place) for place, one in enumerate(others, start=1)
    ]
    if isinstance(tree, HybridTree) and tree.size:
        sizes = [*(one for one in SIZES if one < tree.size), tree.size]
        # prompt lookup must store the text of every step, also of those that copy nothing
        joined = [HybridTree(one, size, trim=tree.trim) for size in (0, *sizes) for one in trees]
        return [*joined], copying(drafts, sizes)
    return trees, drafts


def seen(step: DecodingStep, draft: Draft) -> tuple[int, bool]:
    """Return how many drafted levels a step accepted and whether the next one was refused.

    A level without a node below the accepted ones counts as refused: the rates are those of levels,
    drafted or not.

    Args:
        step: A step of the head's own tree, with or without copied text joined to it.
        draft: The draft of that step.
    """
    size = len(step.drafted) - step.num_copied
    levels = sum(node < size for node in step.path) - 1
    return levels, levels < draft.depth


def cut(tree: policies.Static, depth: int) -> policies.Static:
    """Return a static tree without the paths that are longer than `depth`."""
    paths = [path for path in tree.paths if len(path) <= depth]
    return policies.Static(paths, tree.name, tree.confidence, tree.estimate)

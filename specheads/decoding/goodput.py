"""Choose in each step the draft with the most tokens per second, or none.

Source: Liu et al. 2024, arXiv:2406.14066 (SmartSpec). See docs/serve.md.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import mul
from weakref import WeakKeyDictionary

from specheads.decoding.cost import StepCost
from specheads.decoding.loop import DecodingStep
from specheads.decoding.prompt_lookup import LookupIndex, common_prefix_length
from specheads.decoding.trees import policies
from specheads.decoding.trees.hybrid import HybridTree
from specheads.decoding.trees.policies import RequestLength, RequestProgress
from specheads.decoding.trees.tuned import Choice, Tuned

WEIGHT, RETURN = 0.05, 0.01
"""Weight of a new observation in a moving average, and of the seed if nothing was observed. A depth
that stopped paying is thus tried again later."""

SIZES = 2, 4, 7
"""Numbers of copied tokens to choose from, in addition to all that have a rate."""


@dataclass(slots=True)
class MovingRates:
    """Moving averages of a request's conditional acceptance rates, starting at `seed`."""

    seed: Sequence[float]
    rates: list[float] = field(init=False)
    """Share of drafts accepted at each depth among those accepted at every earlier one."""
    tokens: list[float] = field(init=False)
    """Expected tokens per step by drafted depth: see `expected_tokens`."""

    def __post_init__(self) -> None:
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


def expected_tokens(rates: Iterable[float]) -> list[float]:
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
    """Index into `RequestRates.own`; chains of all depths share their rates."""


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
    index: LookupIndex | None = None
    """The request's text, if text is copied."""
    num_steps: int = 0
    """Number of steps observed."""
    last: Draft = Draft(0, 1)
    """The draft of the last step."""
    match: MovingRates | None = None
    """Rates of the tokens to copy in the next step; None copies nothing."""
    to_copy: list[int] = field(default_factory=list)
    """Tokens that prompt lookup would copy in the next step."""

    def observe(self, steps: Sequence[DecodingStep], size: int) -> None:
        """Observe the new steps, and look for at most `size` tokens to copy."""
        for step in steps[self.num_steps :]:
            levels = drafted_levels(step)
            self.note(levels, refused=levels < self.last.depth)
            # copied tokens that were not drafted are compared with the text too
            if self.match:
                right = common_prefix_length(self.to_copy, step.tokens)
                refused = right < min(len(self.to_copy), len(step.tokens))
                self.match.note(right, refused=refused)
            if self.index is not None:
                self.index.extend(step.tokens)
        self.num_steps = len(steps)
        if self.index is not None:
            matched, self.to_copy = self.index.find(size)
            longest = min(matched, len(self.copied))
            self.match = self.copied[longest - 1] if longest else None

    def note(self, accepted: int, *, refused: bool) -> None:
        """Update the rates of trees with a step's accepted levels and whether it refused one."""
        for tree, rates in enumerate(self.own):
            if tree == self.last.tree:
                rates.note(accepted, refused=refused)
            else:
                rates.note(0, refused=False)


Row = tuple[RequestLength, RequestRates]


def step_tokens(drafts: Sequence[Draft], rows: Sequence[Row]) -> list[float]:
    """Return the expected tokens of a step of these rows, for each draft.

    A row yields at most as many tokens as its limit allows.
    """
    trees = range(len(rows[0][1].own))
    own = [_summed([(row, rates.own[tree].tokens) for row, rates in rows]) for tree in trees]
    matches = [(row, rates, rates.match) for row, rates in rows if rates.match]
    if not matches:
        return [own[draft.tree][draft.depth] for draft in drafts]
    # expected tokens of either = of one + of the other - of both
    copied = _summed([(row, match.tokens) for row, _, match in matches])
    both = [
        _summed(
            [
                (row, expected_tokens(map(mul, rates.own[tree].rates, match.rates)))
                for row, rates, match in matches
            ]
        )
        for tree in trees
    ]
    return [
        own[draft.tree][draft.depth]
        + copied[draft.copied]
        - both[draft.tree][min(draft.depth, draft.copied)]
        for draft in drafts
    ]


def _summed(rows: Sequence[tuple[RequestLength, list[float]]]) -> list[float]:
    """Return the expected tokens of all rows by depth, each row limited by its room."""
    limited = [(tokens, max(row.room, 1) - 1) for row, tokens in rows]
    depths = range(len(rows[0][1]))
    return [sum(tokens[min(depth, last)] for tokens, last in limited) for depth in depths]


def best_draft(cost: StepCost, drafts: Sequence[Draft], rows: Sequence[Row]) -> int:
    """Return the index of the draft with the highest goodput in tokens per second.

    The first of equals is chosen. Copied text is not drafted if no row has a match.

    Args:
        cost: Cost of a step.
        drafts: Candidates: the smaller first, those with copied text last.
        rows: At least one request and its rates.
    """
    context = max(row.length for row, _ in rows)
    if not any(rates.match for _, rates in rows):
        drafts = [draft for draft in drafts if not draft.copied]
    goodput = [
        tokens / cost.seconds(len(rows), context, draft.nodes, draft.depth, draft.copied)
        for tokens, draft in zip(step_tokens(drafts, rows), drafts, strict=True)
    ]
    # values that differ by rounding only are equal
    enough = max(goodput) * (1 - 1e-9)
    return next(place for place, one in enumerate(goodput) if one >= enough)


class Goodput(Choice):
    """Chooses the draft with the highest goodput for the batch of each step, or no draft.

    The candidates are chains of every depth from zero on and other trees, each without and with
    copied text. Which requests have a match is known before the step. The rates of a request are
    moving averages over its own steps. The choice never changes the decoded text.

    Args:
        cost: Cost of a step on this machine.
        rates: Measured conditional acceptance rate of each depth, the start of every request.
        copied: Measured rates of copied text, one per token: after a match of one token, of two,
            and so on, up to the longest match that prompt lookup looks for.
        others: More trees of drafted tokens to choose from, each with the conditional acceptance
            rates of its levels.
    """

    def __init__(
        self,
        cost: StepCost,
        rates: Sequence[float],
        copied: Sequence[Sequence[float]] = (),
        others: Sequence[tuple[policies.TreePolicy, Sequence[float]]] = (),
    ) -> None:
        self.cost = cost
        self.rates = [rates, *(known for _, known in others)]
        most = min(map(len, copied), default=0)
        self.copied_rates = [known[:most] for known in copied]
        trees = [*map(policies.chain, range(len(rates) + 1)), *(tree for tree, _ in others)]
        # chains share the first rates
        places = [0] * (len(rates) + 1) + [*range(1, len(others) + 1)]
        pairs = zip(trees, places, strict=True)
        drafts = [Draft(tree.depth, tree.num_nodes, tree=place) for tree, place in pairs]
        sizes = [0, *(size for size in SIZES if size < most), most] if most else [0]
        self.drafts = [replace(one, copied=size) for size in sizes for one in drafts]
        if most:
            # prompt lookup must store the text of every step, also of those that copy nothing
            trees = [HybridTree(one, size) for size in sizes for one in trees]
        super().__init__("goodput", trees)
        self._rates: WeakKeyDictionary[RequestProgress, RequestRates] = WeakKeyDictionary()

    @classmethod
    def of(cls, tuned: Tuned) -> "Goodput":
        """Return the policy for the measured times and rates of a head.

        Its candidates are chains of every measured depth and the tuned branching trees of fixed
        size, with copied text if that was measured.
        """
        others, shapes = [], []
        for tree in tuned.trees:
            shape = replace(tree, copied=0).shape()
            branches = tree.num_nodes > tree.depth + 1 and not tree.confidence
            if branches and len(tree.rates) == tree.depth and shape not in shapes:
                shapes.append(shape)
                others.append((tree.own_policy(), tree.rates))
        copied = [one.rates for one in tuned.acceptance.matches]
        return cls(tuned.cost, tuned.acceptance.per_depth, copied, others)

    def new_rates(self) -> RequestRates:
        """Return the rates of a new request."""
        own, copied = ([*map(MovingRates, rates)] for rates in (self.rates, self.copied_rates))
        return RequestRates(own, copied)

    def of_step(self, requests: Sequence[RequestProgress]) -> policies.TreePolicy:
        """Return the tree with the most tokens per second for these requests."""
        for request in requests:
            rates = self._rates.get(request)
            if rates is None:
                rates = self._rates[request] = self.new_rates()
                rates.num_steps = len(request.steps)
                if self.copied_rates:
                    rates.index = LookupIndex(request.all_tokens)
            rates.observe(request.steps, self.copied)
        rows = [(request, self._rates[request]) for request in requests]
        place = best_draft(self.cost, self.drafts, rows)
        for _, rates in rows:
            rates.last = self.drafts[place]
        return self.trees[place]


def drafted_levels(step: DecodingStep) -> int:
    """Return how many levels of the head's own tree a step accepted, with copied text or without.

    If these are fewer than the tree has, the next level counts as refused, also without a node
    below the accepted ones: rates are those of levels, drafted or not.
    """
    size = len(step.drafted) - step.num_copied
    return sum(node < size for node in step.path) - 1

"""How deep to draft, zero included: whatever gives most tokens a second for the present batch.

Source: Liu et al. 2024, arXiv:2406.14066 (SmartSpec), section 4. See docs/load.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Any
from weakref import WeakKeyDictionary

from specheads.core.drafter import Drafter
from specheads.core.errors import InputError
from specheads.core.features import Committed
from specheads.core.tree import TokenTree
from specheads.decoding.acceptance import sampling
from specheads.decoding.cost import Cost
from specheads.decoding.trees import policies

WEIGHT, RETURN = 0.05, 0.01
"""Weight of a new observation in a moving average, and of the seed where nothing was observed: what
was given up after a bad stretch is tried again."""


@dataclass(slots=True)
class Acceptance:
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


Rows = Sequence[tuple[policies.Row, Acceptance]]
"""Who takes a step together, and what is known of each."""


def best_depths(cost: Cost, nodes: Sequence[int], groups: Sequence[Rows]) -> list[int]:
    """Return the depths with the highest goodput; of equal ones the shallowest.

    Groups step one after the other and are one afterwards. What the time of each is worth is the
    goodput that all have together: a depth is judged by its tokens less those that its seconds
    would have brought there. Of a single group that is the depth with most tokens a second.

    Args:
        cost: What a step takes.
        nodes: Nodes of a row's tree by depth, root included, zero first: 1, 2, 3 is a chain of two.
        groups: None of them empty. Nobody yields more tokens than there is room for.
    """
    together = _choices(cost, nodes, [row for rows in groups for row in rows])
    worth = max(tokens / seconds for tokens, seconds in together)
    choices = [together] if len(groups) == 1 else [_choices(cost, nodes, one) for one in groups]
    return [_most([tokens - worth * seconds for tokens, seconds in one]) for one in choices]


def _choices(cost: Cost, nodes: Sequence[int], rows: Rows) -> list[tuple[float, float]]:
    """Return the expected tokens and the seconds of a step by drafted depth, zero first."""
    batch = len(rows)
    context = sum(row.length for row, _ in rows) / batch
    return [
        (
            sum(known.tokens[max(min(depth, row.room - 1), 0)] for row, known in rows),
            cost.seconds(batch, context, size, depth),
        )
        for depth, size in enumerate(nodes)
    ]


def _most(values: Sequence[float]) -> int:
    """Return the place of the largest; of such that differ by rounding alone the first."""
    largest = max(values)
    return next(place for place, one in enumerate(values) if one >= largest - 1e-9)


class Goodput(policies.TreePolicy):
    """Drafts as deep as pays for the batch of each step, and not at all where nothing pays.

    A chain or a static tree is cut at that depth. What a request was accepted so far moves the
    averages that it is judged by; its text is the base's own whatever is chosen.

    Args:
        cost: What a step takes on this machine.
        rates: Measured conditional acceptance of each depth, where every request begins.
        tree: The deepest to draft; None is a chain as deep as there are rates.
    """

    def __init__(
        self, cost: Cost, rates: Sequence[float], tree: policies.Static | None = None
    ) -> None:
        tree = policies.chain(len(rates)) if tree is None else tree
        if len(rates) < tree.depth:
            raise InputError(
                f"goodput needs a rate for each depth: the tree has {tree.depth} levels, got "
                f"{len(rates)} rates; measure more, or choose a shallower tree"
            )
        self.cost, self.rates, self.tree = cost, tuple(rates[: tree.depth]), tree
        self.name, self.num_nodes, self.depth = "goodput", tree.num_nodes, tree.depth
        self.num_guesses, self.num_answers = tree.num_guesses, tree.num_answers
        self.trees = [cut(tree, depth) for depth in range(tree.depth + 1)]
        self._nodes = [one.num_nodes for one in self.trees]
        self._known: WeakKeyDictionary[policies.Progress, Acceptance] = WeakKeyDictionary()

    def of_step(
        self, groups: Sequence[Sequence[policies.Progress]]
    ) -> Sequence[policies.TreePolicy]:
        """Return the tree, cut at the depths that give these requests most tokens a second."""
        if not groups:
            return []
        known = [[(one, self._acceptance(one)) for one in group] for group in groups]
        return [self.trees[depth] for depth in best_depths(self.cost, self._nodes, known)]

    def _acceptance(self, request: policies.Progress) -> Acceptance:
        known = self._known.get(request)
        if known is None:
            known = self._known[request] = Acceptance(self.rates)
        elif request.steps:
            last = request.steps[-1]
            known.note(len(last.path) - 1, refused=last.drafted_beyond)
        return known

    def grow(
        self, drafter: Drafter, committed: Committed, memory: Any, rows: sampling.Rows | None = None
    ) -> TokenTree:
        """Draft the whole tree, for whoever steps without an engine."""
        return self.tree.grow(drafter, committed, memory, rows)


def cut(tree: policies.Static, depth: int) -> policies.Static:
    """Return a static tree without the paths that are longer than this."""
    paths = [path for path in tree.paths if len(path) <= depth]
    return policies.Static(paths, tree.name, tree.confidence, tree.estimate)

"""What ways to draft cost and bring, and which gives most tokens a second.

Source: Liu et al. 2024, arXiv:2406.14066 (SmartSpec), section 4, for drafts of every depth; copied
text among the choices is ours. See docs/load.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from math import prod
from operator import mul

from specheads.core.errors import InputError
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
    trim: bool = True
    """Whether steps in which no row has anything to copy do without these."""
    tree: int = 0
    """Which of `Known.own` says how often it is right: all cuts of one tree share theirs."""

    def seconds(self, cost: Cost, batch: int, context: int | float, copying: float = 1.0) -> float:
        """Return what a step takes where a row has anything to copy, or with such a chance of it.

        Args:
            cost: What a step takes without copied text.
            batch: Rows.
            context: Committed tokens of a row, on average.
            copying: Chance that any row has text to copy.
        """
        alone = cost.seconds(batch, context, self.nodes, self.depth)
        if not self.copied:
            return alone
        # copied nodes are verified and not drafted: they cost the base's forward alone
        more = cost.seconds(batch, context, self.nodes + self.copied, 0)
        more -= cost.seconds(batch, context, self.nodes, 0)
        return alone + (copying if self.trim else 1.0) * more


def chains(depth: int, copied: int = 0) -> list[Draft]:
    """Return chains of every depth, zero first; where text is copied then each of them with it."""
    return copying([Draft(one, one + 1) for one in range(depth + 1)], copied)


def copying(drafts: Sequence[Draft], copied: int, *, trim: bool = True) -> list[Draft]:
    """Return these, and where text is copied then each of them with it."""
    return [*drafts, *(replace(one, copied=copied, trim=trim) for one in drafts if copied)]


@dataclass(slots=True)
class Known:
    """What is known of a request: how often its own drafts are right, and the text it copies.

    Both are taken for independent: at each depth one of them is right with 1 - (1 - a)(1 - b).
    """

    own: Sequence[Acceptance]
    """Of each tree; only that of the last step's draft is seen, and the others return."""
    copied: Acceptance = field(default_factory=lambda: Acceptance([]))
    """Of its levels the first is whether there is anything to copy, and each other a token."""
    last: Draft = Draft(0, 1)
    """What its last step drafted."""
    both: list[list[float]] = field(init=False)
    """Expected tokens that each tree and copied text have right both, by the depth of the shorter.
    """

    def __post_init__(self) -> None:
        self._multiply()

    @property
    def copying(self) -> float:
        """Chance that there is anything to copy."""
        return self.copied.rates[0] if self.copied.rates else 0.0

    def note(self, own: tuple[int, bool], copied: tuple[int, bool] = (0, False)) -> None:
        """Take in a step: levels accepted of each, and whether the one after them was refused."""
        for tree, known in enumerate(self.own):
            accepted, refused = own if tree == self.last.tree else (0, False)
            known.note(accepted, refused=refused)
        self.copied.note(copied[0], refused=copied[1])
        self._multiply()

    def tokens(self, draft: Draft, room: int) -> float:
        """Return the expected tokens of a step, of a request that takes so many more at most."""
        most = max(room - 1, 0)
        depth, copied = min(draft.depth, most), min(draft.copied, most)
        tokens = self.own[draft.tree].tokens[depth]
        if copied:
            more = self.copied.tokens[1 + copied] - self.copied.tokens[1]
            tokens += more - self.both[draft.tree][min(depth, copied)]
        return tokens

    def _multiply(self) -> None:
        copied = _chances(self.copied.tokens[1:])
        self.both = [
            list(accumulate(map(mul, _chances(one.tokens), copied), initial=0.0))
            for one in self.own
        ]


def _chances(tokens: Sequence[float]) -> list[float]:
    """Return the chance of each depth to be right: what it adds to the expected tokens."""
    return [more - less for less, more in pairwise(tokens)]


Rows = Sequence[tuple[policies.Row, Known]]
"""Who takes a step together, and what is known of each."""


def best_draft(cost: Cost, drafts: Sequence[Draft], rows: Rows) -> int:
    """Return the place of the draft with the highest goodput, tokens a second; of equals the first.

    Args:
        cost: What a step takes.
        drafts: Those to choose from, the smaller first.
        rows: At least one. Nobody yields more tokens than there is room for.
    """
    batch = len(rows)
    context = cost.context([row.length for row, _ in rows])
    copying = 1 - prod(1 - known.copying for _, known in rows)
    goodput = [
        sum(known.tokens(draft, row.room) for row, known in rows)
        / draft.seconds(cost, batch, context, copying)
        for draft in drafts
    ]
    # such that differ by rounding alone are equal
    enough = max(goodput) * (1 - 1e-9)
    return next(place for place, one in enumerate(goodput) if one >= enough)

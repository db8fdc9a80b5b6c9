"""What ways to draft cost and bring, and which gives most tokens a second.

Source: Liu et al. 2024, arXiv:2406.14066 (SmartSpec), section 4, for drafts of every depth; copied
text among the choices is ours. See docs/serve.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from operator import mul

from specheads.core.errors import InputError
from specheads.decoding.cost import Cost
from specheads.decoding.progress import Row

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
    tree: int = 0
    """Which of `Known.own` says how often it is right: all cuts of one tree share theirs."""

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
class Known:
    """What is known of a request: how often its own drafts are right, and the text it copies.

    Both are taken for independent: at each depth one of them is right with 1 - (1 - a)(1 - b).
    """

    own: Sequence[Acceptance]
    """Of each tree; only that of the last step's draft is seen, and the others return."""
    copied: Sequence[Acceptance] = ()
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


Rows = Sequence[tuple[Row, Known]]
"""Who takes a step together, and what is known of each."""


def step_tokens(drafts: Sequence[Draft], rows: Rows) -> list[float]:
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


def _summed(curves: Sequence[tuple[list[float], Row]]) -> list[float]:
    """Return the sum of what rows gain by drafted depth, each as far as it has room."""
    reached = [_within(one, row.room) for one, row in curves]
    return [*map(sum, zip(*reached, strict=False))]


def _within(curve: list[float], room: int) -> list[float]:
    if room >= len(curve):
        return curve
    most = max(room, 1)
    return curve[:most] + [curve[most - 1]] * (len(curve) - most)


def best_draft(cost: Cost, drafts: Sequence[Draft], rows: Rows) -> int:
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

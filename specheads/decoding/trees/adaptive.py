"""One of several trees in each step: the one chosen for a batch and a context like its own."""

import math
from collections.abc import Sequence
from typing import Any

from specheads.core.drafter import Drafter
from specheads.core.features import Committed
from specheads.core.tree import TokenTree
from specheads.decoding.acceptance.sampling import Rows
from specheads.decoding.progress import Progress
from specheads.decoding.trees import policies

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

    def of_step(self, requests: Sequence[Progress]) -> policies.TreePolicy:
        """Return the nearest tree."""
        return self._nearest([one.length for one in requests])

    def _nearest(self, lengths: Sequence[int]) -> policies.TreePolicy:
        context = sum(lengths) / len(lengths)
        return self.trees[nearest(self.places, len(lengths), context)]

    def grow(
        self, drafter: Drafter, committed: Committed, memory: Any, rows: Rows | None = None
    ) -> TokenTree:
        """Draft as is best now, for whoever steps without an engine."""
        assert rows is not None
        policy = self._nearest(rows.lengths.tolist())
        if not policy.depth:
            # a later step may draft again, from all that was committed until then
            drafter.read(committed, memory)
        return policy.grow(drafter, committed, memory, rows)

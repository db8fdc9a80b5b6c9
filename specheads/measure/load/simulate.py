"""Continuous batching, event by event, as `decoding.engine.Engine` does it. See docs/load.md."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specheads.core.errors import InputError
from specheads.decoding.cost import Cost
from specheads.decoding.goodput import Acceptance, best_depths
from specheads.decoding.request import alike
from specheads.measure.load.accepted import Accepted
from specheads.measure.load.arrivals import Arrival


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """What serves the requests."""

    cost: Cost
    """What steps take."""
    prefill: Callable[[int], float]
    """Seconds that reading a prompt takes, or several together, by their tokens with padding."""
    rates: Sequence[float]
    """Measured conditional acceptance by depth, where goodput begins."""
    nodes: Sequence[int]
    """Nodes of a row's tree by drafted depth, root included, zero first."""
    max_batch: int


@dataclass(slots=True)
class Served:
    """A request, and when what happened to it, in seconds."""

    arrival: Arrival
    accepted: Sequence[int]
    """Drafts that are right after each of its new tokens, at most."""
    known: Acceptance | None
    """Where goodput decides."""
    admitted: float = 0.0
    first: float = 0.0
    """When its first token was there."""
    finished: float = 0.0
    tokens: int = 0
    """New tokens so far."""

    @property
    def length(self) -> int:
        """Tokens of its text so far."""
        return self.arrival.prompt_tokens + self.tokens

    @property
    def room(self) -> int:
        """New tokens that it still takes."""
        return self.arrival.new_tokens - self.tokens

    def take(self, depth: int) -> None:
        """Take what a step gives that drafts so deep."""
        right = self.accepted[self.tokens - 1]
        accepted = min(right, depth)
        if self.known is not None:
            self.known.note(accepted, refused=right < depth)
        self.tokens += min(accepted + 1, self.room)


@dataclass(frozen=True, slots=True)
class Step:
    """A step of some rows together."""

    began: float
    seconds: float
    batch: int
    depth: int


@dataclass(slots=True)
class Simulation:
    """What happened."""

    served: list[Served] = field(default_factory=list)
    """All requests, in the order in which they came."""
    steps: list[Step] = field(default_factory=list)
    reading: float = 0.0
    """Seconds spent with prompts."""


def simulate(
    system: System, arrivals: Sequence[Arrival], accepted: Accepted, depth: int | None = None
) -> Simulation:
    """Serve requests until none is left, first come, first served.

    A turn admits who has come and fits, reads their prompts, those of about one length together,
    takes a step of the rows that were there and one of the newcomers, and joins them.

    Args:
        system: Its times, and how many rows it decodes together.
        arrivals: In order of time.
        accepted: What is right of whatever is drafted.
        depth: Drafted levels of every step. None is as many as give most tokens a second.
    """
    deepest = len(system.nodes) - 1
    if system.max_batch < 1 or not 0 <= (depth or 0) <= deepest <= len(system.rates):
        raise InputError(
            "a simulation needs a batch of at least 1, a depth that there are nodes for and a rate "
            f"for each depth, got {system.max_batch}, {depth}, {deepest} and {len(system.rates)}"
        )
    seeds = list(system.rates[:deepest])
    coming = deque(
        Served(one, accepted(number, one.new_tokens), Acceptance(seeds) if depth is None else None)
        for number, one in enumerate(arrivals)
    )
    return _Run(system, coming, depth).serve()


class _Run:
    """A simulation on its way."""

    def __init__(self, system: System, coming: deque[Served], depth: int | None) -> None:
        self.system, self.coming, self.depth = system, coming, depth
        self.found = Simulation(list(coming))
        self.clock = 0.0

    def serve(self) -> Simulation:
        rows: list[Served] = []
        while self.coming or rows:
            if not rows:
                self.clock = max(self.clock, self.coming[0].arrival.seconds)
            newcomers = self._admit(self.system.max_batch - len(rows))
            groups = [group for group in [rows, *newcomers] if group]
            for group, depth in zip(groups, self._depths(groups), strict=True):
                self._step(group, depth)
            rows = [row for group in groups for row in group if row.room]
        return self.found

    def _depths(self, groups: list[list[Served]]) -> list[int]:
        if self.depth is not None or not groups:
            return [self.depth or 0] * len(groups)
        known = [[(row, row.known) for row in group if row.known] for group in groups]
        return best_depths(self.system.cost, self.system.nodes, known)

    def _admit(self, most: int) -> list[list[Served]]:
        """Read the prompts of those who have come and fit; return who goes on, by read together."""
        new: list[Served] = []
        while self.coming and len(new) < most and self.coming[0].arrival.seconds <= self.clock:
            new.append(self.coming.popleft())
        groups = alike([row.arrival.prompt_tokens for row in new])
        return [self._read([new[place] for place in places]) for places in groups]

    def _read(self, group: list[Served]) -> list[Served]:
        tokens = len(group) * max(row.arrival.prompt_tokens for row in group)
        seconds = self.system.prefill(tokens)
        for row in group:
            row.admitted = self.clock
        self.clock += seconds
        self.found.reading += seconds
        for row in group:
            row.first, row.tokens = self.clock, 1
            if not row.room:
                row.finished = self.clock
        return [row for row in group if row.room]

    def _step(self, batch: list[Served], depth: int) -> None:
        context = sum(row.length for row in batch) / len(batch)
        nodes = self.system.nodes[depth]
        seconds = self.system.cost.seconds(len(batch), context, nodes, depth)
        self.found.steps.append(Step(self.clock, seconds, len(batch), depth))
        self.clock += seconds
        for row in batch:
            row.take(depth)
            if not row.room:
                row.finished = self.clock

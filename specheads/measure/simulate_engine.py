"""Continuous batching, event by event, as in `decoding.engine.Engine`: see docs/serve.md.

Step times are measured, or computed by a roofline model (Williams et al. 2009). A drafter with a
window of fixed size reads that window only: Sadhukhan et al. 2024, arXiv:2408.11049 (MagicDec),
section 3.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from specheads.core.errors import InputError
from specheads.decoding.cost import Cost
from specheads.decoding.goodput import Draft, MovingRates, RequestRates, best_draft
from specheads.decoding.request import alike
from specheads.measure.simulate_requests import (
    NO_COPIES,
    AcceptedLengths,
    Arrival,
    Copies,
    Copy,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A server."""

    cost: Cost
    """Step times."""
    prefill: Callable[[int], float]
    """Seconds to read prompts together, by their tokens with padding."""
    rates: Sequence[Sequence[float]]
    """Measured conditional acceptance by depth of each tree, with which goodput starts."""
    drafts: Sequence[Draft]
    """Drafts to choose from, the base alone first."""
    max_batch: int
    copied: Sequence[Sequence[float]] = ()
    """Conditional acceptance of copied tokens by length of the n-gram: see `Known.copied`."""

    def known(self) -> RequestRates:
        """Return the estimates for a new request."""
        return RequestRates([*map(MovingRates, self.rates)], [*map(MovingRates, self.copied)])


@dataclass(slots=True)
class Served:
    """A request in the server, with times in seconds."""

    arrival: Arrival
    accepted: Sequence[Sequence[int]]
    """For each tree, how many drafts are right after each new token."""
    copied: Sequence[Copy]
    """Prompt-lookup tokens after each new token."""
    known: RequestRates | None
    """Estimates for goodput; None for a fixed draft."""
    first: float = 0.0
    """Time of the first token."""
    finished: float = 0.0
    tokens: int = 0
    """New tokens so far."""

    @property
    def length(self) -> int:
        """Tokens of the text so far."""
        return self.arrival.prompt_tokens + self.tokens

    @property
    def room(self) -> int:
        """Remaining new tokens."""
        return self.arrival.new_tokens - self.tokens

    @property
    def copy(self) -> Copy:
        """Prompt-lookup tokens at the current position."""
        return self.copied[self.tokens - 1]

    def take(self, draft: Draft) -> None:
        """Add the tokens of a step."""
        right, copy = self.accepted[draft.tree][self.tokens - 1], self.copy
        accepted = min(right, draft.depth)
        # copied tokens that the own tree contains leave room for as many more
        copied = min(copy.right, accepted + draft.copied) if draft.copied else 0
        tokens = 1 + max(accepted, copied)
        if self.known is not None:
            self.known.last = draft
            # the text shows which prompt-lookup tokens are right, whether they were copied or not
            shown = min(copy.right, tokens), copy.matched > 0 and copy.right < tokens
            self.known.note((accepted, right < draft.depth), shown)
        self.tokens += min(tokens, self.room)


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """A step of some rows together."""

    began: float
    seconds: float
    batch: int
    depth: int


@dataclass(slots=True)
class Simulation:
    """The events of a simulation."""

    served: list[Served] = field(default_factory=list)
    """All requests in order of arrival."""
    steps: list[SimulatedStep] = field(default_factory=list)
    reading: float = 0.0
    """Seconds spent on prompts."""


def simulate(
    system: System,
    arrivals: Sequence[Arrival],
    accepted: Sequence[AcceptedLengths],
    draft: int | None = None,
    copied: Copies = NO_COPIES,
) -> Simulation:
    """Serve all requests, first come, first served.

    A turn admits the requests that have arrived and fit, reads prompts of similar length together,
    and takes a step of all rows.

    Args:
        system: The server.
        arrivals: Requests in order of time.
        accepted: Right drafts of each tree.
        draft: Index of the system's draft for every step. None chooses by goodput.
        copied: Prompt-lookup tokens.
    """
    size = max(one.copied for one in system.drafts)
    if system.max_batch < 1 or not 0 <= (draft or 0) < len(system.drafts):
        raise InputError(
            f"a simulation needs a batch of at least 1 and one of {len(system.drafts)} drafts, got "
            f"{system.max_batch} and {draft}"
        )
    levels = dict(enumerate(map(len, system.rates[: len(accepted)])))
    if min(map(len, system.copied), default=0) < size or any(
        one.depth > levels.get(one.tree, 0) for one in system.drafts
    ):
        raise InputError(
            "a simulation needs of every tree a rate for each depth and copied token, got "
            f"{[*levels.values()]} and {[*map(len, system.copied)]}"
        )
    coming = deque(
        Served(
            one,
            [tree(number, one.new_tokens) for tree in accepted],
            copied(number, one.new_tokens),
            system.known() if draft is None else None,
        )
        for number, one in enumerate(arrivals)
    )
    return _Run(system, coming, draft).serve()


class _Run:
    """A running simulation."""

    def __init__(self, system: System, coming: deque[Served], draft: int | None) -> None:
        self.system, self.coming, self.draft = system, coming, draft
        self.found = Simulation(list(coming))
        self.clock = 0.0

    def serve(self) -> Simulation:
        rows: list[Served] = []
        while self.coming or rows:
            if not rows:
                self.clock = max(self.clock, self.coming[0].arrival.seconds)
            rows += self._admit(self.system.max_batch - len(rows))
            if rows:
                self._step(rows, self._draft(rows))
            rows = [row for row in rows if row.room]
        return self.found

    def _draft(self, rows: list[Served]) -> Draft:
        place, system = self.draft, self.system
        if place is None:
            known = [(row, row.known) for row in rows if row.known]
            for row, one in known:
                one.look(row.copy.matched)
            place = best_draft(system.cost, system.drafts, known)
        return system.drafts[place]

    def _admit(self, most: int) -> list[Served]:
        """Read the prompts of requests that have arrived and fit; return those with more to do."""
        new: list[Served] = []
        while self.coming and len(new) < most and self.coming[0].arrival.seconds <= self.clock:
            new.append(self.coming.popleft())
        groups = alike([row.arrival.prompt_tokens for row in new])
        return [row for places in groups for row in self._read([new[place] for place in places])]

    def _read(self, group: list[Served]) -> list[Served]:
        tokens = len(group) * max(row.arrival.prompt_tokens for row in group)
        seconds = self.system.prefill(tokens)
        self.clock += seconds
        self.found.reading += seconds
        for row in group:
            row.first, row.tokens = self.clock, 1
            if not row.room:
                row.finished = self.clock
        return [row for row in group if row.room]

    def _step(self, batch: list[Served], draft: Draft) -> None:
        context = self.system.cost.context([row.length for row in batch])
        if not any(row.copy.matched for row in batch):
            draft = replace(draft, copied=0)
        seconds = draft.seconds(self.system.cost, len(batch), context)
        self.found.steps.append(SimulatedStep(self.clock, seconds, len(batch), draft.depth))
        self.clock += seconds
        for row in batch:
            row.take(draft)
            if not row.room:
                row.finished = self.clock


# --- computed step times -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Limits of a machine."""

    bandwidth: float
    """Bytes per second between memory and processor."""
    flops: float
    """Floating-point operations per second of dense products in the precision of the weights."""

    def __post_init__(self) -> None:
        if not (self.bandwidth > 0 and self.flops > 0):
            raise InputError(
                "a machine needs bandwidth and flops above 0, got "
                f"{self.bandwidth} and {self.flops}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardSize:
    """Memory and arithmetic of a model's forward."""

    parameters: int
    """Parameters that every token is multiplied with."""
    weight_bytes: int
    """Bytes of all parameters, which a forward reads once."""
    position_bytes: int
    """Bytes of keys and values of one position in all layers; zero without attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedCost:
    """Step times of a machine by the roofline model: the longer of memory and arithmetic.

    A forward reads the weights once, and the keys and values of its context; each token takes two
    operations per parameter. The arithmetic of attention and the time for kernel launches, sampling
    and communication are left out: a real machine is slower.
    """

    machine: Roofline
    base: ForwardSize
    draft: ForwardSize
    """One forward of the drafter."""
    window: float = math.inf
    """Most positions of a row that the drafter attends to, attention sinks included."""
    levels: int = 1
    """Levels that a forward of the drafter drafts. Above 1 it drafts whole blocks, however many
    levels the tree uses."""

    def forward(self, size: ForwardSize, tokens: int | float, positions: int | float) -> float:
        """Return the seconds of a forward over `tokens` that attend to `positions`."""
        memory = size.weight_bytes + size.position_bytes * positions
        arithmetic = 2 * size.parameters * tokens
        return max(memory / self.machine.bandwidth, arithmetic / self.machine.flops)

    def prefill(self, tokens: int) -> float:
        """Return the seconds to read prompts of `tokens` in all."""
        return self.forward(self.base, tokens, tokens)

    def seconds(self, batch: int, context: int | float, nodes: int, depth: int) -> float:
        """Return the seconds of a step: see `decoding.cost.StepCost.seconds`."""
        verified = self.forward(self.base, batch * nodes, batch * context)
        if depth == 0:
            return verified
        seen = batch * min(context, self.window)
        read = self.levels if self.levels > 1 else (nodes - 1) / depth
        forwards = -(-depth // self.levels)
        return verified + forwards * self.forward(self.draft, batch * read, seen)

    def context(self, lengths: Sequence[int]) -> float:
        """Return the mean length of rows: paged attention reads exactly what a row has."""
        return statistics.fmean(lengths)

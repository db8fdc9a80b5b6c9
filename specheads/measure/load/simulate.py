"""Continuous batching, event by event, as `decoding.engine.Engine` does it. See docs/serve.md."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from specheads.core.errors import InputError
from specheads.decoding.cost import Cost
from specheads.decoding.payoff import Acceptance, Draft, Known, best_draft
from specheads.decoding.request import alike
from specheads.measure.load.accepted import NOTHING, Accepted, Copies, Copy
from specheads.measure.load.arrivals import Arrival


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """What serves the requests."""

    cost: Cost
    """What steps take."""
    prefill: Callable[[int], float]
    """Seconds that reading a prompt takes, or several together, by their tokens with padding."""
    rates: Sequence[Sequence[float]]
    """Measured conditional acceptance by depth of each tree, where goodput begins."""
    drafts: Sequence[Draft]
    """What is chosen from, the base alone first."""
    max_batch: int
    copied: Sequence[Sequence[float]] = ()
    """The same of copied text by the tokens that stood before: see `Known.copied`."""

    def known(self) -> Known:
        """Return what is known of a request that nothing was decoded of."""
        return Known([*map(Acceptance, self.rates)], [*map(Acceptance, self.copied)])


@dataclass(slots=True)
class Served:
    """A request, and when what happened to it, in seconds."""

    arrival: Arrival
    accepted: Sequence[Sequence[int]]
    """Drafts of each tree that are right after each of its new tokens, at most."""
    copied: Sequence[Copy]
    """What there is to copy after each of its new tokens."""
    known: Known | None
    """Where goodput decides."""
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

    @property
    def copy(self) -> Copy:
        """What there is to copy now."""
        return self.copied[self.tokens - 1]

    def take(self, draft: Draft) -> None:
        """Take what a step gives."""
        right, copy = self.accepted[draft.tree][self.tokens - 1], self.copy
        accepted = min(right, draft.depth)
        # what the own tree holds of it leaves room for as much more
        copied = min(copy.right, accepted + draft.copied) if draft.copied else 0
        tokens = 1 + max(accepted, copied)
        if self.known is not None:
            self.known.last = draft
            # the text tells what of it is right, copied or not, as far as it goes now
            told = min(copy.right, tokens), copy.matched > 0 and copy.right < tokens
            self.known.note((accepted, right < draft.depth), told)
        self.tokens += min(tokens, self.room)


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
    system: System,
    arrivals: Sequence[Arrival],
    accepted: Sequence[Accepted],
    draft: int | None = None,
    copied: Copies = NOTHING,
) -> Simulation:
    """Serve requests until none is left, first come, first served.

    A turn admits who has come and fits, reads their prompts, those of about one length together,
    and takes a step of all rows.

    Args:
        system: Its times, and how many rows it decodes together.
        arrivals: In order of time.
        accepted: What is right of whatever is drafted, by tree.
        draft: Which of the system's every step takes. None is that of most tokens a second.
        copied: What there is to copy.
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
    """A simulation on its way."""

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
        """Read the prompts of those who have come and fit; return who goes on."""
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
        self.found.steps.append(Step(self.clock, seconds, len(batch), draft.depth))
        self.clock += seconds
        for row in batch:
            row.take(draft)
            if not row.room:
                row.finished = self.clock

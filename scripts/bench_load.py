"""Hold simulated loads against the engine's own, and goodput against every fixed draft.

    python scripts/bench_load.py --run runs/tiny_code                     both parts, a tuned head
    python scripts/bench_load.py --run runs/tiny_code --parts policies --rounds 4 --out FILE
    python scripts/bench_load.py --run runs/tiny_code --parts policies --arms 1 lookup goodput

Parts
    simulator  tokens per second of the engine over those simulated, by batch and drafted depth
    policies   latency of requests that come now and then, by arm, over that of goodput's arms, or
               where none of them is there over the last arm's

Arms are 0, the base alone; 2, a chain of two; lookup, copied text alone; 2+lookup, both in one
tree; tuned, the tuned tree nearest to the batch of each step; goodput, which chooses a chain or a
tuned tree for each step; and goodput+lookup, which chooses among all of them. Those with copied
text are there where `specheads tune` chose some.

Step times and acceptance rates are those of tuned.json in the head's folder; what reading prompts
takes is measured here. A machine is not always as fast as when a head was tuned: simulated times
are stretched by what a step of the base alone takes, one for each of the engine's, over what it
took then, the `pace`. The simulator replays how many drafts and copied tokens are
right at each place of the very texts; of tuned trees whose shape differs from step to step it draws
how many, by their rates there.

In `policies` every arm has an engine and a clock of its own: the clock goes on while a step is
taken, and leaps to the next arrival where there is nothing to do. Arms meet the same requests, and
the one whose clock is behind takes the next step: all see the same pace of the machine. A round is
another draw of the load.

Ratios carry 95 % bootstrap intervals over turns and rounds.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specheads.base.model import FrozenBase
from specheads.commands import _compose
from specheads.config import Simulate, Train
from specheads.core.drafter import Drafter, Head
from specheads.core.machine import dtype_name
from specheads.core.records import to_json
from specheads.decoding import loop
from specheads.decoding.engine import Engine
from specheads.decoding.generate import generate
from specheads.decoding.goodput import Draft, Goodput, chains
from specheads.decoding.prompt_lookup import PromptLookup
from specheads.decoding.request import Request, Stream
from specheads.decoding.trees import policies
from specheads.decoding.trees.hybrid import HybridTree, Lookup, own_tree
from specheads.decoding.trees.tuned import MatchRates, Tuned, TunedTree
from specheads.heads.load import load_head
from specheads.measure import simulate as simulation
from specheads.measure.counts import DepthCounts, bootstrap_interval
from specheads.measure.evaluation import named_prompts
from specheads.measure.generation import GenerationSettings, decode_prompts
from specheads.measure.offline import Copied, accepted_path, copied, guess_ranks
from specheads.measure.simulate_engine import Simulation, System, simulate
from specheads.measure.simulate_requests import (
    AcceptedLengths,
    Arrival,
    Copies,
    Copy,
    poisson,
    rates_of,
    recorded,
    sampled_lengths,
)
from specheads.measure.tune_finals import COPIED
from specheads.measure.tune_trees import match_rates
from specheads.runs.directory import RunDirectory
from specheads.runs.progress import bar
from specheads.runs.provenance import provenance

Prefill = Callable[[int], float]
"""Seconds that prompts take, by their tokens."""

Arm = int | str
"""A way to draft, by name; a number is the depth of a chain."""

TUNED = "tuned"

LOAD = [0.2, 2.0, 0.2, 1.5]
"""How the rate rises and falls: factors of it in parts of time of equal length."""


@dataclass(slots=True)
class Bench:
    """A head, what it is asked, and what it takes."""

    base: FrozenBase
    head: Head
    prompts: list[list[int]]
    new_tokens: int
    measured: Tuned
    accepted: AcceptedLengths
    copied: Copies
    rates: list[float]
    """Conditional acceptance of these very texts."""
    matches: list[MatchRates]
    """The same of copied text."""
    in_trees: list[AcceptedLengths]
    """Of each tuned tree that is no chain, as `simulate` takes it."""
    rounds: int
    batches: list[int]
    requests: int
    share: float
    load: list[float]
    arms: list[Arm]
    size: int
    """Nodes for copied text of arms with a fixed draft."""

    @property
    def length(self) -> int:
        """Tokens of the longest text."""
        return max(map(len, self.prompts)) + self.new_tokens

    @property
    def depth(self) -> int:
        """Levels that goodput chooses among."""
        return len(self.measured.acceptance.per_depth)

    def simulated(
        self, arm: Arm, max_batch: int, arrivals: Sequence[Arrival], prefill: Prefill
    ) -> Simulation:
        """Return what the simulator makes of an arm."""
        depth, size = _depth(arm), self.size if "lookup" in str(arm) else 0
        system = System(
            cost=self.measured.cost,
            prefill=prefill,
            rates=[self.measured.acceptance.per_depth],
            drafts=chains(self.depth, [size] if size else []),
            max_batch=max_batch,
            copied=[one.rates for one in self.measured.acceptance.matches],
        )
        if depth is None:
            system = simulation.with_goodput(system, self.chosen_from(arm))
        place = None if depth is None else system.drafts.index(Draft(depth, depth + 1, size))
        right = [self.accepted, *self.in_trees[: len(system.rates) - 1]]
        return simulate(system, arrivals, right, place, self.copied)

    def chosen_from(self, arm: Arm) -> Tuned:
        """Return what goodput chooses from."""
        alone = replace(self.measured, acceptance=self.measured.acceptance.alone())
        return self.measured if "lookup" in str(arm) else alone

    def engine(self, arm: Arm, max_batch: int) -> Engine:
        """Return an engine that drafts so."""
        drafter, tree = self.drafting(arm)
        return Engine(self.base, drafter, tree=tree, max_batch=max_batch, max_length=self.length)

    def drafting(self, arm: Arm) -> tuple[Drafter | None, policies.TreePolicy]:
        """Return what drafts, and how."""
        depth, size = _depth(arm), self.size if "lookup" in str(arm) else 0
        if arm == TUNED:
            return self.head, self.measured.policy()
        if depth is None:
            return self.head, Goodput.of(self.chosen_from(arm))
        if not depth:
            copying = PromptLookup(self.base.vocab_size, size) if size else None
            return copying, Lookup(size) if size else policies.NOTHING
        chain = policies.chain(depth)
        return self.head, HybridTree(chain, size) if size else chain

    def request(self, number: int) -> Request:
        """Return a request: prompts come again where there are fewer."""
        prompt = self.prompts[number % len(self.prompts)]
        return Request(prompt=prompt, max_new_tokens=self.new_tokens, eos_ids=())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts asked for; return the exit code."""
    options = _parse(arguments)
    bench = _bench(options)
    results: dict[str, Any] = {"schema": 4, "dtype": dtype_name(bench.base.dtype)}
    results["provenance"] = to_json(provenance())
    for name in options.parts:
        print(f"\n{name}", flush=True)
        results[name] = PARTS[name](bench)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--run", type=Path, required=True, help="run directory of a tuned head")
    add("--parts", nargs="+", choices=[*PARTS], default=[*PARTS])
    add("--prompts", type=int, default=16)
    add("--prompt-tokens", type=int, default=64, help="of windows of text")
    add("--new-tokens", type=int, default=64)
    add("--batches", type=int, nargs="+", default=[1, 4, 16], help="the last is that of policies")
    add("--requests", type=int, default=64, help="of a load that rises and falls")
    add("--share", type=float, default=0.7, help="its mean rate over what the base alone can serve")
    add("--load", type=float, nargs="+", default=LOAD, help="factors of the rate, part by part")
    add("--arms", nargs="+", type=_arm, help="of policies, all where none is named")
    add("--copied", type=int, help="tokens that arms with a fixed draft copy, as tuned by default")
    add("--rounds", type=int, default=3)
    add("--out", type=Path, help="JSON file for the numbers")
    return parser.parse_args(arguments)


def _arm(name: str) -> Arm:
    return int(name) if name.isdigit() else name


def _depth(arm: Arm) -> int | None:
    """Return the levels of an arm's chain; None are those that are chosen for each step."""
    name = str(arm).removesuffix("lookup").removesuffix("+")
    return None if name in ("goodput", TUNED) else int(name or 0)


def arms(tuned: Tuned) -> list[Arm]:
    """Return the ways to draft, the one that has them all the last."""
    depths = range(len(tuned.acceptance.per_depth) + 1)
    if not tuned.acceptance.matches:
        return [*depths, TUNED, "goodput"]
    return [
        *depths,
        "lookup",
        *(f"{one}+lookup" for one in depths[1:]),
        TUNED,
        "goodput",
        "goodput+lookup",
    ]


def copied_tokens(tuned: Tuned) -> int:
    """Return as many as the tuned trees copy at most, or where none does the fewest tried."""
    return max(tree.copied for tree in tuned.trees) or min(COPIED)


def _asked(options: argparse.Namespace, tuned: Tuned) -> list[Arm]:
    known = arms(tuned)
    if unknown := [one for one in options.arms or [] if one not in known]:
        raise SystemExit(f"arms are {', '.join(map(str, known))}, got {unknown[0]}")
    return options.arms or known


def _bench(options: argparse.Namespace) -> Bench:
    run = RunDirectory(options.run)
    trained = _compose.read_run(run.config, Train)
    base = FrozenBase.load(trained.base.model)
    head = load_head(run.head, base)
    settings: Simulate = _compose.settings_of("simulate", [f"run={options.run}"])
    measured = simulation.measured(settings)
    trained.evaluation.num_prompts = options.prompts
    trained.evaluation.prompt_tokens = options.prompt_tokens
    prompts = [prompt.tokens for prompt in named_prompts(trained, base).prompts]
    return _of_texts(options, base, head, measured, prompts)


def _of_texts(
    options: argparse.Namespace,
    base: FrozenBase,
    head: Head,
    measured: Tuned,
    prompts: list[list[int]],
) -> Bench:
    """Return a bench of what the base says after these prompts, and of what is right of it."""
    how: dict[str, Any] = {"max_new_tokens": options.new_tokens, "stop_at_eos": False}
    said = generate(base, None, prompts, max_batch=8, **how).tokens
    ranks = [guess_ranks(base, head, *text) for text in zip(prompts, said, strict=True)]
    texts = [_right(policies.chain(head.depth), one) for one in ranks]
    # as far as goodput's does
    lookup = PromptLookup(base.vocab_size, max(COPIED) + head.depth, device=base.device)
    copies = [copied(lookup, *text, max(COPIED)) for text in zip(prompts, said, strict=True)]
    matches = match_rates(copies)
    if not measured.acceptance.matches:
        # a file of before these were measured
        acceptance = replace(measured.acceptance, matches=matches)
        measured = replace(measured, acceptance=acceptance)
    return Bench(
        base,
        head,
        prompts,
        options.new_tokens,
        measured,
        recorded(texts),
        recorded([_copied(one) for one in copies]),
        rates_of(texts, head.depth),
        matches,
        [_in_tree(base, head, prompts, one, ranks) for one in measured.branching()],
        options.rounds,
        options.batches,
        options.requests,
        options.share,
        options.load,
        _asked(options, measured),
        options.copied or copied_tokens(measured),
    )


def _right(tree: policies.Static, ranks: Tensor) -> list[int]:
    """Return how many drafts of a static tree are right after each token of a text."""
    paths = {(), *tree.paths}
    return [*(len(accepted_path(paths, row)) for row in ranks.tolist()), 0]


def _in_tree(
    base: FrozenBase,
    head: Head,
    prompts: list[list[int]],
    tree: TunedTree,
    ranks: Sequence[Tensor],
) -> AcceptedLengths:
    """Return the right drafts of a tuned tree: recorded, or sampled if steps differ.

    Each level is right with its rate, given that every level above it is right.
    """
    own = own_tree(tree.policy())
    if isinstance(own, policies.Static):
        return recorded([_right(own, one) for one in ranks])
    how = GenerationSettings(
        max_new_tokens=1 + len(ranks[0]), tree=own, batch_size=8, stop_at_eos=False
    )
    counts = [one.counts for one in decode_prompts(base, head, prompts, how)]
    return sampled_lengths(DepthCounts.total(counts, own.depth).levels())


def _copied(copies: Copied) -> list[Copy]:
    """Return what there is to copy after each token of a text."""
    return [*map(Copy, copies.matched, copies.right), Copy()]


def _prefill(bench: Bench, drafter: Drafter | None) -> Prefill:
    """Return what reading prompts takes by their tokens: a line through one prompt and many."""

    def seconds(rows: int) -> tuple[float, int]:
        group = [bench.prompts[place % len(bench.prompts)] for place in range(rows)]
        times = []
        for _ in range(5):
            began = time.perf_counter()
            loop.start(bench.base, drafter, group, bench.length)
            times.append(time.perf_counter() - began)
        return statistics.median(times[1:]), rows * max(map(len, group))

    (one, few), (several, many) = seconds(1), seconds(8)
    slope = max(several - one, 0.0) / (many - few)
    return lambda tokens: max(one + slope * (tokens - few), 0.0)


def simulator(bench: Bench) -> list[dict[str, Any]]:
    """Return the engine's tokens per second over the simulated ones."""
    rows = []
    for size in bench.batches:
        number = max(2 * size, 6)
        lengths = [len(bench.request(one).prompt) for one in range(number)]
        arrivals = [Arrival(0.0, length, bench.new_tokens) for length in lengths]
        tokens = number * bench.new_tokens
        for arm in (0, bench.depth, "goodput"):
            _timed(bench, arm, size, number)
            turns = [_turn(bench, arm, size, arrivals) for _ in range(bench.rounds)]
            real, simulated, paces = zip(*turns, strict=True)
            rows.append(
                {
                    "batch": size,
                    "draft": arm,
                    "engine_tokens_per_second": tokens / statistics.fmean(real),
                    "simulated_tokens_per_second": tokens / statistics.fmean(simulated),
                    "simulated_over_engine": sum(real) / sum(simulated),
                    "interval": list(bootstrap_interval(real, simulated)),
                    "pace": statistics.fmean(paces),
                }
            )
            _show(rows[-1])
    return rows


def _turn(
    bench: Bench, arm: Arm, size: int, arrivals: Sequence[Arrival]
) -> tuple[float, float, float]:
    """Return what serving takes, what is simulated, and the machine's pace meanwhile."""
    pace = Pace(bench, bench.engine(0, size))
    service = Service(bench, bench.engine(arm, size), arrivals)
    while service.open:
        service.step()
        pace.step()
    # read as fast as now; all that is simulated is stretched by the pace
    prefill, slower = _prefill(bench, bench.drafting(arm)[0]), pace.taken / pace.expected
    found = bench.simulated(arm, size, arrivals, lambda tokens: prefill(tokens) / slower)
    return service.clock, slower * max(one.finished for one in found.served), slower


@dataclass(slots=True)
class Pace:
    """The base alone, a full batch of it, which steps beside what is timed.

    What it takes over what it took when the head was tuned is how much slower the machine is now.
    """

    bench: Bench
    engine: Engine
    streams: list[Stream] = field(default_factory=list)
    taken: float = 0.0
    expected: float = 0.0

    def step(self) -> None:
        """Take a step; where all texts are at their end they begin anew, untimed."""
        if not self.engine.running:
            numbers = range(self.engine.max_batch)
            self.streams = [self.engine.submit(self.bench.request(one)) for one in numbers]
            self.engine.step()
        cost, lengths = self.bench.measured.cost, [stream.length for stream in self.streams]
        began = time.perf_counter()
        self.engine.step()
        self.taken += time.perf_counter() - began
        self.expected += cost.seconds(len(lengths), cost.context(lengths), 1, 0)


def _timed(bench: Bench, arm: Arm, size: int, number: int) -> float:
    engine = bench.engine(arm, size)
    for one in range(number):
        engine.submit(bench.request(one))
    began = time.perf_counter()
    engine.run()
    return time.perf_counter() - began


@dataclass(slots=True)
class Service:
    """An engine on a clock of its own, which goes on while it steps and leaps where it idles."""

    bench: Bench
    engine: Engine
    arrivals: Sequence[Arrival]
    clock: float = 0.0
    streams: list[Stream] = field(default_factory=list)
    finished: dict[int, float] = field(default_factory=dict)
    """When a request's last token was there, by its number."""

    @property
    def open(self) -> bool:
        """Whether anybody has not been served."""
        return len(self.finished) < len(self.arrivals)

    @property
    def latencies(self) -> list[float]:
        """Seconds from the arrival of each request to its last token."""
        return [self.finished[place] - one.seconds for place, one in enumerate(self.arrivals)]

    @property
    def texts(self) -> list[list[int]]:
        """What each request was told."""
        return [stream.tokens for stream in self.streams]

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all over the time until the last was served."""
        return sum(map(len, self.texts)) / self.clock

    def step(self) -> None:
        """Let come who has come by now, take a step, and where nobody is left await the next."""
        while self._next is not None and self._next <= self.clock:
            self.streams.append(self.engine.submit(self.bench.request(len(self.streams))))
        began = time.perf_counter()
        busy = self.engine.step()
        self.clock += time.perf_counter() - began
        for place, stream in enumerate(self.streams):
            if stream.finish_reason is not None:
                self.finished.setdefault(place, self.clock)
        if not busy and self._next is not None:
            self.clock = max(self.clock, self._next)

    @property
    def _next(self) -> float | None:
        """When the next request comes, if any does."""
        coming = self.arrivals[len(self.streams) :]
        return coming[0].seconds if coming else None


def policies_under_load(bench: Bench) -> dict[str, Any]:
    """Return the latency of every arm on loads that rise and fall, over goodput's."""
    size = bench.batches[-1]
    alone = 2 * size * bench.new_tokens / _timed(bench, 0, size, 2 * size)
    # every round is another load
    rate = bench.share * alone / bench.new_tokens
    loads = [_load(bench, rate, turn) for turn in range(bench.rounds)]
    rounds = [_served(bench, size, load) for load in bar(loads, "loads", True)]
    prefill = _prefill(bench, bench.head)
    rows = [_row(bench, arm, rounds, prefill) for arm in bench.arms]
    for row in rows:
        _show(row)
    return {
        "base_tokens_per_second": alone,
        "rates": bench.rates,
        "matches": to_json(bench.matches),
        "copied": bench.size,
        "share": bench.share,
        "load": bench.load,
        "rows": rows,
    }


def _load(bench: Bench, rate: float, turn: int) -> list[Arrival]:
    """Return when requests come, and how long their prompts are: as long as those that are read."""
    return poisson(
        rate,
        bench.requests,
        prompt_tokens=[len(bench.request(place).prompt) for place in range(bench.requests)],
        new_tokens=bench.new_tokens,
        parts=bench.load,
        seed=turn,
    )


def _served(bench: Bench, size: int, arrivals: Sequence[Arrival]) -> dict[Arm, Service]:
    """Serve these by every arm: whose clock is behind steps next, at one pace of the machine."""
    arms = {arm: Service(bench, bench.engine(arm, size), arrivals) for arm in bench.arms}
    while behind := [one for one in arms.values() if one.open]:
        min(behind, key=lambda one: one.clock).step()
    return arms


def _row(
    bench: Bench, arm: Arm, rounds: Sequence[dict[Arm, Service]], prefill: Prefill
) -> dict[str, Any]:
    """Return what an arm's requests waited, as measured and as simulated."""
    own = [each[arm].latencies for each in rounds]
    return {
        "draft": arm,
        "mean_latency": statistics.fmean(chain(*own)),
        "simulated_mean_latency": _simulated_wait(bench, arm, rounds, prefill),
        "tokens_per_second": statistics.median(each[arm].tokens_per_second for each in rounds),
        "latency_over": {str(other): _over(arm, other, rounds) for other in _references(bench)},
        "same_text": all(each[arm].texts == each[bench.arms[0]].texts for each in rounds),
    }


def _references(bench: Bench) -> list[Arm]:
    """Return the arms that all are held against."""
    return [arm for arm in bench.arms if str(arm).startswith("goodput")] or bench.arms[-1:]


def _over(arm: Arm, other: Arm, rounds: Sequence[dict[Arm, Service]]) -> list[float]:
    """Return the latency of an arm over another's, and its interval."""
    ours, theirs = ([sum(each[one].latencies) for each in rounds] for one in (arm, other))
    return [sum(ours) / sum(theirs), *bootstrap_interval(ours, theirs)]


def _simulated_wait(
    bench: Bench, arm: Arm, rounds: Sequence[dict[Arm, Service]], prefill: Prefill
) -> float | None:
    """Return what an arm's requests wait in the simulator, which knows no tree but goodput's."""
    if arm == TUNED:
        return None
    found = (
        bench.simulated(arm, bench.batches[-1], each[arm].arrivals, prefill) for each in rounds
    )
    waits = [one.finished - one.arrival.seconds for each in found for one in each.served]
    return statistics.fmean(waits)


PARTS: dict[str, Callable[[Bench], Any]] = {
    "simulator": simulator,
    "policies": policies_under_load,
}


def _show(row: dict[str, Any]) -> None:
    shown = (f"{name} {_text(value)}" for name, value in row.items())
    sys.stdout.write("  " + "  ".join(shown) + "\n")
    sys.stdout.flush()


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name} {_text(one)}" for name, one in value.items())
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    raise SystemExit(main())

"""Hold simulated loads against the engine's own, and goodput against every fixed depth.

    python scripts/bench_load.py --run runs/tiny_code                     both parts, a tuned head
    python scripts/bench_load.py --run runs/tiny_code --parts policies --rounds 4 --out FILE

Parts
    simulator  tokens per second of the engine over those simulated, by batch and drafted depth
    policies   latency of requests that come now and then, by policy: each fixed depth and goodput

Step times and acceptance rates are those of tuned.json in the head's folder; what reading prompts
takes is measured here. A machine is not always as fast as when a head was tuned: simulated times
are stretched by what a step of the base alone takes between the engine's turns, over what it took
then, the `pace`. The simulator replays how many drafts are right at each place of the very
texts. In `policies` the clock is the engine's own: it goes on while a step is taken, and leaps to
the next arrival where there is nothing to do. Policies take turns on the same requests, beginning
with another in every round; ratios carry 95 % bootstrap intervals over requests.
"""

import argparse
import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specheads.base.model import FrozenBase
from specheads.commands import _compose
from specheads.config import Simulate, Train
from specheads.core.drafter import Head
from specheads.decoding import loop
from specheads.decoding.engine import Engine
from specheads.decoding.generate import generate
from specheads.decoding.goodput import Goodput
from specheads.decoding.request import Request, Stream
from specheads.decoding.trees import policies
from specheads.decoding.trees.tuned import Tuned
from specheads.heads.load import load_head
from specheads.measure.counts import bootstrap_interval
from specheads.measure.evaluation import named_prompts
from specheads.measure.load import command
from specheads.measure.load.accepted import Accepted, rates_of, recorded
from specheads.measure.load.arrivals import Arrival, poisson
from specheads.measure.load.simulate import System, simulate
from specheads.measure.offline import guess_ranks
from specheads.measure.store import to_json
from specheads.runs.directory import RunDirectory
from specheads.runs.provenance import provenance

PARTS_OF_LOAD = 0.2, 2.0, 0.2, 1.5
"""How the rate rises and falls."""


@dataclass(slots=True)
class Bench:
    """A head, what it is asked, and what it takes."""

    base: FrozenBase
    head: Head
    prompts: list[list[int]]
    new_tokens: int
    measured: Tuned
    accepted: Accepted
    rates: list[float]
    """Conditional acceptance of these very texts."""
    prefill: Callable[[int], float]
    rounds: int
    batches: list[int]
    requests: int
    share: float

    @property
    def depth(self) -> int:
        """Levels that goodput chooses among."""
        return min(self.head.depth, len(self.measured.acceptance.per_depth))

    def system(self, max_batch: int) -> System:
        """Return what the simulator simulates."""
        return System(
            cost=self.measured.cost,
            prefill=self.prefill,
            rates=self.measured.acceptance.per_depth[: self.depth],
            nodes=range(1, self.depth + 2),
            max_batch=max_batch,
        )

    def engine(self, depth: int | None, max_batch: int) -> Engine:
        """Return an engine that drafts so deep, or by goodput."""
        length = max(map(len, self.prompts)) + self.new_tokens
        tree: policies.TreePolicy | None = None
        if depth is None:
            rates = self.measured.acceptance.per_depth[: self.depth]
            tree = Goodput(self.measured.cost, rates)
        elif depth:
            tree = policies.chain(depth)
        head = None if depth == 0 else self.head
        return Engine(self.base, head, tree=tree, max_batch=max_batch, max_length=length)

    def request(self, number: int) -> Request:
        """Return a request: prompts come again where there are fewer."""
        prompt = self.prompts[number % len(self.prompts)]
        return Request(prompt=prompt, max_new_tokens=self.new_tokens, eos_ids=())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts asked for; return the exit code."""
    options = _parse(arguments)
    bench = _bench(options)
    results: dict[str, Any] = {"schema": 1, "provenance": to_json(provenance())}
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
    add("--rounds", type=int, default=3)
    add("--out", type=Path, help="JSON file for the numbers")
    return parser.parse_args(arguments)


def _bench(options: argparse.Namespace) -> Bench:
    run = RunDirectory(options.run)
    trained = _compose.read_run(run.config, Train)
    base = FrozenBase.load(trained.base.model)
    head = load_head(run.head, base)
    settings: Simulate = _compose.settings_of("simulate", [f"run={options.run}"])
    measured = command.measured(settings)
    trained.evaluation.num_prompts = options.prompts
    trained.evaluation.prompt_tokens = options.prompt_tokens
    prompts = [prompt.tokens for prompt in named_prompts(trained, base).prompts]
    how: dict[str, Any] = {"max_new_tokens": options.new_tokens, "stop_at_eos": False}
    said = generate(base, None, prompts, max_batch=8, **how).tokens
    texts = [_right(base, head, *text) for text in zip(prompts, said, strict=True)]
    return Bench(
        base,
        head,
        prompts,
        options.new_tokens,
        measured,
        recorded(texts),
        rates_of(texts, head.depth),
        _prefill(base, head, prompts),
        options.rounds,
        options.batches,
        options.requests,
        options.share,
    )


def _right(base: FrozenBase, head: Head, prompt: list[int], said: list[int]) -> list[int]:
    """Return how many drafts of a chain are right after each token of a text."""
    ranks = guess_ranks(base, head, prompt, said)
    return [*(ranks == 0).int().cumprod(dim=1).sum(dim=1).tolist(), 0]


def _prefill(base: FrozenBase, head: Head, prompts: list[list[int]]) -> Callable[[int], float]:
    """Return what reading prompts takes by their tokens: a line through one prompt and many."""

    def seconds(rows: int) -> tuple[float, int]:
        group = [prompts[place % len(prompts)] for place in range(rows)]
        times = []
        for _ in range(6):
            began = time.perf_counter()
            loop.start(base, head, group, 512)
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
        for depth in (0, bench.depth, None):
            turns = [
                (_timed(bench, depth, size, number), _pace(bench, size))
                for _ in range(bench.rounds + 1)
            ]
            real = statistics.median(seconds for seconds, _ in turns[1:])
            pace = statistics.median(pace for _, pace in turns[1:])
            found = simulate(bench.system(size), arrivals, bench.accepted, depth)
            seconds = pace * max(one.finished for one in found.served)
            rows.append(
                {
                    "batch": size,
                    "draft": "goodput" if depth is None else depth,
                    "engine_tokens_per_second": tokens / real,
                    "simulated_tokens_per_second": tokens / seconds,
                    "simulated_over_engine": real / seconds,
                    "pace": pace,
                    "mean_depth": _mean_depth(found.steps),
                }
            )
            _show(rows[-1])
    return rows


def _pace(bench: Bench, size: int) -> float:
    """Return what a step of the base alone takes now, over what it took when the head was tuned."""
    engine, times = bench.engine(0, size), []
    streams = [engine.submit(bench.request(one)) for one in range(size)]
    # the first step reads the prompts too
    engine.step()
    context = statistics.fmean(stream.length for stream in streams) + bench.new_tokens / 2
    while engine.running:
        began = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - began)
    return statistics.median(times) / bench.measured.cost.seconds(size, context, 1, 0)


def _mean_depth(steps: Sequence[Any]) -> float:
    return sum(one.batch * one.depth for one in steps) / max(sum(one.batch for one in steps), 1)


def _timed(bench: Bench, depth: int | None, size: int, number: int) -> float:
    engine = bench.engine(depth, size)
    for one in range(number):
        engine.submit(bench.request(one))
    began = time.perf_counter()
    engine.run()
    return time.perf_counter() - began


def policies_under_load(bench: Bench) -> dict[str, Any]:
    """Return the latency of every policy on a load that rises and falls, beside goodput's."""
    size = bench.batches[-1]
    alone = 2 * size * bench.new_tokens / _timed(bench, 0, size, 2 * size)
    arrivals = poisson(
        bench.share * alone / bench.new_tokens,
        bench.requests,
        prompt_tokens=max(map(len, bench.prompts)),
        new_tokens=bench.new_tokens,
        parts=PARTS_OF_LOAD,
    )
    drafts: list[int | None] = [*range(bench.depth + 1), None]
    latencies: dict[int | None, list[list[float]]] = {draft: [] for draft in drafts}
    speeds: dict[int | None, list[float]] = {draft: [] for draft in drafts}
    texts: dict[int | None, list[list[int]]] = {}
    for turn in range(bench.rounds):
        for draft in drafts[turn % len(drafts) :] + drafts[: turn % len(drafts)]:
            found, speed, texts[draft] = _served(bench, draft, size, arrivals)
            latencies[draft].append(found)
            speeds[draft].append(speed)
    each = {
        draft: [statistics.median(one) for one in zip(*rounds, strict=True)]
        for draft, rounds in latencies.items()
    }
    rows = []
    for draft in drafts:
        simulated = simulate(bench.system(size), arrivals, bench.accepted, draft).served
        rows.append(
            {
                "draft": "goodput" if draft is None else draft,
                "mean_latency": statistics.fmean(each[draft]),
                "simulated_mean_latency": statistics.fmean(
                    one.finished - one.arrival.seconds for one in simulated
                ),
                "tokens_per_second": statistics.median(speeds[draft]),
                "latency_over_goodputs": sum(each[draft]) / sum(each[None]),
                "interval": list(bootstrap_interval(each[draft], each[None])),
                "same_text": texts[draft] == texts[0],
            }
        )
        _show(rows[-1])
    return {"base_tokens_per_second": alone, "rates": bench.rates, "rows": rows}


def _served(
    bench: Bench, draft: int | None, size: int, arrivals: Sequence[Arrival]
) -> tuple[list[float], float, list[list[int]]]:
    """Return each request's latency, tokens per second of all, and what was said."""
    engine, coming = bench.engine(draft, size), deque(enumerate(arrivals))
    streams: list[Stream] = []
    finished: dict[int, float] = {}
    clock, busy = 0.0, True
    while coming or busy:
        if not busy:
            clock = max(clock, coming[0][1].seconds)
        while coming and coming[0][1].seconds <= clock:
            streams.append(engine.submit(bench.request(coming.popleft()[0])))
        began = time.perf_counter()
        busy = engine.step()
        clock += time.perf_counter() - began
        for stream in streams:
            if stream.finish_reason is not None and stream.number not in finished:
                finished[stream.number] = clock
    latency = [finished[place] - one.seconds for place, one in enumerate(arrivals)]
    tokens = sum(len(stream.tokens) for stream in streams)
    return latency, tokens / clock, [stream.tokens for stream in streams]


PARTS: dict[str, Callable[[Bench], Any]] = {
    "simulator": simulator,
    "policies": policies_under_load,
}


def _show(row: dict[str, Any]) -> None:
    shown = (f"{name} {_text(value)}" for name, value in row.items())
    sys.stdout.write("  " + "  ".join(shown) + "\n")
    sys.stdout.flush()


def _text(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    raise SystemExit(main())

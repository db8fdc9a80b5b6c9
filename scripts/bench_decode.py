"""Time decoding: steps against bare forwards, their parts, and whole texts by batch.

    python scripts/bench_decode.py                                 the shipped base, on this machine
    python scripts/bench_decode.py --base llama-8b --device cuda   a random base of that shape
    python scripts/bench_decode.py --parts steps batch --out FILE  some parts; keep the numbers

Parts are `steps` (a step over n nodes against bare forwards), `batch` (tokens/s alone and with
planted drafts), `ledger` (draft, verify, accept and host of a step with random heads), `alone` (the
base alone, eager, recorded and compiled, against transformers' generate), `graphs` (steps with a
head recorded as CUDA graphs against eager ones; a CPU calls the same functions) and `engine` (a
paged cache: alone, with a head, with goodput).
Sides of a comparison take turns; ratios carry 95 % bootstrap intervals over turns.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_train import SHAPES, WARM_UP, Sides, head_settings, load_base, seconds_of, take_turns
from torch import Tensor
from transformers import DynamicCache

from specheads.base.model import FrozenBase
from specheads.core.drafter import Drafter
from specheads.core.features import Committed
from specheads.core.files import dumps, to_json
from specheads.core.machine import dtype_name
from specheads.core.tree import TokenTree
from specheads.decoding import accept, loop
from specheads.decoding.engine import Engine
from specheads.decoding.generate import generate
from specheads.decoding.goodput import Goodput
from specheads.decoding.request import Request
from specheads.decoding.trees import policies
from specheads.heads.load import build_for_base, copy_for_drafting
from specheads.measure.counts import bootstrap_interval
from specheads.measure.generation import GenerationSettings
from specheads.runs.provenance import collect_provenance, shorten_paths

ROOT = Path(__file__).resolve().parents[1]
RATE = 0.8
"""Probability with which a planted draft is accepted."""


@dataclass(frozen=True, slots=True)
class Bench:
    """A base, and the sizes of what is timed with it."""

    base: FrozenBase
    context: int = 64
    """Tokens of a prompt."""
    nodes: Sequence[int] = (1, 4, 8, 16, 32)
    batches: Sequence[int] = (1, 2, 4, 8, 16)
    new_tokens: int = 48
    turns: int = 12
    draft_tokens: int = 8192
    """Draft vocabulary of the heads that have one."""
    heads: Sequence[str] = ("eagle3", "redrafter", "mlp_speculator", "dflash")

    def prompt(self, length: int = 0, seed: int = 0) -> list[int]:
        """Return random tokens: only the speed is measured."""
        generator = torch.Generator().manual_seed(seed)
        size = (length or self.context,)
        return torch.randint(self.base.vocab_size, size, generator=generator).tolist()

    def head(self, kind: str) -> Any:
        """Return a head with random weights, made on the device."""
        with self.base.device:
            head = build_for_base(head_settings(kind, self.base, self.draft_tokens), self.base)
        return copy_for_drafting(head, self.base)


class Planted(Drafter):
    """Drafts tokens in the order of their ids, in no time."""

    def __init__(self, depth: int, vocab_size: int, device: torch.device) -> None:
        self.depth = depth
        self.logits = -torch.arange(vocab_size, device=device, dtype=torch.float32)

    def begin(self, committed: Committed, memory: Any) -> tuple[Tensor, None]:
        """Draft after the root."""
        del memory
        return self.logits.expand(len(committed.counts), 1, -1), None

    def extend(self, state: None, tokens: Tensor, parents: Tensor) -> tuple[Tensor, None]:
        """Draft after every node."""
        del state, parents
        return self.logits.expand(*tokens.shape, -1), None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts asked for; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add, usual = parser.add_argument, Bench.__dataclass_fields__
    shipped = str(ROOT / "recipes" / "tiny_code" / "base")
    add("--base", default=shipped, help=f"{', '.join(SHAPES)}, or a folder or Hub id")
    add("--device", default="auto")
    add("--dtype", default="auto")
    add("--threads", type=int, default=0, help="of the processor; 0 leaves torch's choice")
    add("--parts", nargs="+", choices=[*PARTS], default=[*PARTS])
    for name in ("context", "new_tokens", "turns"):
        add(f"--{name.replace('_', '-')}", type=int, default=usual[name].default)
    for name in ("nodes", "batches"):
        add(f"--{name}", type=int, nargs="+", default=usual[name].default)
    add("--out", type=Path, help="JSON file for the numbers")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads or torch.get_num_threads())
    base = load_base(options.base, options.device, options.dtype)
    names = "context", "new_tokens", "turns", "nodes", "batches"
    sizes = {name: getattr(options, name) for name in names}
    bench = Bench(base, **sizes)
    results: dict[str, Any] = {"schema": 2, "parameters": base.num_parameters, **sizes}
    results |= {"base": shorten_paths(base.name), "dtype": dtype_name(base.dtype)}
    results |= {"device": base.device.type, **to_json(collect_provenance())}
    for name in options.parts:
        results[name] = PARTS[name](bench)
        print(f"{name}\n{dumps(results[name])}", end="", flush=True)
    if options.out:
        options.out.write_text(dumps(results), encoding="utf-8")
    return 0


@torch.inference_mode()
def steps(bench: Bench) -> list[dict[str, Any]]:
    """Return the time of a step over n nodes against bare forwards of n tokens and of one."""
    base, prompt = bench.base, bench.prompt()
    bare = {nodes: bare_forward(base, prompt, nodes) for nodes in {1, *bench.nodes}}
    sides: Sides = {f"bare {nodes}": forward for nodes, (forward, _) in bare.items()}
    sides |= {f"step {nodes}": stepper(bench, prompt, nodes) for nodes in bench.nodes}

    def forget() -> None:
        for _, crop in bare.values():
            crop()

    times = take_turns(base.device, sides, bench.turns, forget)
    alone = times["bare 1"]
    return [
        {
            "nodes": nodes,
            "context": len(prompt),
            "step_milliseconds": 1e3 * statistics.median(seconds),
            "bare_milliseconds": 1e3 * statistics.median(alone),
            "over_bare_forward": statistics.median(seconds) / statistics.median(alone),
            "interval": list(bootstrap_interval(seconds, alone)),
            "over_bare_forward_of_n": statistics.median(seconds) / statistics.median(equal_seconds),
        }
        for nodes in bench.nodes
        for seconds, equal_seconds in [(times[f"step {nodes}"], times[f"bare {nodes}"])]
    ]


def stepper(bench: Bench, prompt: list[int], nodes: int) -> Callable[[], Any]:
    """Return what takes one step with drafts that are hardly ever right."""
    base = bench.base
    # a tree of at most four levels: a chain, and siblings all along it
    paths = [(0,) * depth + (rank,) for rank in range(nodes) for depth in range(4)]
    policy = policies.Static(sorted(paths[: nodes - 1]), "caterpillar")
    room = len(prompt) + 2 * nodes + 2 * (WARM_UP + bench.turns + 1)
    drafter = Planted(policy.depth, base.vocab_size, base.device) if policy.depth else None
    state, _ = loop.start(base, drafter, [prompt], room)
    return lambda: loop.step(base, drafter, policy, accept.match_rule, state)


def bare_forward(
    base: FrozenBase, prompt: list[int], nodes: int
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return what takes a plain forward of the model, and what takes it back."""
    cache = DynamicCache(config=base.config)
    prompt_tokens = torch.tensor([prompt], device=base.device)
    options: Any = {base.forwards.cache_argument: cache, "use_cache": True}
    base.model(input_ids=prompt_tokens, logits_to_keep=1, **options)
    tokens = torch.zeros(1, nodes, dtype=torch.long, device=base.device)

    def forward() -> None:
        base.model(input_ids=tokens, **options)

    return forward, lambda: cache.crop(-nodes)


def batch_row(bench: Bench, size: int) -> dict[str, Any]:
    """Return tokens/s of a batch; the first call of each way is not timed."""
    base, tokens = bench.base, size * bench.new_tokens
    prompts = [bench.prompt(64, seed) for seed in range(size)]
    options: dict[str, Any] = {"max_new_tokens": bench.new_tokens, "stop_at_eos": False}
    alone = partial(generate, base, None, prompts, **options)
    planted, rule = Planted(3, base.vocab_size, base.device), planted_rule(base)
    drafted = partial(generate, base, planted, prompts, acceptance=rule, **options)
    alone()
    forwards = sum(drafted().forwards)
    return {
        "batch": size,
        "new_tokens": bench.new_tokens,
        "alone": tokens / seconds_of(base.device, alone),
        "planted": tokens / seconds_of(base.device, drafted),
        "tokens_per_forward": tokens / forwards,
    }


def planted_rule(base: FrozenBase) -> Any:
    """Return an acceptance rule for chains that accepts each draft with probability `RATE`.

    The bonus token is the base's own. With random weights in bfloat16 the text of the base alone
    differs from that of tree verification at near ties, so an oracle of texts is soon wrong.
    """
    generator = torch.Generator(base.device).manual_seed(0)

    def rule(tree: TokenTree, logits: Tensor, *_: Any) -> accept.Verdict:
        rows, nodes = tree.tokens.shape
        uniforms = torch.rand(rows, nodes - 1, device=logits.device, generator=generator)
        count = 1 + (uniforms < RATE).long().cumprod(1).sum(1)
        path = torch.arange(nodes, device=logits.device).expand(rows, -1)
        best = logits.argmax(-1).gather(1, count[:, None] - 1)[:, 0]
        return accept.Verdict(path, count, best)

    return rule


def ledger_row(bench: Bench, kind: str) -> dict[str, float]:
    """Return the mean milliseconds of each part of a step, with a head of random weights."""
    drafter, ledger = bench.head(kind), loop.StepLedger(bench.base.device)
    decode = partial(generate, bench.base, drafter, [bench.prompt()], stop_at_eos=False)
    decode(max_new_tokens=bench.new_tokens)
    decode(max_new_tokens=bench.new_tokens, ledger=ledger)
    return {part: 1e3 * seconds / ledger.num_steps for part, seconds in ledger.seconds.items()}


def alone(bench: Bench) -> dict[str, dict[str, Any]]:
    """Return milliseconds per token of the base alone: our loop, and transformers' generate."""
    base, results = bench.base, {}
    compiled = FrozenBase(base.model, compile=True, prepare=False)
    static = {"cache_implementation": "static"}

    def our_loop(base: FrozenBase, count: int) -> Any:
        return generate(base, None, [bench.prompt()], max_new_tokens=count, stop_at_eos=False)

    arms: dict[str, Callable[[int], Any]] = {
        "base_compiled": partial(our_loop, compiled),
        "base_recorded": partial(our_loop, recorded_base(base)),
        # transformers compiles a static cache by itself
        "transformers_static_compiled": partial(_transformers, bench, **static),
        "base_eager": partial(our_loop, eager_base(base)),
        "transformers_eager": partial(_transformers, bench),
    }
    for name, run in arms.items():
        seconds = seconds_of(base.device, partial(run, bench.new_tokens))
        print(f"{name}: first call {seconds:.1f} s", flush=True)
        results[name] = {"first_call_seconds": seconds}
    short, long = bench.new_tokens // 3, bench.new_tokens
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(5):
        for name, run in arms.items():
            # the prompt is read in both, so the difference is decoding alone
            short_seconds, long_seconds = (
                seconds_of(base.device, partial(run, count)) for count in (short, long)
            )
            times[name].append((long_seconds - short_seconds) / (long - short))
    for name, seconds_per_token in times.items():
        results[name]["milliseconds_per_token"] = 1e3 * statistics.median(seconds_per_token)
        results[name]["seconds_per_token"] = seconds_per_token
    return results


def recorded_base(base: FrozenBase) -> FrozenBase:
    """Return a base that records its steps: as CUDA graphs, and on a CPU as calls of functions."""
    recorded = FrozenBase(base.model, compile=False, prepare=False)
    recorded.forwards.record()
    return recorded


def eager_base(base: FrozenBase) -> FrozenBase:
    """Return a base that records nothing."""
    return FrozenBase(base.model, compile=False, prepare=False)


def graphs_row(bench: Bench, size: int, context: int = 0, *, paged: bool = False) -> dict[str, Any]:
    """Return the times of steps with eagle3, recorded and eager, and those to the first token."""
    head, prompts = bench.head("eagle3"), [bench.prompt(context, seed) for seed in range(size)]
    tree, sides, first_tokens = policies.chain(head.depth), {}, {}
    limit = tree.num_nodes * (8 + WARM_UP + bench.turns)
    length = len(prompts[0]) + limit

    def start(base: FrozenBase) -> Engine:
        blocks = size * -(-(length + 2 * tree.num_nodes) // 16)
        pool = base.pool(blocks) if paged else None
        serving = Engine(base, head, tree=tree, max_batch=size, max_length=length, pool=pool)
        for prompt in prompts:
            serving.submit(Request(prompt=prompt, max_new_tokens=limit, eos_ids=()))
        return serving

    for name, base in (("recorded", recorded_base(bench.base)), ("eager", eager_base(bench.base))):
        first_tokens[name] = [seconds_of(base.device, start(base).step) for _ in range(2)]
        serving = start(base)
        first_tokens[name].append(seconds_of(base.device, serving.step))
        # the first steps of a shape are not recorded
        for _ in range(7):
            serving.step()
        sides[name] = serving.step
    times = take_turns(bench.base.device, sides, bench.turns)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    return {
        "batch": size,
        "context": len(prompts[0]),
        "paged": paged,
        "first_token_seconds": first_tokens,
        "step_milliseconds": {name: 1e3 * seconds for name, seconds in medians.items()},
        "recorded_over_eager": medians["recorded"] / medians["eager"],
        "interval": list(bootstrap_interval(times["recorded"], times["eager"])),
    }


def recording_row(bench: Bench, context: int, size: int) -> dict[str, Any]:
    """Return the seconds in which an engine over a block pool records all batch sizes."""
    head, base = bench.head("eagle3"), recorded_base(bench.base)
    length = context + 8 * (head.depth + 1)
    pool = base.pool(size * -(-(length + 2 * (head.depth + 1)) // 16))
    serving = Engine(base, head, max_batch=size, max_length=length, pool=pool)
    sizes = list[int]()
    record = partial(serving.record_steps, context)
    seconds = seconds_of(base.device, lambda: sizes.extend(record()))
    return {"context": context, "batch_sizes": sizes, "seconds": seconds}


def _transformers(bench: Bench, count: int, **options: Any) -> Any:
    tokens = torch.tensor([bench.prompt()], device=bench.base.device)
    options |= {"attention_mask": torch.ones_like(tokens), "do_sample": False, "pad_token_id": 0}
    options |= {"max_new_tokens": count, "min_new_tokens": count}
    return bench.base.model.generate(tokens, **options)  # pyright: ignore[reportCallIssue]


def engine(bench: Bench) -> list[dict[str, Any]]:
    """Return tokens/s of the engine by batch: alone, with a head in a chain, and with goodput."""
    head = bench.head("mlp_speculator")
    cost = step_cost(bench, head, bench.context, sorted({1, *bench.batches[1:3]}))["cost"]
    return [engine_row(bench, head, cost, size, bench.context) for size in bench.batches]


def step_cost(bench: Bench, head: Any, context: int, batches: Sequence[int]) -> dict[str, Any]:
    """Return the fitted cost of steps by batch and nodes: what goodput chooses by."""
    # it needs datasets, which the other parts do without
    from specheads.measure.step_times import fit_cost, time_steps

    ways, prompts = [], []
    for size in batches:
        for depth in range(head.depth + 1):
            ways.append((head if depth else None, policies.chain(depth)))
            prompts.append([bench.prompt(context, row) for row in range(size)])
    settings = GenerationSettings(max_new_tokens=1)
    points = time_steps(bench.base, ways, prompts, generation=settings, rounds=2)
    cost, error = fit_cost(points)
    return {"cost": cost, "error": error, "points": [asdict(point) for point in points]}


def engine_row(
    bench: Bench, head: Any, cost: Any, size: int, context: int, steps: int = 16
) -> dict[str, Any]:
    """Return what the engine does with a batch of prompts of this length.

    The head has random weights, so which of its drafts are accepted is drawn.
    """
    prompts = [bench.prompt(context, seed) for seed in range(size)]
    arms: dict[str, Any] = {"alone": None, "head": policies.chain(head.depth)}
    if cost is not None:
        arms["goodput"] = Goodput(cost, [RATE] * head.depth)
    results: dict[str, Any] = {"batch": size, "context": context, "rate": RATE, "arms": [*arms]}
    for name, tree in arms.items():
        results[name] = _run_engine(bench.base, head if tree else None, tree, prompts, steps)
    return results


def _run_engine(
    base: FrozenBase, drafter: Any, tree: Any, prompts: list[list[int]], steps: int
) -> dict[str, float]:
    """Return the rate of `steps` steps in which all requests run; prompts are timed apart."""
    nodes = 1 if tree is None else tree.num_nodes
    limit, block = nodes * (steps + 2), 16
    blocks = len(prompts) * -(-(len(prompts[0]) + limit + 2 * nodes) // block)
    serving = Engine(
        base,
        drafter,
        tree=tree,
        acceptance=planted_rule(base),
        max_batch=len(prompts),
        max_length=len(prompts[0]) + limit,
        pool=base.pool(blocks, block),
    )
    streams = [
        serving.submit(Request(prompt=prompt, max_new_tokens=limit, eos_ids=()))
        for prompt in prompts
    ]
    reading = seconds_of(base.device, serving.step)
    num_before = sum(len(stream.tokens) for stream in streams)
    seconds = seconds_of(base.device, lambda: [serving.step() for _ in range(steps)])
    new_tokens = sum(len(stream.tokens) for stream in streams) - num_before
    for stream in streams:
        stream.cancel()
    return {
        "tokens_per_second": new_tokens / seconds,
        "tokens_per_forward": new_tokens / steps / len(prompts),
        "step_milliseconds": 1e3 * seconds / steps,
        "first_step_seconds": reading,
        "steps": steps,
    }


PARTS: dict[str, Callable[[Bench], Any]] = {
    "steps": steps,
    "batch": lambda bench: [batch_row(bench, size) for size in bench.batches],
    "ledger": lambda bench: {kind: ledger_row(bench, kind) for kind in bench.heads},
    "alone": alone,
    "graphs": lambda bench: [graphs_row(bench, size) for size in bench.batches],
    "engine": engine,
}


if __name__ == "__main__":
    raise SystemExit(main())

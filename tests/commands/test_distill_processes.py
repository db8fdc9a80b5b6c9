"""`specheads distill` in several processes: they share the work, and any number resumes it."""

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import specheads
from specheads.commands import distill as distill_command  # noqa: F401 - before the children fork
from specheads.config.training import DistillSettings
from specheads.core.errors import InputError
from specheads.training.distill import engines
from tests import tiny
from tests.commands.test_kills import Moment, act
from tests.training.distill.fake_engine import shards
from tests.training.in_processes import FORK, started

TEXTS, SHARD = 48, 4
WORDS = [
    "recipe=smoke", "data=files", "data.max_documents=0", "base.device=cpu", "base.dtype=float32",
    f"num_samples={TEXTS}", f"shard_size={SHARD}", "batch_size=4", "new_tokens=12",
    "prompt_tokens=8", "temperature=1.0",
]  # fmt: skip


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("shared")
    base = tiny.saved(folder / "base")
    for number in range(8):
        text = "".join(f"def add_{number}_{line}(a, b): return a\n" for line in range(60))
        (folder / f"{number}.py").write_text(text)
    return [*WORDS, f"base.model={base}", f"data.path={folder}/*.py"]


def start(words: list[str], out: Path, count: int, moment: Moment | None) -> list[int | None]:
    """Generate in forked processes; kill them all at the moment; return their exit codes."""
    reader, writer = os.pipe()
    ranks = started(count, act, words, out, moment, writer, "distill", by=FORK)
    os.close(writer)
    if os.read(reader, 1):
        for process in ranks:
            process.kill()
    for process in ranks:
        process.join()
    os.close(reader)
    return [process.exitcode for process in ranks]


# files of the folder that rank r opens or renames: its lock, the fingerprint, and three a shard
MOMENTS = [(0, 1), (3, 1), (0, 5), (1, 6), (2, 9), (3, 11)]


@pytest.mark.slow
def test_killed_in_four_processes_and_resumed_in_two_gives_the_same_texts(
    words: list[str], tmp_path: Path
):
    alone = tmp_path / "alone"
    assert start(words, alone, 1, None) == [0]
    complete = shards(alone)
    assert len(complete) == TEXTS // SHARD
    before = []
    for number, (rank, count) in enumerate(MOMENTS):
        out = tmp_path / str(number)
        moment = Moment(rank, f"/{number}/", count)
        assert -signal.SIGKILL in start(words, out, 4, moment), Path(f"{out}.log").read_text()
        before.append(len(shards(out)))
        assert start(words, out, 2, None) == [0, 0], Path(f"{out}.log").read_text()
        assert shards(out) == complete
    assert min(before) < max(before) < len(complete), before


class FakeLLM:
    """Stands for vLLM on the GPUs that its process sees."""

    calls: list[dict[str, Any]]

    def __init__(self, **settings: Any) -> None:
        FakeLLM.calls.append(settings | {"environment": dict(os.environ)})
        self.llm_engine = SimpleNamespace(
            engine_core=SimpleNamespace(shutdown=lambda: None), abort_request=print
        )


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    FakeLLM.calls = []
    modules = {
        "vllm": SimpleNamespace(LLM=FakeLLM),
        "vllm.exceptions": SimpleNamespace(VLLMError=ValueError),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (60 - 10 * number, 80))
    return FakeLLM.calls


def test_each_process_gives_vllm_gpus_of_its_own_and_their_free_memory(
    fake_vllm: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
):
    launcher = {"LOCAL_RANK": "1", "RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}
    for name, value in {**launcher, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    base, before = tiny.base(), dict(os.environ)
    settings = DistillSettings(num_samples=8, engine="vllm", tensor_parallel=2)
    engines.vllm_engine(settings, base, 32)
    (call,) = fake_vllm
    assert call["environment"]["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert not {*launcher, "TORCHELASTIC_USE_AGENT_STORE"} & call["environment"].keys()
    assert (call["tensor_parallel_size"], call["max_model_len"]) == (2, 32)
    assert call["gpu_memory_utilization"] == pytest.approx(30 / 80 - engines.MARGIN)
    assert dict(os.environ) == before
    settings.gpu_memory_utilization = 0.5
    engines.vllm_engine(settings, base, 32)
    assert fake_vllm[1]["gpu_memory_utilization"] == 0.5
    settings.tensor_parallel = 3
    with pytest.raises(InputError, match="there are 4; start at most 1 processes"):
        engines.vllm_engine(settings, base, 32)


def test_training_lets_vllm_write_before_its_base_is_loaded(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from specheads.commands import train
    from specheads.training.distill import run as distill

    loads, local = [], distill.build_engine

    def load(name: str) -> Any:
        function = getattr(train, name)

        def loading(*arguments: Any) -> Any:
            loads.append(name)
            return function(*arguments)

        return loading

    def build(settings: DistillSettings, *arguments: Any) -> Any:
        loads.append(settings.engine)
        settings.engine = "local"
        return local(settings, *arguments)

    for name in ("load_base", "load_text_base"):
        monkeypatch.setattr(train, name, load(name))
    monkeypatch.setattr("specheads.training.distill.run.build_engine", build)
    phase = "schedule.phases.distilled"
    overrides = [*words[:5], *words[-2:], "head.inner_dim=16", "evaluate_after=false"]
    overrides += ["validation.rows=0", "validation.prompts=0", f"run_dir={tmp_path}/run"]
    overrides += ["schedule.phases.corpus.steps=1", f"{phase}.steps=1", f"{phase}.batch_size=2"]
    overrides += [
        "schedule.phases.corpus.sequence_length=32",
        "schedule.phases.corpus.batch_size=2",
    ]
    overrides += [f"{phase}.distill.{word}" for word in WORDS[5:]]
    specheads.train(overrides=[*overrides, f"{phase}.distill.engine=vllm"])
    assert loads == ["load_text_base", "vllm", "load_base"]

"""The local engine: the same text with any batch and head, and after kills."""

import multiprocessing
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from specheads.config.training import DistillSettings
from specheads.core.errors import InputError
from specheads.decoding.generate import generate
from specheads.decoding.sampling import Sampling
from specheads.heads.load import build_for_base
from specheads.runs.progress import progress_display
from specheads.training.distill import engines, run
from specheads.training.distill.engines import GeneratedAnswer, GenerationRequest
from specheads.training.distill.run import build_engine, write_folder, write_texts
from specheads.training.processes import on_all_processes
from tests import tiny
from tests.training.distill.fake_engine import FakeChats, job, shards
from tests.training.in_processes import forked

HEAD = {"kind": "mlp_speculator", "depth": 3, "inner_dim": 16}
FORK = multiprocessing.get_context("fork")
SETTINGS = DistillSettings(
    num_samples=24, new_tokens=12, batch_size=4, shard_size=4, temperature=0.9, drop=[]
)
"""The tiny base never ends a text: every answer has maximum length and is kept."""


class UnevenPrompts(FakeChats):
    """The same with prompts of two, four and six tokens."""

    def first_prompt(self, number: int) -> list[int]:
        return super().first_prompt(number) * (1 + number % 3)


class SingleTurnPrompts(FakeChats):
    """The same with one turn in each text."""

    def next_prompt(self, number: int, tokens: list[int], answers: list[list[int]]) -> None:
        del number, tokens, answers


def write(folder: Path, batch_size: int = 4, head=None, max_length: int = 0, **changes) -> None:
    settings = replace(SETTINGS, num_samples=8, **changes)
    text_job = job(folder, settings=settings, prompts=UnevenPrompts())
    engine = build_engine(replace(settings, batch_size=batch_size), tiny.base(), head, max_length)
    for _ in write_texts(text_job, lambda _: engine):
        pass


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_text_does_not_depend_on_batch_head_and_memory(temperature, tmp_path, monkeypatch):
    head = build_for_base(HEAD, tiny.base()).double().eval()
    write(tmp_path / "one", 1, temperature=temperature)
    write(tmp_path / "many", 8, temperature=temperature)
    write(tmp_path / "rows", 3, max_length=100, temperature=temperature)
    write(tmp_path / "drafted", 3, head, temperature=temperature)
    monkeypatch.setattr(engines, "COMMON_TOKENS", 4)
    write(tmp_path / "pooled", 3, head, temperature=temperature)
    for name in ("many", "rows", "drafted", "pooled"):
        assert shards(tmp_path / name) == shards(tmp_path / "one"), name


def test_answer_equals_generate_with_the_same_seed():
    request = GenerationRequest(5, [3, 4, 5], 12, Sampling(temperature=0.9, seed=7))
    waiting = [request]
    engine = build_engine(SETTINGS, tiny.base())
    *_, answer = engine(lambda: waiting.pop() if waiting else None)
    assert isinstance(answer, GeneratedAnswer)
    generated = generate(
        tiny.base(), None, [request.tokens], max_new_tokens=12, sampling=[request.sampling]
    )
    assert answer.tokens == generated.tokens[0]


def test_progress_counts_tokens_of_answers_in_flight(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "TICK_SECONDS", 0.0)
    text_job = job(tmp_path, settings=replace(SETTINGS, num_samples=4), prompts=SingleTurnPrompts())
    progress = list(write_texts(text_job))
    counts = [state.tokens for state in progress if not state.texts]
    assert counts == sorted(counts)
    # the first step reads the prompts and gives two tokens of each text, later ones one
    assert [*dict.fromkeys(counts)] == [0, *range(8, 49, 4)]
    assert {state.tokens for state in progress if state.texts} == {48}


def write_all(folder: Path) -> None:
    torch.set_num_threads(1)
    for _ in write_texts(job(folder, settings=SETTINGS, prompts=FakeChats())):
        pass


@pytest.fixture(scope="module")
def complete_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("complete")
    write_all(folder)
    return folder


def test_two_kills_do_not_change_the_text(complete_text: Path, tmp_path: Path):
    for num_shards in (1, 3):
        process = FORK.Process(target=write_all, args=(tmp_path,))
        process.start()
        while process.is_alive() and len(shards(tmp_path)) < num_shards:
            time.sleep(0.001)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    assert len(shards(tmp_path)) < len(shards(complete_text))
    write_all(tmp_path)
    assert shards(tmp_path) == shards(complete_text)
    assert not list(tmp_path.glob(".*"))


def write_shared(folder: Path, num_samples: int) -> None:
    accelerator = Accelerator(cpu=True)
    text_job = job(
        folder,
        settings=replace(SETTINGS, num_samples=num_samples),
        prompts=FakeChats(),
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
    )
    with progress_display(shown=False) as bar:
        report = write_folder(text_job, bar, lambda: None)
    assert (report is None) == (accelerator.process_index > 0)


def test_process_without_text_waits_for_the_other(tmp_path: Path):
    num_samples = SETTINGS.shard_size
    for name, count in (("one", 1), ("two", 2)):
        assert forked(count, write_shared, tmp_path / name, num_samples) == [0] * count
    assert len(shards(tmp_path / "one")) == 1
    assert shards(tmp_path / "two") == shards(tmp_path / "one")


def refused_in_one() -> None:
    accelerator = Accelerator(cpu=True)

    def refuse() -> None:
        if accelerator.process_index == 1:
            raise InputError("a rule, a value; a remedy")

    with pytest.raises(InputError, match="a rule, a value; a remedy"):
        on_all_processes(refuse)


def test_error_on_one_process_is_raised_on_all():
    assert forked(3, refused_in_one) == [0, 0, 0]

"""Validation equals the objective and does not change training; the best head is saved."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from specheads.base.model import FrozenBase
from specheads.config import compose
from specheads.config.training import JointSettings, Phase, Schedule
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.data.packing import TokenBatch
from specheads.data.tokenise import tokenise_corpus
from specheads.heads.load import build_for_base, load_head
from specheads.measure.counts import compute_rate
from specheads.measure.generation import GenerationSettings, decode_prompts
from specheads.runs import checkpoint
from specheads.runs.directory import RunDirectory
from specheads.runs.trackers import read_metrics
from specheads.training import log, trainer
from specheads.training.log import SCORE, ValidationSet, validate
from specheads.training.objective import Objective
from specheads.training.phase_data import PhaseData
from specheads.training.schedule import ScheduledPhase
from specheads.training.step import StepRunner, Teacher
from tests import tiny
from tests.packed import alone, packed, texts
from tests.slow import slow_except
from tests.training import test_joint
from tests.training.in_processes import STEP_FLOPS, StopError
from tests.training.test_joint import fresh_base
from tests.training.test_trainer import assert_equal, phase, power_cut, run_training

PROMPTS = ValidationSet(
    None, every=1, prompts=tiny.prompts(), new_tokens=16, identity="three of 16"
)


def served(base: FrozenBase, folder: Path) -> float:
    """Return the tokens per forward of a saved head on the same prompts."""
    head = load_head(folder, base)
    settings = GenerationSettings(max_new_tokens=PROMPTS.new_tokens, batch_size=3)
    return compute_rate(
        [prompt.counts for prompt in decode_prompts(base, head, tiny.prompts(), settings)]
    ).tokens_per_forward


def scores(folder: Path) -> dict[int, float]:
    rows = read_metrics(folder / "metrics.jsonl")
    return {row["step"]: row[SCORE] for row in rows if SCORE in row}


def best(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "best" / "best.json").read_text())


@pytest.mark.parametrize("kind", slow_except(["eagle3"], ["mlp_speculator", "eagle3", "dspark"]))
def test_best_head_is_saved_with_its_score(kind: str, tmp_path: Path):
    schedule = Schedule(phases={"corpus": phase(steps=8, learning_rate=3e-2)})
    run_training(tmp_path, schedule, kind=kind, held_out=replace(PROMPTS, every=2))
    score_of_step, record = scores(tmp_path), best(tmp_path)
    assert sorted(score_of_step) == [2, 4, 6, 8]
    assert record["tokens_per_forward"] == max(score_of_step.values())
    highest = [
        step for step, score in score_of_step.items() if score == max(score_of_step.values())
    ]
    assert record["step"] == highest[0]
    assert record["tokens"] == 32 * record["step"]
    base = tiny.base("llama", dtype=torch.float32)
    assert served(base, tmp_path / "best") == record["tokens_per_forward"]


def test_adapter_is_saved_with_the_best_head(tmp_path: Path):
    base = test_joint.fresh_base(dtype=torch.float32)
    phases = {
        "joint": test_joint.phase(joint=JointSettings(rank=2, learning_rate=5e-2)),
        "corpus": test_joint.phase(),
    }
    validation_set = replace(PROMPTS, every=2)
    RunDirectory(tmp_path).begin("name: joint\n", {"base_fingerprint": "the frozen weights"})
    head, run = test_joint.run_training(tmp_path, base, phases, held_out=validation_set)
    record = best(tmp_path)
    assert record["tokens_per_forward"] == max(scores(tmp_path).values())
    base_record = json.loads((run.best / "base.json").read_text())
    assert base_record["adapter"] == "adapter"
    assert base_record["base_fingerprint"] == "the frozen weights"
    base.merge(run.best / "adapter")
    assert served(base, run.best) == record["tokens_per_forward"]
    assert head.base_fingerprint


def by_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make scores depend on the weights in a scripted way."""

    def score(prompts: object, new_tokens: object, teacher: Any, total: object) -> float:
        del prompts, new_tokens, total
        weights = torch.cat([value.flatten() for value in teacher.head.parameters()])
        return 1.0 + int(weights.double().sum().abs().item() * 1e7) % 1000 / 1000

    monkeypatch.setattr(log, "tokens_per_forward", score)


def crashing(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, at: int, after: bool
) -> Callable[[], int]:
    """Make the n-th call of a function fail as in a power cut."""
    act, calls = getattr(owner, name), []

    def acting(*arguments: Any) -> Any:
        calls.append(0)
        if len(calls) == at and not after:
            raise StopError
        result = act(*arguments)
        if len(calls) == at:
            raise StopError
        return result

    monkeypatch.setattr(owner, name, acting)
    return lambda: len(calls)


WAYS: dict[str, tuple[Any, str, bool]] = {
    "in a step": (StepRunner, "step", False),
    "before the best is kept": (RunDirectory, "keep_best", False),
    "between the best and a checkpoint": (RunDirectory, "keep_best", True),
    "before a checkpoint": (checkpoint, "save", False),
    "after a checkpoint": (checkpoint, "save", True),
}


SOME_CALLS, CALLS = (1, 5, 2), (1, 2, 3, 5, 4, 2, 1)
"""The calls that fail, one of each run."""


@pytest.mark.parametrize(
    ("way", "calls"),
    slow_except([(way, SOME_CALLS) for way in WAYS], product(WAYS, (SOME_CALLS, CALLS))),
)
def test_resume_keeps_the_best_head(
    way: str, calls: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    by_weights(monkeypatch)
    schedule = Schedule(phases={"corpus": phase(steps=8), "distilled": phase(steps=8)})
    reference_folder, resumed_folder = tmp_path / "whole", tmp_path / "parts"
    run_training(reference_folder, schedule, held_out=PROMPTS)
    for at in calls:
        with monkeypatch.context() as patch:
            owner, name, after = WAYS[way]
            crashing(patch, owner, name, at, after)
            try:
                run_training(resumed_folder, schedule, checkpoint_every=3, held_out=PROMPTS)
            except StopError:
                continue
    head = run_training(resumed_folder, schedule, checkpoint_every=3, held_out=PROMPTS)
    assert scores(resumed_folder) == scores(reference_folder)
    assert best(resumed_folder) == best(reference_folder)
    for file in ("best/model.safetensors", "phases/distilled/model.safetensors"):
        weights, expected = load_file(resumed_folder / file), load_file(reference_folder / file)
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert isinstance(head, Head)


def test_scores_on_other_prompts_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    remaining_scores = iter([1.9, 1.8, 1.2, 1.3])
    monkeypatch.setattr(log, "tokens_per_forward", lambda *_: next(remaining_scores))
    schedule = Schedule(phases={"corpus": phase(steps=4)})
    with power_cut(2):
        run_training(tmp_path, schedule, checkpoint_every=2, held_out=PROMPTS)
    assert best(tmp_path)["tokens_per_forward"] == 1.9
    run_training(tmp_path, schedule, held_out=replace(PROMPTS, identity="others"))
    assert best(tmp_path) | {"step": 4, "tokens_per_forward": 1.3} == best(tmp_path)


def test_the_best_head_can_become_the_head_of_the_run(tmp_path: Path):
    schedule = Schedule(phases={"corpus": phase(steps=8)})
    head = run_training(tmp_path, schedule, held_out=PROMPTS)
    run = RunDirectory(tmp_path)
    # make the last score worse
    with torch.no_grad():
        for value in head.parameters():
            value.zero_()
    run.config.write_text("a: 1\n")
    run.begin("a: 1\n", {})
    run.end(head, is_best=True)
    for name, value in load_file(run.best / "model.safetensors").items():
        assert torch.equal(head.state_dict()[name], value), name


def test_validation_prompts_are_separate_from_training_and_evaluation(tmp_path: Path):
    settings = compose.settings_of("train", ["recipe=smoke"])
    base, messages = FrozenBase.load(**asdict(settings.base)), []
    assert base.tokenizer is not None
    processes, phases = Accelerator(cpu=True), settings.schedule.phases
    texts = PhaseData(
        phases, settings.data, base, tmp_path, processes, messages.append, settings.seed
    )
    validation_set = texts.validation_set(settings.validation)
    assert validation_set is not None
    assert validation_set.prompts
    assert messages == []
    prompts = [" ".join(map(str, prompt)) for prompt in validation_set.prompts]
    for split, holds in (("validation", True), ("train", False), ("prompts", False)):
        documents = tokenise_corpus(settings.data, split, base.tokenizer, settings.seed)
        words = [" ".join(map(str, documents.tokens(number))) for number in range(len(documents))]
        assert all(any(prompt in text for text in words) == holds for prompt in prompts), split
    # a short split gives a message, and an error only if settings need its score
    settings.validation.prompt_tokens = 100_000
    plain = texts.validation_set(settings.validation)
    assert plain is not None
    assert plain.prompts is None
    assert ["no prompts to decode: " in line for line in messages] == [True]
    settings.validation.keep = "best"
    with pytest.raises(InputError, match=r"needs prompts.*lower validation\.prompt_tokens"):
        texts.validation_set(settings.validation)


def test_times_and_shares_in_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A step takes 3 s after 1 s of waiting; its products take 2 s, and a validation an hour."""
    clock, step, batches = [0.0], StepRunner.step, trainer.prefetched

    def slow_score(*_: Any) -> float:
        clock[0] += 3600.0
        return 1.0

    def slow_step(self: Any, *arguments: Any) -> Any:
        clock[0] += 3.0
        return step(self, *arguments)

    def slow_batches(items: Any) -> Any:
        for item in batches(items):
            clock[0] += 1.0
            yield item

    monkeypatch.setattr("specheads.training.log.time.perf_counter", lambda: clock[0])
    monkeypatch.setattr(trainer, "cached_matmul_rate", lambda *_: STEP_FLOPS / 2)
    monkeypatch.setattr(log, "tokens_per_forward", slow_score)
    monkeypatch.setattr(StepRunner, "step", slow_step)
    monkeypatch.setattr(trainer, "prefetched", slow_batches)
    schedule = Schedule(phases={"corpus": phase(steps=6)})
    validation_set = replace(PROMPTS, every=2)
    with power_cut(4):
        run_training(tmp_path, schedule, checkpoint_every=3, held_out=validation_set)
    run_training(tmp_path, schedule, held_out=validation_set)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [2, 4, 6]
    assert [row["hours"] * 3600 for row in rows] == pytest.approx([8, 16, 24])
    assert [row["tokens_per_second"] for row in rows] == pytest.approx([8] * 3)
    assert [row["data_wait_share"] for row in rows] == [0.25] * 3
    assert [row["mfu"] for row in rows] == [0.5] * 3
    assert all(0.01 < row["peak_gib"] < 1000 for row in rows)


DEPTH = 2


def measured(batches: list[TokenBatch], settings: Phase, kind: str = "eagle3") -> dict[str, float]:
    base = tiny.base()
    torch.manual_seed(1)
    head = build_for_base({"kind": kind, "depth": DEPTH}, base).double()
    teacher = Teacher(base, head)
    scheduled = ScheduledPhase("corpus", settings, 0)
    rows = ValidationSet(batches, 0)
    return validate(rows, teacher, Objective(head), scheduled, lambda values: values)


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_validation_does_not_depend_on_batches_and_packing(kind: str):
    settings = phase(scored_share=0.1)
    documents = texts()
    expected = measured([packed(documents)], settings, kind)
    assert set(expected) == {
        "validation/loss", "validation/loss/depth_0", "validation/loss/depth_1",
        "validation/accept/depth_0", "validation/accept/depth_1",
    }  # fmt: skip
    for batch in (packed(documents), alone(documents)):
        metrics = measured(list(batch.split(2)), settings, kind)
        assert metrics == pytest.approx(expected, rel=1e-5)
    assert measured([packed(documents)], settings, kind) == expected


def held_out() -> ValidationSet:
    batches, prompts = list(packed(texts()).split(2)), tiny.prompts()
    return ValidationSet(batches, every=2, prompts=prompts, new_tokens=8, identity="three of 8")


def trained(folder: Path, kind: str, validation_set: ValidationSet | None) -> Head:
    kind, _, adapter = kind.partition(" and ")
    joint = JointSettings(rank=2, dropout=0.5) if adapter else None
    schedule = Schedule(phases={"corpus": phase(scored_share=0.6, joint=joint)})
    # the best head names its base, and the run knows it
    RunDirectory(folder).begin("name: watched\n", {"base_fingerprint": "the base"})
    base = fresh_base(dtype=torch.float32)
    return run_training(folder, schedule, kind=kind, base=base, held_out=validation_set)


@pytest.mark.parametrize(
    "kind",
    slow_except(
        ["eagle3", "medusa and adapter"],
        ["mlp_speculator", "eagle3", "dspark", "medusa and adapter"],
    ),
)
def test_validation_does_not_change_training(kind: str, tmp_path: Path):
    plain = trained(tmp_path / "plain", kind, None).state_dict()
    # (not Python's random state: the type checks of tests use it)
    state, numpy_state = torch.get_rng_state(), str(np.random.get_state())
    watched = trained(tmp_path / "watched", kind, held_out()).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    assert str(np.random.get_state()) == numpy_state
    assert_equal(plain, watched)
    rows = read_metrics(tmp_path / "watched" / "metrics.jsonl")
    validation_rows = [row for row in rows if "validation/loss" in row]
    assert [row["step"] for row in validation_rows] == [2, 4, 6]
    assert [row["tokens"] for row in validation_rows] == [64, 128, 192]
    assert all(1.0 <= row["validation/tokens_per_forward"] <= 1 + DEPTH for row in validation_rows)
    plain_rows = read_metrics(tmp_path / "plain" / "metrics.jsonl")
    assert [row["loss"] for row in rows if "loss" in row] == [row["loss"] for row in plain_rows]

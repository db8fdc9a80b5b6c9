"""A run that diverges keeps its finite checkpoints, and the remedy in its line leads on."""

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch import Tensor

from specheads.commands._call import call
from specheads.config.training import JointSettings, Schedule
from specheads.core.features import Features
from specheads.data.packing import TokenBatch
from specheads.runs.directory import RunDirectory
from specheads.training import step as steps
from specheads.training.features import LocalBase
from specheads.training.log import ValidationSet
from specheads.training.step import DivergedError, MicroBatch, StepLoss, StepRunner
from tests import tiny
from tests.packed import packed, texts
from tests.slow import slow_except
from tests.training import in_processes
from tests.training.in_processes import fixed_flops, forked
from tests.training.test_joint import fresh_base, small_corpus
from tests.training.test_trainer import Counting, last_step, phase, run_training

FAULT_STEP = 3
RATE = 1e-2
"""Learning rate of the runs that diverge."""
Loss = Callable[..., StepLoss]


def spoil_loss(loss: StepLoss, micro_batch: MicroBatch) -> StepLoss:
    """Return a loss that is not a number in one step, unless the learning rate is lower."""
    if micro_batch.step == FAULT_STEP and micro_batch.phase.settings.learning_rate == RATE:
        return loss._replace(
            total=loss.total * torch.nan, metrics=loss.metrics | {"loss": loss.total * torch.nan}
        )
    return loss


def spoil_gradients(loss: StepLoss, micro_batch: MicroBatch) -> StepLoss:
    """Return a finite loss whose gradients are not finite."""
    if micro_batch.step == FAULT_STEP and micro_batch.phase.settings.learning_rate == RATE:
        return loss._replace(total=loss.total + (loss.total * 0.0).sqrt().sqrt())
    return loss


@contextmanager
def spoiled(change: Callable[[StepLoss, MicroBatch], StepLoss]) -> Iterator[None]:
    """Change the losses of the steps inside the context."""
    compute_loss: Loss = steps.compute_loss

    def compute(micro_batch: MicroBatch, *arguments: Any) -> StepLoss:
        return change(compute_loss(micro_batch, *arguments), micro_batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "compute_loss", compute)
        yield


@contextmanager
def spoiled_weights() -> Iterator[None]:
    """Make a weight infinite by an update with finite gradients."""
    update = StepRunner._update

    def spoil(self: StepRunner, rates: dict[str, float]) -> Tensor:
        norm = update(self, rates)
        weight = next(self.head.parameters())
        if len(self.optimizers[0].state[weight]) and self.optimizers[0].state[weight]["step"] == 4:
            weight.data.view(-1)[0] = torch.inf
        return norm

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepRunner, "_update", spoil)
        yield


@contextmanager
def overflowing_base(dtype: torch.dtype = torch.float32) -> Iterator[None]:
    """Let hidden states of a base in this dtype be infinite in one step."""
    features = LocalBase.features
    with pytest.MonkeyPatch.context() as patch:
        count = 0

        def overflow(self: LocalBase, batch: TokenBatch) -> Features:
            nonlocal count
            count += not batch.tokens.is_meta
            result = features(self, batch)
            if count == FAULT_STEP + 1 and self.base.dtype == dtype:
                result.hidden[:] = torch.inf
            return result

        patch.setattr(LocalBase, "features", overflow)
        yield


def checkpoints_are_finite(run: RunDirectory) -> bool:
    files = [*run.path.glob("checkpoints/*/*.safetensors"), *run.path.glob("best/*.safetensors")]
    values = [value for file in files for value in load_file(file).values()]
    return all(value.isfinite().all() for value in values)


LOWER = r"lower learning_rate: run .* with schedule.phases.corpus.learning_rate=0.001"
CASES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "loss": (lambda: spoiled(spoil_loss), {}, rf"loss and gradient must be .* step 4 .*; {LOWER}"),
    "gradients": (lambda: spoiled(spoil_gradients), {}, rf"step 4 has one that is not; {LOWER}"),
    "weights": (spoiled_weights, {}, rf"weight must be finite, .*; {LOWER}"),
    "base": (overflowing_base, {}, "base exceed float32, .*; choose another base.model="),
    "muon": (
        lambda: spoiled(spoil_loss),
        {"muon_learning_rate": 0.02},
        rf"{LOWER} schedule.muon_learning_rate=0.002",
    ),
}


@pytest.mark.parametrize(
    ("case", "log_every", "checkpoint_every"),
    [*((case, 40, 1) for case in CASES), ("loss", 1, 2), ("weights", 1, 2), ("base", 40, 0)],
)
def test_diverged_run_keeps_only_finite_checkpoints(
    case: str, log_every: int, checkpoint_every: int, tmp_path: Path
):
    fault, settings, line = CASES[case]
    schedule = Schedule(phases={"corpus": phase(steps=9)}, **settings)
    prompts = ValidationSet(None, every=5, prompts=tiny.prompts(), new_tokens=4)
    with fault(), pytest.raises(DivergedError, match=line):
        run_training(
            tmp_path,
            schedule,
            log_every=log_every,
            checkpoint_every=checkpoint_every,
            held_out=prompts,
        )
    run = RunDirectory(tmp_path)
    # after the weights of step 4 there is none
    assert last_step(run) == {0: 0, 1: FAULT_STEP, 2: 2}[checkpoint_every]
    assert checkpoints_are_finite(run)
    assert not run.phases.exists()
    assert not run.best.exists()


def test_joint_phase_names_both_learning_rates(tmp_path: Path):
    joint = phase(joint=JointSettings(rank=2, learning_rate=5e-3))
    line = f"{LOWER} schedule.phases.corpus.joint.learning_rate=0.0005"
    with spoiled(spoil_loss), pytest.raises(DivergedError, match=line):
        run_training(
            tmp_path,
            Schedule(phases={"corpus": joint}),
            base=fresh_base(dtype=torch.float32),
            kind="medusa",
        )


def test_validation_that_is_not_finite_stops_before_the_best_head(tmp_path: Path):
    """Some held-out text exceeds the dtype of the base, and no training text does."""
    base = fresh_base(dtype=torch.float32)
    common = Counting(tiny.VOCAB).sentence
    rare = next(token for token in range(tiny.VOCAB) if token not in common)
    base.embedding[rare] = torch.inf
    rows = packed([common[text % len(common)] for text in texts()])
    prompts = [common[:5].tolist()]
    held_out = ValidationSet([rows], every=2, prompts=prompts, new_tokens=4)
    schedule = Schedule(phases={"corpus": phase()})
    options: dict[str, Any] = {"base": base, "kind": "medusa"}
    run_training(tmp_path / "finite", schedule, held_out=held_out, **options)
    tokens = rows.tokens.clone()
    tokens[0, 5] = rare
    spoiled_rows = replace(held_out, batches=[replace(rows, tokens=tokens)])
    line = "validation loss must be finite, .* of the base exceed float32, "
    with pytest.raises(DivergedError, match=line):
        run_training(
            tmp_path / "spoiled", schedule, held_out=spoiled_rows, checkpoint_every=1, **options
        )
    run = RunDirectory(tmp_path / "spoiled")
    assert last_step(run) == 1
    assert not run.best.exists()


def diverge_on_one_process(folder: Path, rank: str) -> None:
    """Train with gradients that are not finite on one process only."""
    with spoiled(spoil_gradients if os.environ["RANK"] == rank else lambda loss, _: loss):
        try:
            in_processes.train(folder, choices={"checkpoint_every": 1})
        except DivergedError as error:
            (folder / f"line-{os.environ['RANK']}").write_text(str(error))


@pytest.mark.parametrize("rank", slow_except(["1"], ["0", "1"]))
def test_gradients_of_one_process_stop_all(rank: str, tmp_path: Path):
    assert forked(2, diverge_on_one_process, tmp_path, rank) == [0, 0]
    lines = [(tmp_path / f"line-{number}").read_text() for number in range(2)]
    assert lines[0] == lines[1]
    assert re.search(LOWER, lines[0])
    run = RunDirectory(tmp_path)
    assert last_step(run) == FAULT_STEP
    assert checkpoints_are_finite(run)


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    # one process changes its precision, as two commands do
    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setattr(sys, "argv", ["train", *words])
    with fixed_flops():
        call("train", words)


COMMAND = (
    "recipe=smoke", "schedule=corpus_only", "~schedule.phases.distilled", "data=jsonl",
    "data.max_documents=0", "validation.rows=0", "validation.prompts=0",
    "schedule.phases.corpus.steps=8", "schedule.phases.corpus.batch_size=2",
    "schedule.phases.corpus.sequence_length=64", f"schedule.phases.corpus.learning_rate={RATE}",
    "checkpoint_every=1", "log_every=40", "evaluate_after=false",
)  # fmt: skip


@pytest.mark.parametrize(
    "is_base", slow_except([False], [False, True]), ids=["learning rate", "dtype"]
)
def test_remedy_in_the_line_resumes_the_run(is_base: bool, tmp_path, monkeypatch, capsys):
    run = RunDirectory(tmp_path / "run")
    words = (*COMMAND, f"data.path={small_corpus(tmp_path, 60, 8)}", f"run_dir={run.path}")
    words += (f"base.dtype={'bfloat16' if is_base else 'float32'}",)
    fault = overflowing_base(torch.bfloat16) if is_base else spoiled(spoil_loss)
    with fault:
        with pytest.raises(SystemExit):
            command(monkeypatch, *words)
        line = capsys.readouterr().err.splitlines()[-1]
        remedy = re.findall(r"\S+=[\w.-]+\w", line)
        # other settings may not change
        with pytest.raises(SystemExit):
            command(monkeypatch, *words, *remedy, "schedule.phases.corpus.decay=0.5")
        assert "decay was 1.0, now 0.5" in capsys.readouterr().err
        assert last_step(run) == FAULT_STEP
        command(monkeypatch, *words, *remedy)
    provenance = json.loads(run.provenance.read_text())
    (fix,) = provenance["fixes"]
    name, value = remedy[0].split("=")
    assert (fix["setting"], str(fix["now"])) == (name, value)
    assert fix["diverged"] == {"step": FAULT_STEP, "by_base": is_base}
    assert "diverged" not in provenance
    assert run.finished


def test_checkpoint_with_weights_that_lead_to_the_fault_is_not_resumed(tmp_path: Path):
    """With another learning rate a run goes on from before it."""
    run = RunDirectory(tmp_path)
    before = "schedule: {phases: {a: {learning_rate: 0.1, lk_eta: 3.0}}}\n"
    run.begin(before, {"base_fingerprint": "x"})
    for step in (1, 2, 3):
        (run.checkpoints / f"step-{step}").mkdir(parents=True)
    after = before.replace("0.1", "0.01")
    with pytest.raises(ValueError, match=r"learning_rate was 0.1, now 0.01"):
        run.begin(after, {"base_fingerprint": "x"})
    run.mark_diverged(3, by_base=False)
    run.begin(after, {"base_fingerprint": "x"})
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-1", "step-2"]

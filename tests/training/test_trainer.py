"""Training: the schedule, the frozen base, bitwise resume and interrupts."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn

from specheads.base.ends import BaseEnds
from specheads.config.compose import settings_of
from specheads.config.shared import TrackerSettings
from specheads.config.training import DistillSettings, Phase, Schedule
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.core.machine import computes_bfloat16
from specheads.core.signals import ONE_REQUEST_SECONDS
from specheads.data.packing import BatchStream, TokenBatch
from specheads.heads.load import build_for_base, build_head
from specheads.runs import checkpoint
from specheads.runs.directory import RunDirectory
from specheads.runs.trackers import Tracker, read_metrics
from specheads.training import trainer
from specheads.training.objective import Objective, draft_labels
from specheads.training.processes import accelerator_of_environment
from specheads.training.schedule import Muon, ScheduledPhase, optimizers, refuse_misfit
from specheads.training.step import StepRunner
from specheads.training.trainer import prefetched
from tests import tiny
from tests.slow import each_kind
from tests.training.in_processes import StopError, fixed_flops


def last_step(run: RunDirectory) -> int:
    snapshot = checkpoint.load_newest(run.checkpoints)
    return snapshot.state["step"] if snapshot else 0


def phase(**changes: Any) -> Phase:
    usual: dict[str, Any] = {"text": "corpus", "steps": 6, "batch_size": 2}
    usual |= {"sequence_length": 16, "learning_rate": 1e-2}
    return Phase(**usual | changes)


class Counting:
    """Text that repeats one sentence; its cursor is the number of batches."""

    def __init__(self, vocab_size: int) -> None:
        self.sentence = torch.randperm(vocab_size, generator=torch.manual_seed(5))[:11]

    def batches(
        self, cursor: dict[str, Any] | None = None
    ) -> Iterator[tuple[TokenBatch, dict[str, Any]]]:
        number = cursor["number"] if cursor else 0
        while True:
            positions = torch.arange(32).view(2, 16) + 3 * number
            tokens = self.sentence[positions % 11]
            number += 1
            yield TokenBatch(tokens, torch.ones_like(tokens, dtype=torch.bool)), {"number": number}


def run_training(
    folder: Path,
    schedule: Schedule,
    *,
    kind: str = "mlp_speculator",
    base: BaseEnds | None = None,
    text: BatchStream | None = None,
    open_text: Callable[..., BatchStream] | None = None,
    accelerator: Accelerator | None = None,
    log_every: int = 2,
    dtype: torch.dtype = torch.float32,
    **choices: Any,
) -> Head:
    """Train a head of depth 2 on one process, by default on a repeated sentence."""
    base = base or tiny.base("llama", dtype=torch.float32)
    torch.manual_seed(0)
    head = build_for_base({"kind": kind, "depth": 2}, base).to(dtype)
    run, stream = RunDirectory(folder), text or Counting(base.vocab_size)
    with fixed_flops():
        trainer.train(
            base,
            head,
            schedule,
            open_text or (lambda *_: stream),
            run,
            Tracker(run.metrics, TrackerSettings()),
            accelerator or Accelerator(cpu=True),
            log_every=log_every,
            **choices,
        )
    return head


@contextmanager
def power_cut(number: int) -> Iterator[None]:
    """Stop training before a step; only the last checkpoint survives."""
    step = StepRunner.step

    def crash(self: StepRunner, batch: TokenBatch, phase: ScheduledPhase, current_step: int) -> Any:
        if current_step == number:
            raise StopError
        return step(self, batch, phase, current_step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepRunner, "step", crash)
        with pytest.raises(StopError):
            yield


def assert_equal(state: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare two state dicts bit for bit."""
    assert state.keys() == expected.keys()
    for name, value in state.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize(
    ("step", "share"), [(0, 0.0), (375, 0.75), (750, 0.994460), (7500, 0.55), (15000, 0.1)]
)
def test_every_phase_has_ibms_learning_rates(step: int, share: float):
    later = ScheduledPhase("distilled", phase(steps=15000, final_share=0.1, learning_rate=1.0), 400)
    assert later.rates(400 + step)["head"] == pytest.approx(share, abs=1e-5)


@pytest.mark.parametrize("kind", each_kind())
def test_base_is_frozen_and_all_head_parameters_change(kind: str, tmp_path: Path):
    base = tiny.base("llama", dtype=torch.float32)
    before = {name: value.clone() for name, value in base.model.state_dict().items()}
    torch.manual_seed(0)
    fresh = build_for_base({"kind": kind, "depth": 2}, base)
    start = {name: value.clone() for name, value in fresh.named_parameters()}
    trained = run_training(tmp_path, Schedule(phases={"corpus": phase()}), kind=kind)
    assert_equal(base.model.state_dict(), before)
    still = [name for name, value in trained.named_parameters() if torch.equal(value, start[name])]
    assert still == []


def test_training_lowers_the_loss_and_raises_agreement(tmp_path: Path):
    run_training(tmp_path, Schedule(phases={"corpus": phase(steps=60)}))
    rows = read_metrics(RunDirectory(tmp_path).metrics)
    # the minimum is the base's entropy, which is high for a random base
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.5
    assert rows[-1]["accept/depth_0"] > rows[0]["accept/depth_0"] + 0.2
    assert set(rows[0]) == {
        "step", "phase", "tokens", "loss", "loss/depth_0", "loss/depth_1",
        "accept/depth_0", "accept/depth_1", "learning_rate", "tokens_per_second",
        "hours", "data_wait_share", "peak_gib", "mfu",
    }  # fmt: skip
    assert [row["tokens"] for row in rows[:2]] == [64, 128]


@pytest.mark.parametrize(
    ("muon", "kind"),
    [(0.0, "mlp_speculator"), (0.02, "mlp_speculator"), (0.02, "eagle3")],
    ids=["adamw", "muon", "calibrated"],
)
def test_resumed_training_equals_uninterrupted_training(muon, kind, tmp_path: Path):
    """Bitwise, across phases, with random label masks in each step."""
    schedule = Schedule(
        phases={
            "corpus": phase(scored_share=0.6),
            "distilled": phase(steps=5, learning_rate=5e-3, scored_share=0.6),
        },
        muon_learning_rate=muon,
    )
    reference_head = run_training(tmp_path / "whole", schedule, kind=kind)
    for crash_at in (4, 9):
        with power_cut(crash_at):
            run_training(tmp_path / "parts", schedule, kind=kind, checkpoint_every=3)
    resumed_head = run_training(tmp_path / "parts", schedule, kind=kind, checkpoint_every=3)
    assert_equal(reference_head.state_dict(), resumed_head.state_dict())
    rows, expected_rows = (
        read_metrics(tmp_path / name / "metrics.jsonl") for name in ("parts", "whole")
    )
    # a row that started before a stop has only the steps since then
    assert [row["step"] for row in rows] == [2, 4, 6, 8, 10, 11]
    assert rows[-1]["loss"] == expected_rows[-1]["loss"]


@pytest.mark.parametrize("at", [2, 5], ids=["in a phase", "in its last step"])
def test_interrupt_leaves_a_checkpoint_to_resume(at, tmp_path, monkeypatch):
    schedule = Schedule(phases={"corpus": phase(), "distilled": phase()})
    step = StepRunner.step

    def interrupted(self, batch, phase, number):
        if number == at:
            # timeout(1) signals the process and then its group
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)
        return step(self, batch, phase, number)

    monkeypatch.setattr(StepRunner, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_training(tmp_path, schedule)
    run = RunDirectory(tmp_path)
    assert last_step(run) == at + 1
    assert run.phases.exists() == (at == 5)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    monkeypatch.undo()
    run_training(tmp_path, schedule)
    assert last_step(run) == 12


def test_second_interrupt_does_not_wait_for_the_step(tmp_path: Path, monkeypatch: Any):
    def interrupted(*_: Any) -> None:
        for _again in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(ONE_REQUEST_SECONDS + 0.1)
        pytest.fail("it went on")

    monkeypatch.setattr(StepRunner, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_training(tmp_path, Schedule(phases={"corpus": phase()}))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


OVERLONG = {
    **{"text": "distilled", "packing": "stream", "sequence_length": 999},
    "distill": DistillSettings(num_samples=99, new_tokens=32),
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_length": 999}, "to 128, the base's context, got 999"),
        ({"sequence_length": 3}, "sequences of 4 tokens, for the depth of the head, .* got 3"),
        (OVERLONG, "got 999; change sequence_length"),
        (
            {"accumulation_steps": 2},
            "2 processes share batch_size=2 with accumulation_steps=2",
        ),
    ],
)
def test_misfit_phase_is_refused(changes: dict, message: str):
    with pytest.raises(InputError, match=message):
        refuse_misfit({"corpus": phase(**changes)}, context=128, depth=2, processes=2)


@pytest.mark.parametrize("processes", [5, 8])
def test_overrides_of_a_refused_batch_size_fit_every_phase(processes: int):
    words = ["recipe=conversations", "data.path=talks.jsonl"]

    def refuse(*overrides: str) -> None:
        phases = settings_of("train", [*words, *overrides]).schedule.phases
        refuse_misfit(phases, context=8192, depth=3, processes=processes)

    refuse("schedule.phases.corpus.batch_size=8", "schedule.phases.distilled.batch_size=8")
    with pytest.raises(InputError, match=f"but {processes} processes") as refused:
        refuse()
    overrides = re.findall(r"schedule\S+=\d+", str(refused.value))
    assert overrides == [
        f"schedule.phases.{name}.batch_size={processes}" for name in ("corpus", "distilled")
    ]
    refuse(*overrides)


def test_a_bfloat16_base_trains_a_head_on_a_cpu_that_emulates_bfloat16(tmp_path: Path):
    assert not computes_bfloat16()
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        base = tiny.base("llama", dtype=torch.bfloat16)
        schedule = Schedule(phases={"corpus": phase(steps=2)})
        accelerator = accelerator_of_environment("bfloat16")
        run_training(tmp_path, schedule, kind="redrafter", base=base, accelerator=accelerator)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def test_label_outside_the_draft_vocabulary_counts_as_rejected():
    #  labels   0 1 2 3 0 1 2 3      draftable: 1 and 3, so half of the rows
    base = tiny.base("llama", dtype=torch.float32)
    counts = torch.zeros(base.vocab_size, dtype=torch.long)
    counts[[1, 3]] = 1
    head = build_for_base({"kind": "mlp_speculator", "depth": 1, "draft_tokens": 2}, base, counts)
    tokens = (torch.arange(16) % 4)[None]
    loss_mask = torch.zeros_like(tokens, dtype=torch.bool)
    loss_mask[:, 4:12] = True
    learner = Objective(head)
    features = base.read(tokens)
    logits_of = base.projection.rows(head.draft_ids)
    batch = TokenBatch(tokens, loss_mask)
    masks = loss_mask, loss_mask & (tokens % 2 == 1)
    loss, draftable_loss = (
        learner(features, batch, draft_labels(head, batch, mask), logits_of, phase())
        for mask in masks
    )
    assert torch.equal(loss.total, draftable_loss.total)
    assert torch.equal(loss.agreement, draftable_loss.agreement / 2)


@pytest.mark.parametrize("kind", ["mlp_speculator", "eagle3"])
def test_states_outside_anchors_do_not_matter(kind, tmp_path, monkeypatch):
    settings = phase(scored_share=0.6, loss="cross_entropy")
    schedule = Schedule(phases={"corpus": settings})
    reference_head = run_training(tmp_path / "whole", schedule, kind=kind)
    states, left_out = type(reference_head).states, []

    def partial(self, features, tokens, anchors=None):
        if anchors is None:
            yield from states(self, features, tokens, anchors)
            return
        left_out.append((~anchors).sum().item())
        for state in states(self, features, tokens):
            yield state.where(anchors[..., None], torch.nan)

    monkeypatch.setattr(type(reference_head), "states", partial)
    partial_head = run_training(tmp_path / "part", schedule, kind=kind)
    assert min(left_out) > 2
    # other labels are drawn in each step
    assert len({*left_out}) > 1
    assert_equal(reference_head.state_dict(), partial_head.state_dict())
    rows = [read_metrics(tmp_path / name / "metrics.jsonl")[-1] for name in ("whole", "part")]
    assert rows[0]["loss"] == rows[1]["loss"]


def test_a_checkpoint_of_other_optimizers_is_refused(tmp_path: Path):
    run_training(tmp_path, Schedule(phases={"corpus": phase()}, muon_learning_rate=0.02))
    with pytest.raises(InputError, match="resumes from its own checkpoints"):
        run_training(tmp_path, Schedule(phases={"corpus": phase(steps=9)}))


@pytest.mark.parametrize("draft_tokens", [0, 5])
def test_muon_takes_hidden_matrices_and_adamw_the_rest(draft_tokens: int):
    settings = {"kind": "mlp_speculator", "depth": 3, "draft_tokens": draft_tokens}
    head = build_head(settings, width=8, vocab_size=11)
    adamw, muon = optimizers(head, Schedule(phases={}, muon_learning_rate=0.1))
    shapes = [tuple(value.shape) for group in muon.param_groups for value in group["params"]]
    assert isinstance(muon, torch.optim.Muon)
    assert shapes == [(8, 8), (8, 8)]
    assert sum(len(group["params"]) for group in adamw.param_groups) == 4


def test_items_are_prefetched_in_order_by_one_thread_and_errors_come_in_their_place():
    before, threads = threading.active_count(), set[int]()

    def numbers() -> Iterator[float]:
        for number in (1, 1, 1, 0):
            threads.add(threading.get_ident())
            yield 1 / number

    items = prefetched(numbers(), ahead=2)
    assert [next(items) for _ in range(3)] == [1, 1, 1]
    with pytest.raises(ZeroDivisionError):
        next(items)
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    assert threading.active_count() == before


@pytest.mark.parametrize("native", [True, False])
def test_muon_equals_torchs_up_to_bfloat16_rounding(native: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("specheads.training.schedule.computes_bfloat16", lambda: native)
    our_parameter = nn.Parameter(torch.randn(24, 16))
    torch_parameter = nn.Parameter(our_parameter.detach().clone())
    start, kinds_of = our_parameter.detach().clone(), (Muon, torch.optim.Muon)
    pairs = [
        (parameter, kind([parameter], lr=0.02, weight_decay=0.1))
        for parameter, kind in zip((our_parameter, torch_parameter), kinds_of, strict=True)
    ]
    for _ in range(5):
        gradient = torch.randn(24, 16)
        for parameter, optimizer in pairs:
            parameter.grad = gradient.clone()
            optimizer.step()
    moved, apart = (our_parameter - start).norm(), (our_parameter - torch_parameter).norm()
    assert apart == 0 if native else 0 < apart < 0.02 * moved

"""Validation equals the objective and does not change training."""

from pathlib import Path

import numpy as np
import pytest
import torch

from specheads.core.drafter import Head
from specheads.data.packing import TokenBatch
from specheads.heads.load import build_for
from specheads.runs.trackers import read_metrics
from specheads.training.objective import Objective
from specheads.training.settings import Joint, Phase, Schedule
from specheads.training.teacher import Teacher
from specheads.training.validation import HeldOut, validate
from tests import tiny
from tests.packed import alone, packed, texts
from tests.training.test_joint import fresh_base
from tests.training.test_trainer import assert_equal, phase, run_training

DEPTH = 2


def measured(batches: list[TokenBatch], settings: Phase, kind: str = "eagle3") -> dict[str, float]:
    base = tiny.base()
    torch.manual_seed(1)
    head = build_for({"kind": kind, "depth": DEPTH}, base).double()
    teacher = Teacher(base, head)
    teacher.begin()
    return validate(HeldOut(batches, 0), teacher, Objective(head), settings, lambda values: values)


@pytest.mark.parametrize("weighting", ["geometric", "dpace"])
def test_validation_does_not_depend_on_batches_and_packing(weighting: str):
    settings = phase(weighting=weighting, scored_share=0.1)
    documents = texts()
    whole = measured([packed(documents)], settings)
    assert set(whole) == {
        "validation/loss", "validation/loss/depth_0", "validation/loss/depth_1",
        "validation/accept/depth_0", "validation/accept/depth_1",
    }  # fmt: skip
    for batch in (packed(documents), alone(documents)):
        found = measured(list(batch.parts(2)), settings)
        assert found == pytest.approx(whole, rel=1e-5, nan_ok=weighting == "dpace")
    assert measured([packed(documents)], settings) == whole


def held_out() -> HeldOut:
    batches, prompts = list(packed(texts()).parts(2)), tiny.prompts()
    return HeldOut(batches, every=2, prompts=prompts, new_tokens=8, identity="three of 8")


def trained(folder: Path, kind: str, held: HeldOut | None) -> Head:
    kind, _, adapter = kind.partition(" and ")
    joint = Joint(rank=2, dropout=0.5) if adapter else None
    schedule = Schedule(phases={"corpus": phase(scored_share=0.6, joint=joint)})
    base = fresh_base(dtype=torch.float32)
    return run_training(folder, schedule, kind=kind, base=base, held_out=held)


@pytest.mark.parametrize("kind", ["mlp_speculator", "eagle3", "dspark", "medusa and adapter"])
def test_validation_does_not_change_training(kind: str, tmp_path: Path):
    plain = trained(tmp_path / "plain", kind, None).state_dict()
    # (not Python's random state: the type checks of tests use it)
    state, drawn = torch.get_rng_state(), str(np.random.get_state())
    watched = trained(tmp_path / "watched", kind, held_out()).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    assert str(np.random.get_state()) == drawn
    assert_equal(plain, watched)
    rows = read_metrics(tmp_path / "watched" / "metrics.jsonl")
    found = [row for row in rows if "validation/loss" in row]
    assert [row["step"] for row in found] == [2, 4, 6]
    assert [row["tokens"] for row in found] == [64, 128, 192]
    assert all(1.0 <= row["validation/tokens_per_forward"] <= 1 + DEPTH for row in found)
    plain_rows = read_metrics(tmp_path / "plain" / "metrics.jsonl")
    assert [row["loss"] for row in rows if "loss" in row] == [row["loss"] for row in plain_rows]

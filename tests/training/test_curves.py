"""Golden loss curves: the losses of a few steps of each kind, from a fixed seed.

A change that intends other losses writes them anew: `python -m tests.training.test_curves`.
"""

import json
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from specheads.config.shared import TrackerSettings
from specheads.config.training import Phase, Schedule
from specheads.data.packing import PackedText
from specheads.heads.load import build_for_base, kinds
from specheads.runs.directory import RunDirectory
from specheads.runs.trackers import Tracker, read_metrics
from specheads.training import trainer
from tests import tiny
from tests.slow import each_kind
from tests.training.in_processes import documents, fixed_flops

FILE = Path(__file__).parent.parent / "golden" / "loss_curves.json"
SETTINGS = {
    **{"text": "corpus", "steps": 4, "batch_size": 4, "sequence_length": 40},
    **{"learning_rate": 1e-2, "scored_share": 0.6, "accumulation_steps": 2},
}


def loss_curve(kind: str, folder: Path) -> list[dict[str, float]]:
    """Return the losses and acceptances of each step, in float64."""
    base = tiny.base("llama")
    torch.manual_seed(0)
    # some tokens cannot be drafted
    head = build_for_base(
        {"kind": kind, "depth": 2, "draft_tokens": 50}, base, torch.arange(tiny.VOCAB)
    ).double()
    text = PackedText(documents(), sequence_length=40, batch_size=4)
    phases = {
        "corpus": Phase(**SETTINGS, decay=0.8),
        "distilled": Phase(**SETTINGS, loss="lk_hybrid", decay=0.5),
    }
    run = RunDirectory(folder)
    with fixed_flops():
        trainer.train(
            base,
            head,
            Schedule(phases=phases),
            lambda *_: text,
            run,
            Tracker(run.metrics, TrackerSettings()),
            Accelerator(cpu=True),
            log_every=1,
        )
    names = ("loss", "accept")
    return [
        {name: value for name, value in row.items() if name.startswith(names)}
        for row in read_metrics(run.metrics)
    ]


@cache
def first_curve(kind: str) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        return loss_curve(kind, Path(folder))


@pytest.mark.parametrize("kind", kinds())
def test_losses_of_a_training_equal_the_stored_ones(kind: str):
    curve = first_curve(kind)
    stored = json.loads(FILE.read_text())[kind]
    assert len(curve) == len(stored) == 8
    for row, stored_row in zip(curve, stored, strict=True):
        # sums in another order on another processor
        assert row == pytest.approx(stored_row, rel=1e-7, abs=1e-12)


@pytest.mark.parametrize("kind", each_kind())
def test_losses_of_a_second_training_are_the_same(kind: str, tmp_path: Path):
    assert loss_curve(kind, tmp_path) == first_curve(kind)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        curves = {kind: loss_curve(kind, Path(scratch) / kind) for kind in kinds()}
    FILE.write_text(json.dumps(curves, indent=1) + "\n")

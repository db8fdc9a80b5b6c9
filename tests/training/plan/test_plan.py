"""What a plan says, and the batch that is taken by itself."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from specheads import config
from specheads.commands import _compose
from specheads.core.errors import InputError
from specheads.training.plan import batch, whole
from specheads.training.plan.batch import largest, settle_batches
from specheads.training.plan.ledger import Ledger
from specheads.training.plan.whole import Plan, plan
from specheads.training.run import accelerator_here

ALONE = ("recipe=tiny_code", "~schedule.phases.distilled")


def settings_of(*overrides: str) -> config.Train:
    return _compose.settings_of("train", [*ALONE, *overrides])


def planned(*overrides: str) -> Plan:
    return plan(settings_of(*overrides), accelerator_here(), timed=False)


def test_a_ledger_holds_what_lives_at_the_worst_moment_and_computes_nothing():
    ledger = Ledger()
    with ledger.open():
        with ledger.part("kept"):
            kept = torch.zeros(2**40)
        half = kept[: 2**39] + 1
        del half
        small = torch.ones(4)
    assert ledger.peak() == {"kept": 2**42, "backward and others": 2**41}
    del small


def test_what_is_planned_is_the_weights_gradients_and_moments_of_the_head():
    (stage,) = planned("head=medusa", "schedule.muon_learning_rate=0").stages
    shapes = stage.memory
    assert shapes["optimizer state"] == pytest.approx(2 * shapes["gradients"], rel=0.01)
    assert shapes["gradients"] <= shapes["head weights"]
    assert shapes["base weights"] > 6e6 * 4


def test_more_rows_take_more_and_parts_of_them_less():
    one, two = planned().peak.total, planned("schedule.phases.corpus.batch_size=32").peak.total
    parts = planned(
        "schedule.phases.corpus.batch_size=32", "schedule.phases.corpus.accumulation_steps=16"
    ).peak.total
    assert one < two
    assert parts < two


@pytest.mark.slow
def test_where_it_does_not_fit_the_plan_says_what_does(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(whole, "available_bytes", lambda _: 2**28)
    found = planned("head=eagle3", "schedule.phases.corpus.batch_size=64")
    assert found.fits is False
    assert found.hours is None
    (change,) = found.changes
    parts = int(change.partition("accumulation_steps=")[2].partition(" ")[0])
    again = planned(
        "head=eagle3", "schedule.phases.corpus.batch_size=64",
        f"schedule.phases.corpus.accumulation_steps={parts}",
    )  # fmt: skip
    assert again.fits


def test_the_largest_number_that_fits_is_found_within_a_sixteenth():
    assert largest(lambda rows: 10 + 3 * rows, 310) in range(94, 101)
    assert largest(lambda rows: 10 + 3 * rows, 13) == 1
    assert largest(lambda rows: 10 + 3 * rows, 12) == 0


@pytest.mark.slow
def test_an_automatic_batch_is_a_number_that_fits_and_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(batch, "available_bytes", lambda _: 2**29)
    settings, told = settings_of("schedule.phases.corpus.batch_size=auto"), list[str]()
    settle_batches(settings, accelerator_here(), told.append)
    size = settings.schedule.phases["corpus"].batch_size
    assert type(size) is int
    assert size > 1
    assert told == [f"phase 'corpus': batch_size=auto is {size}"]
    monkeypatch.setattr(batch, "available_bytes", lambda _: 2**25)
    with pytest.raises(InputError, match="accumulation_steps"):
        settle_batches(
            settings_of("schedule.phases.corpus.batch_size=auto"), accelerator_here(), told.append
        )


def test_a_run_that_goes_on_keeps_the_batch_it_began_with(tmp_path: Path):
    settings: Any = settings_of("schedule.phases.corpus.batch_size=3", f"run_dir={tmp_path}")
    (tmp_path / "config.yaml").write_text(_compose.as_yaml(settings))
    again = settings_of("schedule.phases.corpus.batch_size=auto", f"run_dir={tmp_path}")
    settle_batches(again, accelerator_here(), lambda _: None)
    assert yaml.safe_load(_compose.as_yaml(again)) == yaml.safe_load(_compose.as_yaml(settings))


@pytest.mark.parametrize("size", ["0", "many", "true", "1.5"])
def test_a_batch_is_a_number_or_auto(size: str):
    with pytest.raises(InputError, match="a whole number, at least 1, or auto"):
        settings_of(f"schedule.phases.corpus.batch_size={size}")

"""The plan of a run, and batch_size=auto."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from specheads.base.model import FrozenBase
from specheads.commands._dry_run import setup_of
from specheads.commands.train import _settle_batches
from specheads.config import compose
from specheads.config.commands import Train
from specheads.core.errors import InputError
from specheads.core.machine import held_bytes
from specheads.heads.load import kinds
from specheads.runs.directory import RunDirectory
from specheads.training import depth_loss
from specheads.training import plan as planner
from specheads.training.plan import PeakMemory, Setup, Shapes, Trial, largest_batches, plan
from specheads.training.processes import accelerator_of_environment
from specheads.training.schedule import placed
from tests import tiny

ALONE = "~schedule.phases.distilled"
AUTO = "schedule.phases.corpus.batch_size=auto"
ACCELERATOR = accelerator_of_environment("float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.saved(tmp_path_factory.mktemp("base"), num_hidden_layers=4)


def settings_of(folder: Path, *overrides: str) -> Train:
    always = ["recipe=smoke", f"base.model={folder}", "base.dtype=float32"]
    always += ["schedule.phases.corpus.sequence_length=64", "schedule.phases.corpus.steps=10"]
    if ALONE not in overrides:
        always.append("schedule.phases.distilled.distill.new_tokens=16")
    return compose.settings_of("train", [*always, *overrides])


def setup(folder: Path, *overrides: str) -> Setup:
    return setup_of(settings_of(folder, *overrides))


def planned(folder: Path, *overrides: str) -> dict[str, Any]:
    return plan(setup(folder, *overrides), ACCELERATOR)


def loaded(folder: Path) -> FrozenBase:
    return FrozenBase.load(str(folder), dtype="float32")


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set the room of the device, in bytes above what this process has."""

    def set_room(more: int) -> None:
        monkeypatch.setattr(planner, "room_of", lambda device: held_bytes(device) + more)

    return set_room


@pytest.mark.parametrize("kind", kinds())
def test_memory_from_shapes_equals_real_steps(kind, folder, monkeypatch):
    for table in (depth_loss.CHUNK_LOGITS, depth_loss.BLOCK_LOGITS):
        monkeypatch.setitem(table, "cpu", table["cuda"])
    # a CPU reads packed documents one by one, other devices use masks
    plain = ("schedule.muon_learning_rate=0", "schedule.phases.corpus.packing=none", ALONE)
    wanted = setup(folder, f"head={kind}", *plain)
    shapes, (phase,) = Shapes(wanted, torch.device("cpu")), placed(wanted.schedule)
    real = Trial(wanted, loaded(folder), ACCELERATOR)
    real.step(phase, 2)
    with PeakMemory() as memory:
        real.step(phase, 2)
    states = [one.state.values() for one in real.stepper.optimizers]
    moments = [value for some in states for state in some for value in state.values()]
    assert shapes.moments == pytest.approx(sum(one.nbytes for one in moments), rel=0.01)
    weights = sum(shapes.weights().values())
    # on the meta device dflash's attention stores weights that the kernels do not
    most = 1.3 if kind == "dflash" else 1.15
    found = sum(shapes.step(phase, 2).values()) / (weights + memory.peak)
    assert 0.85 <= found <= most


def test_plan_has_all_parts(folder: Path):
    found = planned(folder)
    assert list(found["memory_bytes"]) == ["corpus", "distilled: text", "distilled"]
    assert all(size > 0 for size in found["memory_bytes"]["corpus"].values())
    assert found["fits"]
    assert found["peak_bytes"] > 2**20
    corpus = found["phases"]["corpus"]
    assert corpus["tokens"] == 10 * corpus["batch_size"] * 64
    assert corpus["flops"] > corpus["tokens"]
    assert list(found["hours"]) == list(found["memory_bytes"])
    assert all(hours > 0 for hours in found["hours"].values())
    assert all(size > 0 for size in found["disk_bytes"].values())
    yaml.safe_dump(found)


def test_missing_device_is_planned_from_shapes(folder: Path):
    found = planned(folder, "base.device=cuda:7")
    assert (found["fits"], found["room_bytes"], found["hours"]) == (None, None, {})
    assert "Python and libraries" not in found["memory_bytes"]["corpus"]
    assert "this machine has no cuda:7" in found["note"]


def test_plan_that_does_not_fit_names_the_settings(folder: Path, room: Any):
    room(0)
    found = planned(folder, ALONE)
    assert (found["fits"], found["hours"]) == (False, {})
    assert "the run does not fit; raise accumulation_steps" in found["note"]


@pytest.mark.parametrize(
    ("gib", "seconds", "rows"), [(8, 0.0, 4), (100, 0.0, 64), (100, 5.0, 4), (0, 0.0, 1)]
)
def test_automatic_batch_fits_memory_and_time(gib, seconds, rows, folder, monkeypatch):
    """A step takes 1 GiB and so many seconds for each row, next to 2 GiB."""

    def step_bytes(_: Trial, phase: Any, rows: int) -> tuple[int, int, float]:
        del phase
        return 2 * 2**30, (2 + rows) * 2**30, rows * seconds

    monkeypatch.setattr(Trial, "step_bytes", step_bytes)
    monkeypatch.setattr(planner, "room_of", lambda _: gib * 2**30)
    wanted = setup(folder, ALONE, "head=medusa", AUTO)
    assert largest_batches(wanted, loaded(folder), ACCELERATOR) == {"corpus": rows}


def test_auto_batch_is_printed_and_a_resumed_run_keeps_it(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(planner, "MAX_ROWS", 2)
    told: list[str] = []
    run, settings = RunDirectory(tmp_path), settings_of(folder, ALONE, AUTO)
    assert _settle_batches(settings, run, ACCELERATOR, None, told.append) is not None
    assert told == ["phase 'corpus': batch_size=auto is 2"]
    run.config.write_text(compose.as_yaml(settings))
    again = settings_of(folder, ALONE, AUTO)
    assert _settle_batches(again, run, ACCELERATOR, None, told.append) is None
    assert asdict(again) == asdict(settings)


@pytest.mark.parametrize("size", ["0", "many", "true", "1.5"])
def test_a_batch_is_a_number_or_auto(size: str, folder: Path):
    with pytest.raises(InputError, match="a whole number, at least 1, or auto"):
        settings_of(folder, f"schedule.phases.corpus.batch_size={size}")

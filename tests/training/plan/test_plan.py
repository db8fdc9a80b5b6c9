"""What a plan says, and the batch that is taken by itself."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate import Accelerator
from torch.distributed.device_mesh import DeviceMesh

from specheads import config
from specheads.base.model import FrozenBase
from specheads.config import compose
from specheads.core.errors import InputError
from specheads.core.machine import held_bytes
from specheads.heads.load import build_for, kinds
from specheads.training import processes
from specheads.training.losses import depth_loss
from specheads.training.plan import batch, whole
from specheads.training.plan.batch import climb, largest, settle_batches
from specheads.training.plan.ledger import Ledger
from specheads.training.plan.place import target_of
from specheads.training.plan.shapes import GRADIENTS, OPTIMIZER, Shapes
from specheads.training.plan.trial import LIBRARIES, REST, Trial, Tried
from specheads.training.plan.whole import Plan, plan
from specheads.training.processes import accelerator_of_environment
from specheads.training.schedule import placed
from tests import tiny

ALONE = "~schedule.phases.distilled"
ACCELERATOR = accelerator_of_environment("float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.saved(tmp_path_factory.mktemp("base"), num_hidden_layers=4)


@pytest.fixture(autouse=True)
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time no more than one step: what is tested is not how long it takes."""
    monkeypatch.setattr("specheads.training.plan.trial.LEAST_STEPS", 1)
    monkeypatch.setattr("specheads.training.plan.trial.MOST_STEPS", 1)


def settings_of(folder: Path, *overrides: str) -> config.Train:
    always = ("recipe=smoke", f"base.model={folder}", "base.dtype=float32")
    shapes = ("schedule.phases.corpus.sequence_length=64", "schedule.phases.corpus.steps=10")
    distilled = ("schedule.phases.distilled.distill.new_tokens=16",) if not any(
        one.startswith("~schedule") for one in overrides
    ) else ()  # fmt: skip
    return compose.settings_of("train", [*always, *shapes, *distilled, *overrides])


def planned(folder: Path, *overrides: str) -> Plan:
    return plan(settings_of(folder, *overrides), ACCELERATOR)


@pytest.fixture
def climbing(folder: Path) -> Iterator[Trial]:
    settings = settings_of(folder, ALONE, "head=medusa")
    trial = Trial(settings, FrozenBase.load(str(folder), dtype="float32"), ACCELERATOR, 0)
    yield trial
    trial.leave()


def test_a_ledger_holds_what_lives_at_the_worst_moment_and_views_nothing():
    kept = torch.ones(1000)
    with Ledger() as ledger:
        views = kept[:500].add_(1), kept.reshape(10, 100)
        first = torch.ones(3000) + 1
        del first
        second = torch.ones(1000)
    assert ledger.peak == {"backward and others": 2 * 3000 * 4}
    del views, second


def test_a_ledger_gives_shapes_what_depends_on_content():
    with Ledger(rows=7) as ledger:
        mask = torch.empty(4, 5, dtype=torch.bool, device="meta")
        rows, places = mask.nonzero(as_tuple=True)
        assert int(rows.sum()) == 1
    assert len(rows) == len(places) == 7
    assert sum(ledger.peak.values()) >= 20 + 2 * 7 * 8


@pytest.mark.parametrize("kind", kinds())
def test_shapes_alone_say_what_real_steps_hold(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    for table in (depth_loss.CHUNK_LOGITS, depth_loss.BLOCK_LOGITS):
        monkeypatch.setitem(table, "cpu", table["cuda"])
    # packed documents are read one by one on a processor, and with masks elsewhere
    plain = ("schedule.muon_learning_rate=0", "schedule.phases.corpus.packing=none")
    settings = settings_of(folder, f"head={kind}", *plain)
    (phase, _), target = placed(settings.schedule), target_of(settings.base, ACCELERATOR)
    base = FrozenBase.load(str(folder), dtype="float32")
    trial = Trial(settings, base, ACCELERATOR, 0)
    real = trial.step(phase, 2, timed=False).memory
    shapes = Shapes(settings, target)
    computed = shapes.step(phase, 2)
    for part in ("base weights", "head weights", OPTIMIZER):
        assert computed[part] == pytest.approx(real[part], rel=0.01)
    real.pop(REST, 0)
    # where it has no content torch's own attention keeps the weights that its kernels do not
    most = 1.3 if kind == "dflash" else 1.15
    assert 0.85 * sum(real.values()) <= sum(computed.values()) <= most * sum(real.values())


def test_a_plan_has_every_part_and_says_where_it_comes_from(folder: Path):
    found = planned(folder)
    assert [stage.name for stage in found.stages] == ["corpus", "distilled: text", "distilled"]
    corpus = found.stages[0].memory
    assert corpus[LIBRARIES] > 2**20
    assert corpus[OPTIMIZER] > 0
    assert found.fits
    (first, second) = found.phases
    assert first.tokens == 10 * first.batch_size * 64
    assert first.hours
    assert second.writing_hours
    whole = first.hours + (second.hours or 0.0) + second.writing_hours
    assert found.hours == pytest.approx(whole)
    assert all(size > 0 for size in found.disk.values())


def test_a_batch_that_grows_reads_fewer_tokens(folder: Path):
    ramp = ("schedule.phases.corpus.first_batch_share=0.5", "schedule.phases.corpus.batch_size=8")
    (phase,) = planned(folder, ALONE, *ramp).phases
    assert 10 * 4 * 64 < phase.tokens < 10 * 8 * 64


def test_more_rows_take_more_and_parts_of_them_less(climbing: Trial):
    (phase,) = placed(climbing.settings.schedule)
    found = climb(climbing, phase, 10**12, 10, timed=False)
    assert list(found.tried) == [1, 2, 8, 10]
    sizes = [one.total - one.memory.get(REST, 0) for one in found.tried.values()]
    assert sizes == sorted(set(sizes))
    assert found.needed(64) > found.needed(10)


def test_no_step_is_tried_that_would_not_fit(climbing: Trial, monkeypatch: pytest.MonkeyPatch):
    # tensors alone: what libraries keep of former tests moves by more than rows this small take
    monkeypatch.setattr("specheads.training.plan.trial.peak_bytes", lambda _: 0)
    (phase,) = placed(climbing.settings.schedule)
    small = climb(climbing, phase, 10**12, 2, timed=False)
    found = climb(climbing, phase, small.needed(5), 1000, timed=False)
    assert 4 <= max(found.tried) <= 6


@pytest.mark.parametrize(("room", "tried"), [(150, [1, 2, 4]), (119, [1]), (120, [1, 2])])
def test_twice_the_first_rows_are_not_tried_where_they_would_not_fit(
    room: int, tried: list[int], climbing: Trial, monkeypatch: pytest.MonkeyPatch
):
    def step(phase: Any, rows: int, *, timed: bool) -> Tried:
        del phase, timed
        return Tried({"base weights": 90, "loss": 10, "activations of the head": 10 * rows}, 0.0)

    monkeypatch.setattr(climbing, "step", step)
    (phase,) = placed(climbing.settings.schedule)
    assert list(climb(climbing, phase, room, 4, timed=False).tried) == tried


def test_where_not_even_one_sequence_fits_the_plan_says_what_is_left(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    def too_much(*_: Any, **__: Any) -> Tried:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Trial, "step", too_much)
    found = planned(folder, ALONE)
    assert found.fits is False
    assert [stage.name for stage in found.stages] == ["corpus"]
    assert any("a smaller base" in change for change in found.changes)
    assert "no memory for the first step" in found.notes[-1]


def test_processes_that_read_the_same_rows_are_one(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    monkeypatch.setattr(Trial, "step", lambda *_, **__: Tried({"loss": 1}, 0.0))
    one = ("schedule.phases.corpus.batch_size=1", ALONE, "head=medusa")
    with pytest.raises(InputError, match="2 processes with"):
        planned(folder, *one)
    for module in (whole, batch):
        monkeypatch.setattr(module, "readers", lambda *_: {"rank": 0, "world_size": 1})
    found = planned(folder, *one)
    assert (found.processes, found.shares) == (2, 1)
    monkeypatch.setattr(batch, "MOST_ROWS", 2)
    assert planned(folder, *one, "schedule.phases.corpus.batch_size=auto").phases[0].batch_size == 2


def test_so_are_those_of_tensor_parallelism_where_nothing_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    monkeypatch.setattr(DeviceMesh, "size", lambda _: 2)
    part = DeviceMesh("cpu", [0], _init_backend=False, _rank=0)
    monkeypatch.setattr(processes, "init_device_mesh", lambda *_, **__: {"part": part})
    monkeypatch.setattr(whole, "room_of", lambda _: 2**10)
    one = ("schedule.phases.corpus.batch_size=1", ALONE, "head=medusa")
    found = planned(folder, *one)
    assert (found.processes, found.shares) == (2, 1)
    # a base that is placed by hand is whole in each process
    with pytest.raises(InputError, match="2 processes with"):
        planned(folder, *one, "base.device=cuda:7")


def test_a_head_that_is_trained_further_is_planned_as_it_is(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Trial, "step", lambda *_, **__: Tried({"loss": 1}, 0.0))
    base = FrozenBase.load(str(folder), dtype="float32")
    build_for({"kind": "medusa", "depth": 3}, base).save_pretrained(tmp_path)
    named = (f"init={tmp_path}", "head=medusa", "head.depth=2", ALONE)
    for device in ("cpu", "cuda:7"):
        planned(
            folder, *named, f"base.device={device}", "schedule.phases.corpus.depth_weights=[1,1,1]"
        )
        with pytest.raises(InputError, match="each of the head's 3 depths, got 2"):
            planned(
                folder,
                *named,
                f"base.device={device}",
                "schedule.phases.corpus.depth_weights=[1,1]",
            )


def test_where_it_does_not_fit_the_plan_says_what_does(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    room = held_bytes(torch.device("cpu")) + 2**26
    monkeypatch.setattr(whole, "room_of", lambda _: room)
    many = ("schedule.phases.corpus.batch_size=2000", "head=medusa", ALONE)
    found = planned(folder, *many)
    assert found.fits is False
    (change,) = found.changes
    parts = int(change.partition("accumulation_steps=")[2].partition(" ")[0])
    assert 1 < parts < 2000
    assert "extended linearly" in found.notes[-1]


def test_a_device_that_is_not_here_is_planned_by_shapes(folder: Path):
    found = planned(folder, "base.device=cuda:7")
    assert found.room is None
    assert found.fits is None
    assert found.hours is None
    assert {"base weights", OPTIMIZER, GRADIENTS, "loss"} <= found.stages[0].memory.keys()
    assert "no cuda:7" in found.notes[0]
    with pytest.raises(InputError, match="no cuda:7"):
        planned(folder, "base.device=cuda:7", "schedule.phases.corpus.batch_size=auto")


def test_weights_that_are_too_large_are_not_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(whole, "room_of", lambda _: 2**10)
    found = planned(folder, ALONE)
    assert found.fits is False
    assert "do not fit" in found.notes[0]
    assert any("a smaller base" in change for change in found.changes)


def test_the_largest_number_that_fits_is_found_within_a_sixteenth():
    assert largest(lambda rows: 10 + 3 * rows, 310) in range(94, 101)
    assert largest(lambda rows: 10 + 3 * rows, 13) == 1
    assert largest(lambda rows: 10 + 3 * rows, 12) == 0


def test_an_automatic_batch_is_a_number_that_fits_and_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    room = held_bytes(torch.device("cpu")) + 2**26
    monkeypatch.setattr(batch, "room_of", lambda _: int(room / 0.85))
    auto = ("schedule.phases.corpus.batch_size=auto", ALONE, "head=medusa")
    settings, told = settings_of(folder, *auto), list[str]()
    assert settle_batches(settings, ACCELERATOR, told.append) is not None
    size = settings.schedule.phases["corpus"].batch_size
    assert type(size) is int
    assert size > 1
    assert told == [f"phase 'corpus': batch_size=auto is {size}"]
    monkeypatch.setattr(batch, "room_of", lambda _: 2**20)
    with pytest.raises(InputError, match="accumulation_steps"):
        settle_batches(settings_of(folder, *auto), ACCELERATOR, told.append)


def test_a_run_that_goes_on_keeps_the_batch_it_began_with(folder: Path, tmp_path: Path):
    run = f"run_dir={tmp_path}"
    settings: Any = settings_of(folder, "schedule.phases.corpus.batch_size=3", run)
    (tmp_path / "config.yaml").write_text(compose.as_yaml(settings))
    again = settings_of(folder, "schedule.phases.corpus.batch_size=auto", run)
    assert settle_batches(again, ACCELERATOR, lambda _: None) is None
    assert yaml.safe_load(compose.as_yaml(again)) == yaml.safe_load(compose.as_yaml(settings))


@pytest.mark.parametrize("size", ["0", "many", "true", "1.5"])
def test_a_batch_is_a_number_or_auto(size: str, folder: Path):
    with pytest.raises(InputError, match="a whole number, at least 1, or auto"):
        settings_of(folder, f"schedule.phases.corpus.batch_size={size}")

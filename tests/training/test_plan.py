"""The plan of a run, and batch_size=auto."""

from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import LlamaConfig

from specheads.base.model import FrozenBase
from specheads.commands._dry_run import setup_of
from specheads.commands.train import _settle_batches
from specheads.config import compose
from specheads.config.commands import Train
from specheads.core.machine import held_bytes
from specheads.heads.load import build_for_base, kinds
from specheads.runs.directory import RunDirectory
from specheads.training import depth_loss
from specheads.training import plan as planner
from specheads.training.plan import PeakMemory, Setup, Shapes, largest_batches, plan
from specheads.training.processes import accelerator_of_environment
from specheads.training.schedule import schedule_phases
from specheads.training.step import StepRunner
from tests import tiny

CPU = torch.device("cpu")
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


@cache
def loaded(folder: Path, *, ends_only: bool = False) -> FrozenBase:
    return FrozenBase.load(str(folder), dtype="float32", ends_only=ends_only)


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set the room of the device, in bytes above what this process has."""

    def set_room(more: int) -> None:
        monkeypatch.setattr(planner, "room_of", lambda device: held_bytes(device) + more)

    return set_room


def stepping(wanted: Setup, base: FrozenBase) -> tuple[StepRunner, Callable[[], object]]:
    """Return a function that takes a real step of two rows of the only phase."""
    (phase,), head = schedule_phases(wanted.schedule), build_for_base(wanted.head, base)
    stepper = StepRunner(wanted.teacher(base, head), wanted.schedule, ACCELERATOR, 0)
    stepper.teacher.begin(phase)
    return stepper, lambda: stepper.step(wanted.batch(phase.settings, 2, base, head), phase, 0)


SOURCES = [*((kind, "local") for kind in kinds()), ("eagle3", "vllm"), ("medusa", "vllm")]


@pytest.mark.parametrize(("kind", "source"), SOURCES)
def test_memory_from_shapes_equals_real_steps(kind, source, folder, monkeypatch):
    for table in (depth_loss.CHUNK_LOGITS, depth_loss.BLOCK_LOGITS):
        monkeypatch.setitem(table, "cpu", table["cuda"])
    # a CPU reads packed documents one by one, other devices use masks
    plain = ("schedule.muon_learning_rate=0", "schedule.phases.corpus.packing=none", ALONE)
    wanted = setup(folder, f"head={kind}", f"features={source}", *plain)
    shapes, (phase,) = Shapes(wanted, torch.device("cpu")), schedule_phases(wanted.schedule)
    real, step = stepping(wanted, loaded(folder, ends_only=source == "vllm"))
    step()
    with PeakMemory() as memory:
        step()
    states = [one.state.values() for one in real.optimizers]
    moments = [value for some in states for state in some for value in state.values()]
    assert shapes.moments == pytest.approx(sum(one.nbytes for one in moments), rel=0.01)
    weights = sum(shapes.weights().values())
    # on the meta device dflash's attention stores weights that the kernels do not
    most = 1.3 if kind == "dflash" else 1.15
    parts = shapes.step(phase, 2)
    # they are there before the step
    parts.pop("hidden states fetched ahead", None)
    found = sum(parts.values()) / (weights + memory.peak)
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


def test_own_drafts_are_planned_with_the_forward_that_reads_them(folder: Path):
    words = ("head=redrafter", "schedule.phases.corpus.weighting=dpace", ALONE)
    plain, own = (
        planned(folder, *words, f"schedule.phases.corpus.own_drafts={share}") for share in (0, 1)
    )
    assert own["phases"]["corpus"]["flops"] > 1.2 * plain["phases"]["corpus"]["flops"]
    assert own["hours"]["corpus"] > 0


def test_plan_of_a_training_from_servers_has_both_sides(folder: Path):
    at_server = ("features=vllm", "features.url=[http://a:1,http://b:1]", "head=eagle3", ALONE)
    found = planned(folder, *at_server, "features.concurrency=3")
    ends, whole, server = loaded(folder, ends_only=True).model, loaded(folder), found["server"]
    assert found["memory_bytes"]["corpus"]["base weights"] == _bytes(ends)
    assert (server["layers"], whole.width) == ([0, 1, 2, 3, 4], 32)
    # the states in float32, and the token id
    states, token = 5 * 32 * 4, 5 * 32 * 4 + 8
    assert server["feature_bytes_per_token"] == token
    assert server["folder_bytes"] == 3 * 2 * 64 * token
    slot = whole.slot_bytes // 2 + states
    assert server["bytes_per_gpu_by_gpus"][2] == {
        "weights": _bytes(whole.model) // 2,
        "cache per token": slot,
        "cache of all open requests": 3 * 64 * slot,
    }
    corpus = found["phases"]["corpus"]
    assert corpus["feature_bytes"] == corpus["tokens"] * token
    assert found["hours"]["corpus"] > 0
    yaml.safe_dump(found)


def _bytes(model: torch.nn.Module) -> int:
    return sum(one.nbytes for one in model.parameters())


def test_base_of_70_billion_is_planned_from_its_config(tmp_path: Path):
    LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072,
    ).save_pretrained(tmp_path)  # fmt: skip
    more = ("base.dtype=bfloat16", "base.device=cuda:7", "features=vllm", "head=mlp_speculator")
    found = planned(tmp_path, *more, ALONE)
    ends = 2 * (2 * 128256 * 8192 + 8192)
    assert found["memory_bytes"]["corpus"]["base weights"] == ends
    per_gpu = found["server"]["bytes_per_gpu_by_gpus"]
    assert per_gpu[1]["weights"] == 2 * 70_553_706_496
    assert per_gpu[8]["weights"] == per_gpu[1]["weights"] // 8
    # keys and values are shared among the GPUs, and states are not
    assert per_gpu[1]["cache per token"] == 80 * 2 * 8 * 128 * 2 + 2 * 8192 * 2
    assert per_gpu[8]["cache per token"] == 80 * 2 * 128 * 2 + 2 * 8192 * 2


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
    found = planned(folder, "schedule.phases.distilled.distill.batch_size=9999")
    assert "lower schedule.phases.distilled.distill.batch_size" in found["note"]


@pytest.mark.parametrize(
    ("gib", "tokens", "rows"), [(10, 2**20, 4), (100, 2**20, 64), (100, 4 * 64, 4), (0, 2**20, 1)]
)
def test_automatic_batch_fits_memory_and_tokens(gib, tokens, rows, folder, monkeypatch):
    """A step takes 1 GiB for each row, next to 2 GiB; a fifth of the memory stays free."""

    def step(_: Shapes, phase: Any, rows: int) -> dict[str, int]:
        del phase
        return {"all": (2 + rows) * 2**30}

    monkeypatch.setattr(Shapes, "step", step)
    monkeypatch.setattr(planner, "MAX_TOKENS", tokens)
    monkeypatch.setattr(planner, "room_of", lambda _: gib * 2**30 + held_bytes(CPU) / 0.8)
    wanted = setup(folder, ALONE, "head=medusa", AUTO)
    assert largest_batches(wanted, ACCELERATOR) == {"corpus": rows}


def test_auto_batch_is_printed_and_a_resumed_run_keeps_it(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(planner, "MAX_TOKENS", 2 * 64)
    told: list[str] = []
    run, settings = RunDirectory(tmp_path), settings_of(folder, ALONE, AUTO)
    _settle_batches(settings, run, ACCELERATOR, told.append)
    assert told == ["phase 'corpus': batch_size=auto is 2"]
    run.config.write_text(compose.as_yaml(settings))
    monkeypatch.delattr(planner, "Shapes")
    again = settings_of(folder, ALONE, AUTO)
    _settle_batches(again, run, ACCELERATOR, told.append)
    assert asdict(again) == asdict(settings)
